"""Tell a JSON document that is still being written from one that is broken."""

from __future__ import annotations

import json
import re
from typing import Any

_LITERALS = ("true", "false", "null", "NaN", "Infinity", "-Infinity")
_NUMBER_TAIL = re.compile(r"\.|\.?[eE][+-]?", re.ASCII)
# Also four digits: the decoder refuses an escape that the text ends right behind.
_ESCAPE_TAIL = re.compile(r"u?[0-9A-Fa-f]{0,4}", re.ASCII)


class CutOff(Exception):
    """The document ends before its end, and is faultless up to there: its writer is not done."""


def parse_document(data: bytes) -> Any:
    """The document in `data`, read as Python's ``json`` writes it: bare NaN, Infinity and -Infinity are numbers.

    Raises CutOff for a proper beginning of a document (nothing at all included), ValueError for any other fault.
    """
    text, torn = _decode(data)
    try:
        document = json.loads(text)
    except json.JSONDecodeError as fault:
        if _ends_early(fault):
            raise CutOff from None
        raise
    except RecursionError:
        raise ValueError("the document is nested too deeply") from None
    if torn:
        raise ValueError("data after the document")
    return document


def _decode(data: bytes) -> tuple[str, bool]:
    """The text, and whether a character was torn at its very end (its bytes are left out)."""
    try:
        return data.decode(), False
    except UnicodeDecodeError as fault:
        if fault.reason != "unexpected end of data" or fault.end != len(data):
            raise
        return data[: fault.start].decode(), True


def _ends_early(fault: json.JSONDecodeError) -> bool:
    """Whether a decoder stopped for want of more text, rather than because of the text."""
    rest = fault.doc[fault.pos :]
    if not rest.strip(" \t\n\r"):
        return True
    if fault.msg.startswith("Unterminated string"):
        return True
    if fault.msg.startswith("Invalid \\uXXXX escape"):
        return _ESCAPE_TAIL.fullmatch(rest) is not None
    if fault.msg == "Expecting value":
        # A lone minus begins a number as well as -Infinity.
        return any(literal.startswith(rest) for literal in _LITERALS)
    # "12.", "12e" and "12e+": the decoder took the 12, and stumbles over what follows it.
    return _NUMBER_TAIL.fullmatch(rest) is not None and fault.doc[fault.pos - 1 : fault.pos].isdigit()
