"""The journal has one writer at a time, and what it says can be replayed."""

import contextlib
import json
import threading

import pytest

from cortex_training.errors import ConfigurationError
from cortex_training.publication.store import PosixStore
from cortex_training.training.journal import JournalWriter, Superseded, read_journal
from cortex_training.training.state import replay


@pytest.fixture
def store(tmp_path):
    return PosixStore(tmp_path)


def test_a_successor_makes_every_later_append_of_the_old_driver_fail(store):
    old = JournalWriter.take_over(store, 1, "a" * 32, {})
    old.append("segment", {"segment": 0, "job_id": "j", "owned": True, "base": None, "reason": "first"})
    JournalWriter.take_over(store, 2, "b" * 32, {})
    with pytest.raises(Superseded, match="record 3 belongs to another driver"):
        old.append("intent", {"op": "step", "segment": 0, "step": 1})
    assert [r.type for r in read_journal(store)] == ["takeover", "segment", "takeover"]


def test_an_older_epoch_cannot_take_over_from_a_newer_one(store):
    JournalWriter.take_over(store, 2, "b" * 32, {})
    with pytest.raises(Superseded, match="epoch 2 has taken the run over"):
        JournalWriter.take_over(store, 1, "a" * 32, {})


def test_a_takeover_goes_behind_a_record_that_arrived_meanwhile(store, monkeypatch):
    old = JournalWriter.take_over(store, 1, "a" * 32, {})
    create = store.create
    arrived = []

    def create_after_rival(name, data=b""):
        if not arrived and b"takeover" in data:
            arrived.append(True)
            old.append("intent", {"op": "step", "segment": 0, "step": 1})
        return create(name, data)

    monkeypatch.setattr(store, "create", create_after_rival)
    JournalWriter.take_over(store, 2, "b" * 32, {})
    assert [(r.type, r.epoch) for r in read_journal(store)] == [("takeover", 1), ("intent", 1), ("takeover", 2)]


def test_a_landed_append_whose_reply_was_lost_counts_as_done(store, monkeypatch):
    writer = JournalWriter.take_over(store, 1, "a" * 32, {})
    create = store.create
    monkeypatch.setattr(store, "create", lambda name, data=b"": create(name, data) and False)
    assert writer.append("released", {}).number == 2
    assert [r.type for r in read_journal(store)] == ["takeover", "released"]


def test_a_torn_record_burns_its_number(store):
    writer = JournalWriter.take_over(store, 1, "a" * 32, {})
    (store_path := store.locate("journal/" + "2".zfill(20)))
    with open(store_path, "w") as file:
        file.write('{"v": 1, "epo')
    with pytest.raises(Superseded):
        writer.append("released", {})
    JournalWriter.take_over(store, 2, "b" * 32, {})
    assert [(r.number, r.type) for r in read_journal(store)] == [(1, "takeover"), (3, "takeover")]


def test_a_record_of_a_newer_release_is_refused_by_name(store):
    JournalWriter.take_over(store, 1, "a" * 32, {})
    with open(store.locate("journal/" + "2".zfill(20)), "w") as file:
        json.dump({"v": 2, "epoch": 1, "token": "a", "type": "x", "at": 0}, file)
    with pytest.raises(ConfigurationError, match=r"journal/0{19}2"):
        read_journal(store)


def test_eight_drivers_that_start_at_once_leave_one_owner(store):
    writers = {}

    def take_over(epoch):
        with contextlib.suppress(Superseded):
            writers[epoch] = JournalWriter.take_over(store, epoch, f"{epoch:032x}", {})

    threads = [threading.Thread(target=take_over, args=(epoch,)) for epoch in range(1, 9)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    owners = []
    for epoch, writer in writers.items():
        try:
            writer.append("released", {})
        except Superseded:
            continue
        owners.append(epoch)
    assert owners == [8]
    assert replay(read_journal(store)).epoch == 8
