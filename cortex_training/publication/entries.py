"""The name of a publication, which is all there is to it: ``<epoch>-<step>-<path>``.

Epoch and step are 20 decimal digits, so that names sort as numbers do; the path is the save's path below the root in
RFC 4648 base32, upper case, without padding. Two entries of the same epoch and step may both exist; the one with the
greater name counts as the later.
"""

from __future__ import annotations

import base64
import binascii
import re
from dataclasses import dataclass, field

from cortex_training.errors import ConfigurationError
from cortex_training.paths import safe_relative
from cortex_training.publication.errors import LogError

MAX_NUMBER = 2**64 - 1
_NUMBERS_BYTES = 42

# What pruning such a "save" would take along: the log, the claims, the journal.
_KEPT_FOLDERS = ("pub", "epochs", "journal")

_GRAMMAR = re.compile(r"([0-9]{20})-([0-9]{20})-([A-Z2-7]+)", re.ASCII)
_DIGITS = re.compile(r"[0-9]{1,20}", re.ASCII)


@dataclass(frozen=True)
class Entry:
    """One publication. `save` is the path of the save below the root, e.g. ``exec/1f0c2a9b4d5e-e1/cp_…``."""

    epoch: int
    step: int
    save: str
    root: str = field(default="", compare=False)

    @property
    def name(self) -> str:
        """The name in ``pub/``; the order of names is the order of publications."""
        encoded = base64.b32encode(self.save.encode()).decode("ascii").rstrip("=")
        return f"{self.epoch:020d}-{self.step:020d}-{encoded}"

    @property
    def location(self) -> str:
        """The absolute path or ``s3://`` URL of the save."""
        return f"{self.root.rstrip('/')}/{self.save}"

    @classmethod
    def of(cls, epoch: int, step: int, save: str, root: str, longest_name: int) -> Entry:
        """An entry to be published in a store that allows names of `longest_name` bytes.

        Raises ConfigurationError naming what cannot be written as a name.
        """
        for what, number in (("epoch", epoch), ("step", step)):
            if isinstance(number, bool) or not isinstance(number, int) or not 0 <= number <= MAX_NUMBER:
                raise ConfigurationError(f"{what} {number!r} is not a whole number from 0 to {MAX_NUMBER}")
        problem = _save_problem(save)
        if problem:
            raise ConfigurationError(f"save {save!r} cannot be published: {problem}")
        entry = cls(epoch, step, save, root)
        if len(entry.name) > longest_name:
            raise ConfigurationError(
                f"save {save!r} cannot be published: its path is {len(save.encode())} bytes long, and the name of an "
                f"entry here has room for {longest_save(longest_name)}; use a shorter attempt or folder name"
            )
        return entry

    @classmethod
    def parse(cls, name: str, root: str = "") -> Entry:
        """Read a name found in ``pub/``. Raises LogError naming it when it is not exactly what :attr:`name` writes."""
        match = _GRAMMAR.fullmatch(name)
        if match is None:
            raise _not_an_entry(name, root, "it is not <20 digits>-<20 digits>-<base32>")
        epoch, step, encoded = int(match[1]), int(match[2]), match[3]
        if max(epoch, step) > MAX_NUMBER:
            raise _not_an_entry(name, root, f"a number in it is greater than {MAX_NUMBER}")
        try:
            save = base64.b32decode(encoded + "=" * (-len(encoded) % 8)).decode()
        except (binascii.Error, UnicodeDecodeError):
            raise _not_an_entry(name, root, "its path is not base32 of UTF-8 text") from None
        problem = _save_problem(save)
        if problem:
            raise _not_an_entry(name, root, f"its path {save!r} is refused: {problem}")
        entry = cls(epoch, step, save, root)
        # Decoders ignore the unused bits of the last character: MFRGH and MFRGG are the same bytes. Two names for one
        # publication would survive a prune of either.
        if entry.name != name:
            raise _not_an_entry(name, root, "its base32 has stray bits in its last character")
        return entry


def parse_number(text: str) -> int | None:
    """An epoch or a step as a flag or a variable spells it: decimal digits without a sign; None when it is not one."""
    if _DIGITS.fullmatch(text) is None:
        return None
    number = int(text)
    return number if number <= MAX_NUMBER else None


def longest_save(longest_name: int) -> int:
    """The longest save path, in bytes, that a name of `longest_name` bytes has room for: 133 in the usual 255."""
    return max(longest_name - _NUMBERS_BYTES, 0) * 5 // 8


def _save_problem(save: str) -> str | None:
    try:
        safe_relative(save)
        save.encode()
    except ValueError as problem:
        return str(problem)
    top, _, below = save.partition("/")
    if top in _KEPT_FOLDERS or (top == "exec" and not below):
        return f"{top}/ belongs to the root; a save is a folder of its own"
    return None


def _not_an_entry(name: str, root: str, why: str) -> LogError:
    place = f"{root.rstrip('/')}/pub/{name}" if root else f"pub/{name}"
    return LogError(
        f"{place!r} is not a publication: {why}. Every name in pub/ counts, so nothing was read past it; "
        "find out who made it, and remove it"
    )
