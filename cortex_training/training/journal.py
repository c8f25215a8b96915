"""The journal of a run: numbered records, each created once, that say what was about to be sent and what came of it.

Only the driver that wrote the last ``takeover`` may append. It never looks for rivals: it appends at the number after
the last record it knows, and a rival's takeover sits there already. A failed append therefore means "stop, the run is
not yours any more".
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cortex_training.errors import ConfigurationError, CortexTrainingError
from cortex_training.publication.store import Store

FOLDER = "journal"
RECORD_VERSION = 1


class Superseded(CortexTrainingError):
    """Another driver has taken the run over; this one must send nothing more."""


@dataclass(frozen=True)
class Record:
    """One line of a run's history. `type` names it, `body` holds its fields, `number` is its place."""

    number: int
    epoch: int
    token: str
    type: str
    at: float
    body: Mapping[str, Any]

    def encode(self) -> bytes:
        fixed = {"v": RECORD_VERSION, "epoch": self.epoch, "token": self.token, "type": self.type, "at": self.at}
        return json.dumps({**fixed, **self.body}, sort_keys=True, allow_nan=False).encode()


def read_journal(store: Store) -> list[Record]:
    """Every record in order. A torn record burns its number and is passed over."""
    records = []
    for name in store.names(FOLDER):
        record = _parse(name, store.read(f"{FOLDER}/{name}"), store.root)
        if record is not None:
            records.append(record)
    return records


def last_number(store: Store) -> int:
    """The number of the last record, torn ones included; 0 when there is none."""
    names = store.names(FOLDER)
    return int(names[-1]) if names else 0


class JournalWriter:
    """Appends records for one epoch. Blocking; call it from a worker thread when in an event loop."""

    def __init__(self, store: Store, epoch: int, token: str, number: int) -> None:
        self._store = store
        self._epoch = epoch
        self._token = token
        self._number = number

    @classmethod
    def take_over(cls, store: Store, epoch: int, token: str, body: Mapping[str, Any]) -> JournalWriter:
        """Append ``takeover``: from here on every append of an older epoch fails. Raises `Superseded` for a newer
        one.
        """
        while True:
            number = last_number(store)
            newest = max((r.epoch for r in read_journal(store) if r.type == "takeover"), default=0)
            if newest > epoch:
                raise Superseded(f"{store.root}: epoch {newest} has taken the run over from epoch {epoch}")
            writer = cls(store, epoch, token, number)
            try:
                writer.append("takeover", body)
            except Superseded:
                # The older driver got its last record in first. Go behind it: our takeover must come after all it
                # wrote.
                continue
            return writer

    def append(self, type_: str, body: Mapping[str, Any]) -> Record:
        """Append a record; durable on return. Raises `Superseded` when the next number is somebody else's."""
        number = self._number + 1
        record = Record(number, self._epoch, self._token, type_, time.time(), body)
        data = record.encode()
        name = f"{FOLDER}/{number:020d}"
        # "Exists" can be our own write whose reply was lost: the bytes tell, since they carry our token.
        if not self._store.create(name, data) and self._store.read(name) != data:
            raise Superseded(
                f"{self._store.root}: journal record {number} belongs to another driver; epoch {self._epoch} stops here"
            )
        self._number = number
        return record


def _parse(name: str, data: bytes, root: str) -> Record | None:
    try:
        value = json.loads(data)
        version = value.pop("v")
        record = Record(int(name), value.pop("epoch"), value.pop("token"), value.pop("type"), value.pop("at"), value)
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
    if version != RECORD_VERSION:
        raise ConfigurationError.of(
            f"journal/{name}", version, f"{root} was written by a release whose journal is newer; use that release"
        )
    return record
