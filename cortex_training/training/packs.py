"""Old journal records put together: a run of a week would leave a hundred thousand files, and read each at every start.

A pack ``journal/packed/<number of its last record>`` holds records as they are. It is created whole before the first
of them is removed, so a crash at any place leaves every record in one of the two, or in both. What stays loose for ever
are the takeovers, and torn records: a driver that was frozen for a week appends at the number behind its last record,
which is where its successor's takeover is, and must find that number taken.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Iterable

from cortex_training.publication.errors import PublicationError
from cortex_training.publication.store import Store
from cortex_training.training.journal import FOLDER, PACKED, Record, numbers
from cortex_training.training.offload import offload

PACK_RECORDS = 1000
"""How many records make a pack."""

PACK_VERSION = 1

_REMOVED_AT_ONCE = 20


class Packer:
    """Packs the records of a run while its driver goes on training. `packed` are the numbers that are in packs so
    far.

    Only what is known to be in a pack is ever removed: a record that is lost makes a hole, and ends the run for good.
    """

    def __init__(self, store: Store, history: Iterable[Record], packed: Iterable[int]) -> None:
        self._store = store
        self._packed = set(packed)
        self._stays: set[int] = set()
        self._loose: list[Record] = []
        self._task: asyncio.Task[None] | None = None
        self._stopped = False
        number = 0
        for record in history:
            self._stays.update(range(number + 1, record.number))
            number = record.number
            self.add(record)

    def add(self, record: Record) -> None:
        """Take note of a record that is in the journal."""
        if record.type == "takeover":
            self._stays.add(record.number)
        if record.number not in self._packed:
            self._loose.append(record)

    def pack_when_due(self) -> None:
        """Begin to pack, in the background, when there are enough loose records."""
        if not self._stopped and len(self._loose) >= PACK_RECORDS and (self._task is None or self._task.done()):
            # In place, here and below: the thread that appends to the journal adds to this very list.
            records = self._loose[:]
            del self._loose[: len(records)]
            self._task = asyncio.create_task(self._pack(records))

    async def stop(self) -> None:
        """Pack and remove no more; what is left over goes with the next pack."""
        self._stopped = True
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})

    async def _pack(self, records: list[Record]) -> None:
        last = max(record.number for record in records)
        try:
            await offload(lambda: self._store.create(f"{PACKED}/{last:020d}", encode(records)))
        except PublicationError:
            # A full disk, say: they stay as they are, for the next pack.
            self._loose[:0] = records
            return
        self._packed.update(record.number for record in records)
        with contextlib.suppress(PublicationError):
            # By the listing, so that what an interrupted removal left over goes too.
            listed = await offload(numbers, self._store, FOLDER)
            doomed = [number for number in listed if number in self._packed and number not in self._stays]
            for start in range(0, len(doomed), _REMOVED_AT_ONCE):
                await offload(self._remove, doomed[start : start + _REMOVED_AT_ONCE])

    def _remove(self, doomed: Iterable[int]) -> None:
        for number in doomed:
            self._store.remove(f"{FOLDER}/{number:020d}")


def encode(records: Iterable[Record]) -> bytes:
    """A pack of records, each as it is in its own file."""
    documents = [{**record.document(), "number": record.number} for record in records]
    return json.dumps({"v": PACK_VERSION, "records": documents}, sort_keys=True, allow_nan=False).encode()
