"""The journal of a run: numbered records, each created once, that say what was about to be sent and what came of it.

Only the driver that wrote the last ``takeover`` may append. It never looks for rivals: it appends at the number after
the last record it knows, and a rival's takeover sits there already. A failed append therefore means "stop, the run is
not yours any more". How old records are put together into packs is in `packs`.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from cortex_training.errors import ConfigurationError, CortexTrainingError
from cortex_training.publication.errors import StoreError
from cortex_training.publication.store import PosixStore, Store

FOLDER = "journal"
PACKED = f"{FOLDER}/packed"
RECORD_VERSION = 2
"""Version 2 has packs, rollbacks and windows of other lengths; a release that knows version 1 only would miss them."""

_READABLE_VERSIONS = (1, 2)
_NAME = re.compile(r"[0-9]{20}", re.ASCII)
_READERS = 8
_LISTINGS = 5
_LISTING_PAUSE_S = 0.2


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

    def document(self) -> dict[str, Any]:
        fixed = {"v": RECORD_VERSION, "epoch": self.epoch, "token": self.token, "type": self.type, "at": self.at}
        return {**fixed, **self.body}

    def encode(self) -> bytes:
        return json.dumps(self.document(), sort_keys=True, allow_nan=False).encode()


class JournalReader:
    """Reads a journal again and again; records never change, so each is fetched once."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._loose: dict[int, Record | None] = {}
        self._packs: dict[int, list[Record]] = {}
        self.last = 0
        self.packed: frozenset[int] = frozenset()

    def read(self) -> list[Record]:
        """Every record in order. A torn record burns its number and is passed over.

        `last` is the number of the last record then, torn ones included, and `packed` are those that are in packs.

        Raises `ConfigurationError` for a journal with a hole in it, or one that a newer release wrote.
        """
        for _ in range(_LISTINGS):
            # Loose records first: one that is missing from this listing was packed before, so its pack is in the
            # listing that follows.
            loose = numbers(self._store, FOLDER)
            packs = numbers(self._store, PACKED)
            known = self._unpacked(packs)
            # What a pack holds counts, whatever has that number now; see `take_over`.
            loose = [number for number in loose if number not in known]
            taken = sorted([*known, *loose])
            if taken == list(range(1, len(taken) + 1)):
                try:
                    self._fetch(loose)
                except FileNotFoundError:
                    continue  # packed since it was listed
                self.last, self.packed = len(taken), frozenset(known)
                known.update((n, record) for n in loose if (record := self._loose[n]) is not None)
                return [known[number] for number in sorted(known)]
            # A file system of a network may show an older listing for a moment.
            time.sleep(_LISTING_PAUSE_S)
        raise ConfigurationError.of(
            "plan.root",
            self._store.root,
            f"its {FOLDER}/ has a hole in it, so nobody knows what was sent; was a part of the root copied or removed?",
        )

    def _unpacked(self, packs: Iterable[int]) -> dict[int, Record]:
        """The records in packs by number. Packs of a driver that was frozen meanwhile may overlap, and say the same."""
        for end in packs:
            if end not in self._packs:
                name = f"{PACKED}/{end:020d}"
                self._packs[end] = _unpack(name, self._store.read(name), self._store.root)
        return {record.number: record for end in packs for record in self._packs[end]}

    def _fetch(self, loose: Iterable[int]) -> None:
        new = [number for number in loose if number not in self._loose]
        # One after the other a bucket would take its round trip for each.
        with ThreadPoolExecutor(_READERS) as pool:
            for number, data in zip(new, pool.map(self._read, new), strict=True):
                self._loose[number] = _parse(number, data, self._store.root)

    def _read(self, number: int) -> bytes:
        return self._store.read(f"{FOLDER}/{number:020d}")


def read_journal(store: Store) -> list[Record]:
    """Every record in order; see :meth:`JournalReader.read`."""
    return JournalReader(store).read()


def last_number(store: Store) -> int:
    """The number of the last record, torn and packed ones included; 0 when there is none."""
    return max([0, *numbers(store, FOLDER)[-1:], *numbers(store, PACKED)[-1:]])


def numbers(store: Store, folder: str) -> list[int]:
    """The numbers of the records in a folder. Names that are none are leftovers of a file system (``.nfs…``)."""
    return [int(name) for name in store.names(folder) if _NAME.fullmatch(name)]


