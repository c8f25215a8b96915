"""The publication log of one root: who owns the run, and which saves count."""

from __future__ import annotations

import json
import os
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cortex_training.errors import ConfigurationError
from cortex_training.publication.entries import MAX_NUMBER, Entry
from cortex_training.publication.errors import LogError, SaveGone
from cortex_training.publication.roots import open_store
from cortex_training.publication.store import Store

PUBLICATIONS = "pub"
EPOCHS = "epochs"

_EPOCH_NAME = re.compile(r"[0-9]{20}", re.ASCII)


@dataclass(frozen=True)
class Epoch:
    """A claim on the run: of all drivers that ever started on a root, this one has this number."""

    number: int
    token: str


class PublicationLog:
    """The log in a root. `root` is a directory, or a store that was opened with :func:`open_store`.

    Every method blocks on the store and may be called from several threads and processes at once. Errors: RootError,
    StoreError, LogError (a name that does not parse).
    """

    def __init__(self, root: str | os.PathLike[str] | Store) -> None:
        self.store: Store = open_store(root) if isinstance(root, (str, os.PathLike)) else root

    def entries(self) -> list[Entry]:
        """Every publication, the latest last. Raises LogError naming the first name in ``pub/`` that is not one."""
        listing = self.store.listing(PUBLICATIONS)
        names = sorted(listing.files + [f"{folder}/" for folder in listing.folders])
        return [Entry.parse(name, self.store.root) for name in names]

    def latest(self) -> Entry | None:
        """The publication of the greatest (epoch, step), or None when nothing is published."""
        entries = self.entries()
        return entries[-1] if entries else None

    def publish(self, save: str, epoch: int, step: int) -> tuple[Entry, bool]:
        """Publish the save at path `save` below the root; durable on return.

        Returns the entry, and whether this call created it: False means it was there already, which is success too.
        Publish only a save that is complete. Raises SaveGone when there is no such save, ConfigurationError when its
        path, epoch or step cannot be written as a name; nothing is created then.
        """
        entry = Entry.of(epoch, step, save, self.store.root, self.store.longest_name(PUBLICATIONS))
        if not self.store.holds_save(save):
            raise SaveGone(f"publish {entry.location}: there is no such save; publish it once it is complete")
        created = self.store.create(f"{PUBLICATIONS}/{entry.name}")
        # A prune may have removed the folder since we looked, and listed pub/ before our entry was there to be seen.
        if created and not self.store.holds_save(save):
            self.withdraw(entry)
            raise SaveGone(f"publish {entry.location}: the save was removed while it was being published")
        return entry, created

    def withdraw(self, entry: Entry) -> None:
        """Remove an entry, durably; its save stays. No error when it is not there."""
        self.store.remove(f"{PUBLICATIONS}/{entry.name}")

    def claim_epoch(self, info: Mapping[str, Any] | None = None) -> Epoch:
        """Claim the next epoch. Numbers rise strictly over all drivers, whatever machine or clock they run on.

        `info` (plain JSON: who claims, from where) is kept in the claim beside ``v`` and ``token``.
        """
        reserved = {"v", "token"} & set(info or {})
        if reserved:
            raise ConfigurationError(f"info may not hold {sorted(reserved)[0]!r}: the claim itself uses that name")
        token = secrets.token_hex(16)
        try:
            claim = json.dumps({"v": 1, "token": token, **(info or {})}, sort_keys=True, allow_nan=False).encode()
        except (TypeError, ValueError) as problem:
            raise ConfigurationError(f"info is not plain JSON: {problem}") from None
        number = self._last_epoch() + 1
        while number <= MAX_NUMBER:
            name = f"{EPOCHS}/{number:020d}"
            # "Exists" may be our own write whose reply was lost: only the token tells.
            if self.store.create(name, claim) or self._token_in(name) == token:
                return Epoch(number, token)
            number += 1
        raise LogError(f"{self.store.locate(EPOCHS)}: the epochs are used up at {MAX_NUMBER}")

    def _last_epoch(self) -> int:
        """The greatest number claimed or published under: one given by hand must not outrank drivers for ever."""
        claimed = self.store.names(EPOCHS)
        for name in claimed:
            if _EPOCH_NAME.fullmatch(name) is None or int(name) > MAX_NUMBER:
                raise LogError(
                    f"{self.store.locate(EPOCHS)}/{name} is not an epoch: its name is not 20 digits; remove it"
                )
        latest = self.latest()
        return max(int(claimed[-1]) if claimed else 0, latest.epoch if latest else 0)

    def _token_in(self, name: str) -> str | None:
        """The token of a claim; None when it is torn, which burns the number: whoever wrote it can't prove it won."""
        try:
            claim = json.loads(self.store.read(name))
        except (FileNotFoundError, ValueError):
            return None
        token = claim.get("token") if isinstance(claim, dict) else None
        return token if isinstance(token, str) else None
