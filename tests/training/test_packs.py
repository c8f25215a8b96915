"""Old records are packed while drivers die, freeze and read: nothing is lost, and nobody gets through behind them."""

import asyncio
import threading
import time

import pytest

from cortex_training.publication import PosixStore, StoreError
from cortex_training.training import packs, status
from cortex_training.training.journal import (
    FOLDER,
    PACKED,
    JournalReader,
    JournalWriter,
    Superseded,
    last_number,
    numbers,
    read_journal,
)
from cortex_training.training.packs import Packer


@pytest.fixture(autouse=True)
def small_packs(monkeypatch):
    monkeypatch.setattr(packs, "PACK_RECORDS", 10)
    monkeypatch.setattr(packs, "_REMOVED_AT_ONCE", 2)


def begin(store, epoch=1):
    reader = JournalReader(store)
    writer = JournalWriter.take_over(store, epoch, f"{epoch:032x}", {}, reader)
    return writer, Packer(store, reader.read(), reader.packed)


def append(writer, packer, count):
    for number in range(count):
        packer.add(writer.append("tick", {"tick": number}))


def pack(packer):
    async def main():
        packer.pack_when_due()
        await packer._task

    asyncio.run(main())


def test_packed_records_read_as_before(store):
    writer, packer = begin(store)
    append(writer, packer, 25)
    before = read_journal(store)
    pack(packer)
    assert read_journal(store) == before
    assert numbers(store, FOLDER) == [1]
    assert last_number(store) == 26
    append(writer, packer, 12)
    pack(packer)
    assert [r.number for r in read_journal(store)] == list(range(1, 39))
    assert numbers(store, PACKED) == [26, 38]


def test_few_records_are_left_alone(store):
    writer, packer = begin(store)
    append(writer, packer, 8)
    packer.pack_when_due()
    assert packer._task is None


def test_a_successor_goes_on_behind_a_journal_that_is_all_packed(store):
    writer, packer = begin(store)
    append(writer, packer, 12)
    pack(packer)
    after, packer = begin(store, epoch=2)
    append(after, packer, 1)
    assert [(r.number, r.epoch) for r in read_journal(store)][-2:] == [(14, 2), (15, 2)]
    with pytest.raises(Superseded):
        writer.append("tick", {})


@pytest.mark.parametrize("survives", [0, 1, 3, 7])
def test_a_driver_that_dies_while_it_removes_loses_nothing(store, monkeypatch, survives):
    writer, packer = begin(store)
    append(writer, packer, 14)
    before = read_journal(store)
    remove, left = type(store).remove, [survives]

    class Killed(BaseException):
        pass

    def dying(self, name):
        if not left[0]:
            raise Killed
        left[0] -= 1
        remove(self, name)

    with monkeypatch.context() as patch:
        patch.setattr(type(store), "remove", dying)
        with pytest.raises(Killed):
            pack(packer)
    assert read_journal(store) == before
    writer, packer = begin(store, epoch=2)
    append(writer, packer, 10)
    pack(packer)
    # What the first one left over went with the next pack.
    assert numbers(store, FOLDER) == [1, 16]
    assert read_journal(store)[: len(before)] == before


def test_a_store_that_refuses_a_pack_costs_no_record(store, monkeypatch):
    writer, packer = begin(store)
    append(writer, packer, 11)
    create = type(store).create

    def full(self, name, data=b""):
        if name.startswith(PACKED):
            raise StoreError(f"create {name}: No space left on device")
        return create(self, name, data)

    with monkeypatch.context() as patch:
        patch.setattr(type(store), "create", full)
        pack(packer)
    append(writer, packer, 11)
    before = read_journal(store)
    pack(packer)
    assert numbers(store, PACKED) == [23]
    assert numbers(store, FOLDER) == [1]
    assert read_journal(store) == before