class JournalWriter:
    """Appends records for one epoch. Blocking; call it from a worker thread when in an event loop."""

    def __init__(self, store: Store, epoch: int, token: str, number: int) -> None:
        self._store = store
        self._epoch = epoch
        self._token = token
        self._number = number

    @classmethod
    def take_over(
        cls, store: Store, epoch: int, token: str, body: Mapping[str, Any], reader: JournalReader | None = None
    ) -> JournalWriter:
        """Append ``takeover``: from here on every append of an older epoch fails. Raises `Superseded` for a newer
        one.
        """
        reader = reader or JournalReader(store)
        while True:
            newest = max((r.epoch for r in reader.read() if r.type == "takeover"), default=0)
            if newest > epoch:
                raise Superseded(f"{store.root}: epoch {newest} has taken the run over from epoch {epoch}")
            writer = cls(store, epoch, token, reader.last)
            try:
                record = writer.append("takeover", body)
            except Superseded:
                # The older driver got its last record in first. Go behind it: our takeover must come after all it
                # wrote.
                continue
            if record.number > max([0, *numbers(store, PACKED)[-1:]]):
                return writer
            # We were held up for so long that the record which had this number was packed and removed: nobody reads
            # what is written here, and the driver that packed goes on at the end of the journal.
            store.remove(f"{FOLDER}/{record.number:020d}")

    def append(self, type_: str, body: Mapping[str, Any]) -> Record:
        """Append a record; durable on return. Raises `Superseded` when the next number is somebody else's, and
        StoreError when the store does not say whether the record is there; it may be appended once more then.
        """
        while True:
            number = self._number + 1
            record = Record(number, self._epoch, self._token, type_, time.time(), body)
            data = record.encode()
            found = self._create_or_read(f"{FOLDER}/{number:020d}", data)
            if found != data and not self._is_ours(found):
                raise Superseded(
                    f"{self._store.root}: journal record {number} belongs to another driver; epoch {self._epoch} "
                    "stops here"
                )
            self._number = number
            if found == data:
                return record
            # A record of ours which we had given up for lost has landed after all. It stands; this one goes behind it.

    def _create_or_read(self, name: str, data: bytes) -> bytes:
        """Create a record and answer its bytes, or those that are there instead (none: packed and removed since)."""
        try:
            # "Exists" can be our own write whose reply was lost: the bytes tell, since they carry our token.
            if self._store.create(name, data):
                return data
        except StoreError:
            # Refused, or busy for too long with a write that may have landed: what is there now decides.
            found = self._read_if_there(name)
            if found is None:
                raise
            if found == data and isinstance(self._store, PosixStore):
                # Seen is not durable yet in a directory whose sync failed. Creating it again syncs again.
                self._store.create(name, data)
            return found
        try:
            return self._store.read(name)
        except FileNotFoundError:
            return b""

    def _read_if_there(self, name: str) -> bytes | None:
        try:
            return self._store.read(name)
        except (FileNotFoundError, StoreError):
            return None

    def _is_ours(self, data: bytes) -> bool:
        try:
            return bool(json.loads(data)["token"] == self._token)
        except (ValueError, KeyError, TypeError):
            return False


def _parse(number: int, data: bytes, root: str) -> Record | None:
    try:
        return _record(number, json.loads(data), f"{FOLDER}/{number:020d}", root)
    except (ValueError, KeyError, TypeError, AttributeError) as problem:
        if isinstance(problem, ConfigurationError):
            raise
        return None


def _unpack(name: str, data: bytes, root: str) -> list[Record]:
    try:
        return [_record(value.pop("number"), value, name, root) for value in json.loads(data)["records"]]
    except (ValueError, KeyError, TypeError, AttributeError) as problem:
        if isinstance(problem, ConfigurationError):
            raise
        raise ConfigurationError(f"{root}/{name} is not a pack of records: {problem}", field="plan.root") from None


def _record(number: int, value: dict[str, Any], where: str, root: str) -> Record:
    version = value.pop("v")
    if version not in _READABLE_VERSIONS:
        raise ConfigurationError.of(
            where, version, f"{root} was written by a release whose journal is newer; use that release"
        )
    return Record(number, value.pop("epoch"), value.pop("token"), value.pop("type"), value.pop("at"), value)
