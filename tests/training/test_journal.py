"""The journal has one writer at a time, and what it says can be replayed."""

import contextlib
import dataclasses
import json
import threading

import pytest

from cortex_training.errors import ConfigurationError
from cortex_training.publication import StoreError, s3
from cortex_training.training.journal import JournalWriter, Record, Superseded, last_number, read_journal
from cortex_training.training.root import open_existing_root
from cortex_training.training.state import replay


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
    create = type(store).create
    arrived = []

    def create_after_rival(self, name, data=b""):
        if not arrived and b"takeover" in data:
            arrived.append(True)
            old.append("intent", {"op": "step", "segment": 0, "step": 1})
        return create(self, name, data)

    monkeypatch.setattr(type(store), "create", create_after_rival)
    JournalWriter.take_over(store, 2, "b" * 32, {})
    assert [(r.type, r.epoch) for r in read_journal(store)] == [("takeover", 1), ("intent", 1), ("takeover", 2)]


def test_a_landed_append_whose_reply_was_lost_counts_as_done(store, monkeypatch):
    writer = JournalWriter.take_over(store, 1, "a" * 32, {})
    create = type(store).create
    monkeypatch.setattr(type(store), "create", lambda self, name, data=b"": create(self, name, data) and False)
    assert writer.append("released", {}).number == 2
    assert [r.type for r in read_journal(store)] == ["takeover", "released"]


def test_a_torn_record_burns_its_number(store):
    writer = JournalWriter.take_over(store, 1, "a" * 32, {})
    store.write("journal/" + "2".zfill(20), b'{"v": 1, "epo')
    with pytest.raises(Superseded):
        writer.append("released", {})
    JournalWriter.take_over(store, 2, "b" * 32, {})
    assert [(r.number, r.type) for r in read_journal(store)] == [(1, "takeover"), (3, "takeover")]


def test_a_record_of_a_newer_release_is_refused_by_name(store):
    JournalWriter.take_over(store, 1, "a" * 32, {})
    newer = {"v": 3, "epoch": 1, "token": "a", "type": "x", "at": 0}
    store.write("journal/" + "2".zfill(20), json.dumps(newer).encode())
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


def test_a_hole_in_the_journal_is_named_and_not_read_over(store):
    writer = JournalWriter.take_over(store, 1, "a" * 32, {})
    for _ in range(3):
        writer.append("tick", {})
    store.remove("journal/" + "3".zfill(20))
    with pytest.raises(ConfigurationError, match="hole"):
        read_journal(store)


def test_leftovers_of_a_file_system_are_no_records(store):
    JournalWriter.take_over(store, 1, "a" * 32, {})
    store.write("journal/.nfs000000000123", b"")
    assert [r.type for r in read_journal(store)] == ["takeover"]
    assert last_number(store) == 1


class TestABusyBucket:
    """What an append is worth while the bucket throttles, loses replies, or is settling another write."""

    @pytest.fixture
    def faulty_store(self, s3_root, faulty_creds, monkeypatch):
        monkeypatch.setattr(s3, "_CONFLICT_WAIT_S", 0.005)
        return open_existing_root(s3_root, faulty_creds)

    @pytest.fixture
    def writer(self, faulty_store):
        return JournalWriter.take_over(faulty_store, 1, "a" * 32, {})

    @pytest.mark.parametrize(
        ("action", "times"),
        [
            ("drop before", 2),
            ("drop after", 2),
            ("status 503 SlowDown", 3),
            ("status 409 ConditionalRequestConflict", 8),
        ],
    )
    def test_an_append_is_made_once(self, writer, faults, s3_store, action, times):
        faults.spoil("PUT", "/journal/", action, times)
        writer.append("intent", {"op": "step", "segment": 0, "step": 1})
        writer.append("released", {})
        assert [(r.number, r.type) for r in read_journal(s3_store)] == [(1, "takeover"), (2, "intent"), (3, "released")]

    def test_an_append_that_was_given_up_and_landed_counts(self, writer, faults, faulty_store, s3_store, monkeypatch):
        faults.spoil("PUT", "/journal/", "drop after", 99)
        monkeypatch.setattr(writer, "_store", dataclasses.replace(faulty_store, timeout_s=1.0))
        assert writer.append("released", {}).number == 2
        assert [r.type for r in read_journal(s3_store)] == ["takeover", "released"]

    def test_an_append_that_lands_after_it_was_given_up_is_not_another_drivers(
        self, writer, faults, faulty_store, s3_store, monkeypatch
    ):
        monkeypatch.setattr(writer, "_store", dataclasses.replace(faulty_store, timeout_s=1.0))
        lost = faults.spoil("PUT", "/journal/", "drop before", 99)
        sent = []
        encode = Record.encode
        monkeypatch.setattr(Record, "encode", lambda self: sent.append(encode(self)) or sent[-1])
        with pytest.raises(StoreError):
            writer.append("intent", {"op": "step", "segment": 0, "step": 1})
        lost.times = 0
        # The network held it back, and lets go of it now.
        s3_store.create("journal/" + "2".zfill(20), sent[0])
        writer.append("released", {})
        assert [r.type for r in read_journal(s3_store)] == ["takeover", "intent", "released"]

    def test_a_successors_record_stops_the_old_driver_whatever_the_bucket_answers(
        self, writer, faults, faulty_store, s3_store, monkeypatch
    ):
        monkeypatch.setattr(writer, "_store", dataclasses.replace(faulty_store, timeout_s=1.0))
        JournalWriter.take_over(s3_store, 2, "b" * 32, {})
        faults.spoil("PUT", "/journal/", "status 409 ConditionalRequestConflict", 999)
        with pytest.raises(Superseded):
            writer.append("intent", {"op": "step", "segment": 0, "step": 1})
