"""JSON in and out: files (or ``-``) that commands read, and the one document that a command prints."""

from __future__ import annotations

import argparse
import json
import math
import sys
from pathlib import Path
from typing import Any

from cortex_training.errors import ConfigurationError
from cortex_training.protocol.results import as_lists


def read_object(name: str) -> dict[str, Any]:
    """The JSON object in file `name`, or on standard input for ``-``. Raises `ConfigurationError`."""
    try:
        text = sys.stdin.read() if name == "-" else Path(name).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{name}: cannot be read: {error}") from None
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ConfigurationError(f"{name}: is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ConfigurationError(f"{name}: must hold a JSON object, found a {type(value).__name__}")
    return value


def print_document(options: argparse.Namespace, value: Any) -> None:
    """Print `value` as JSON, keys sorted; tensors become lists. It is complete before its first character appears."""
    document = plain(value)
    if options.compact:
        text = json.dumps(document, sort_keys=True, separators=(",", ":"))
    else:
        text = json.dumps(document, sort_keys=True, indent=2)
    print(text, flush=True)


def plain(value: Any) -> Any:
    """`value` as JSON can hold it, tensors as lists."""
    return _plain(as_lists(value))


def _plain(value: Any) -> Any:
    """JSON for whatever a backend returned: NaN has no number in JSON, bytes and unknown types no value."""
    if isinstance(value, dict):
        return {str(key): _plain(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if value is None or isinstance(value, str | int | float):
        return value
    return repr(value)