def test_a_record_that_no_pack_holds_is_read_where_it_is(store):
    """Nobody but the owner of the run can say what is in the past of a pack, so nothing loose is taken for packed."""
    writer, packer = begin(store)
    append(writer, packer, 12)
    records = read_journal(store)
    store.create(f"{PACKED}/{10:020d}", packs.encode(records[4:10]))
    assert read_journal(store) == records
    # And what no pack holds is put into the next one, not removed with what is packed.
    writer, packer = begin(store, epoch=2)
    append(writer, packer, 10)
    before = read_journal(store)
    pack(packer)
    assert read_journal(store) == before
    assert numbers(store, FOLDER) == [1, 14]


def test_a_torn_records_number_stays_taken(store):
    writer, packer = begin(store)
    append(writer, packer, 3)
    store.write(f"{FOLDER}/{5:020d}", b'{"v": 2, "ep')
    after, packer = begin(store, epoch=2)
    append(after, packer, 10)
    pack(packer)
    assert numbers(store, FOLDER) == [1, 5, 6]
    assert [r.number for r in read_journal(store)] == [1, 2, 3, 4, *range(6, 17)]
    with pytest.raises(Superseded):
        writer.append("tick", {})


def test_a_driver_frozen_before_the_takeover_finds_its_number_taken_for_ever(store):
    frozen, packer = begin(store)
    append(frozen, packer, 4)
    for epoch in (2, 3):
        writer, packer = begin(store, epoch)
        append(writer, packer, 12)
        pack(packer)
    with pytest.raises(Superseded):
        frozen.append("tick", {})


def test_a_driver_frozen_in_its_takeover_does_not_take_a_packed_records_place(store, monkeypatch):
    """It saw the end of the journal, slept, and wakes up when the number behind it was packed and removed."""
    writer, packer = begin(store)
    append(writer, packer, 3)
    create, slept = type(store).create, []

    def create_late(self, name, data=b""):
        if name.startswith(f"{FOLDER}/0") and b"takeover" in data and not slept:
            slept.append(True)
            append(writer, packer, 12)
            pack(packer)
        return create(self, name, data)

    monkeypatch.setattr(type(store), "create", create_late)
    late, _ = begin(store, epoch=2)
    records = read_journal(store)
    assert [r.number for r in records] == list(range(1, 18))
    assert (records[-1].type, records[-1].epoch) == ("takeover", 2)
    with pytest.raises(Superseded):
        writer.append("tick", {})
    assert late.append("tick", {}).number == 18


def test_a_pack_of_a_driver_that_was_frozen_over_it_says_the_same(store):
    frozen, old = begin(store)
    append(frozen, old, 12)
    writer, packer = begin(store, epoch=2)
    append(writer, packer, 12)
    pack(packer)
    before = read_journal(store)
    pack(old)
    assert numbers(store, PACKED) == [13, 26]
    assert read_journal(store) == before


def test_readers_see_a_whole_journal_at_any_moment(store):
    writer, packer = begin(store)
    ended, seen, problems = threading.Event(), [0], []

    def read():
        try:
            while not ended.is_set():
                found = [r.number for r in read_journal(store)]
                assert found == list(range(1, len(found) + 1))
                assert len(found) >= seen[-1]
                seen.append(len(found))
                time.sleep(0.01)
        except BaseException as problem:
            problems.append(problem)

    reader = threading.Thread(target=read)
    reader.start()
    for _ in range(3):
        append(writer, packer, 10)
        pack(packer)
    ended.set()
    reader.join()
    assert not problems
    assert len(read_journal(store)) == 31


def test_a_run_packs_as_it_goes_and_its_successor_goes_on(runs):
    runs.run(runs.plan(steps=4))
    store = PosixStore(runs.root)
    assert len(numbers(store, PACKED)) >= 2
    assert len(numbers(store, FOLDER)) < 30
    result = runs.run(runs.plan(steps=6))
    assert result.steps == 6
    state = status(runs.root).state
    assert sorted(state.losses) == list(range(1, 8))
    assert [s.cause for s in state.segments] == ["first", "continuation"]
