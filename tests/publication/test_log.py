import json
import os

import pytest

from cortex_training.errors import ConfigurationError
from cortex_training.publication import LogError, PosixStore, PublicationLog, SaveGone, Store, prune
from tests.publication.servers import put_save


@pytest.fixture
def log(store: Store) -> PublicationLog:
    return PublicationLog(store)


def test_a_new_root_has_nothing_published(log: PublicationLog) -> None:
    assert log.latest() is None
    assert log.entries() == []


def test_publish_then_latest(log: PublicationLog) -> None:
    save = put_save(log.store, "exec/a-e1/cp_1")
    entry, created = log.publish(save, 1, 10)
    assert created
    assert log.publish(save, 1, 10) == (entry, False)
    assert log.latest() == entry
    assert entry.location == log.store.locate(save)
    assert log.store.read(f"pub/{entry.name}") == b""


def test_a_late_publication_of_an_older_epoch_is_never_the_latest(log: PublicationLog) -> None:
    new, old = put_save(log.store, "exec/b-e2/cp_1"), put_save(log.store, "exec/a-e1/cp_9")
    log.publish(new, 2, 1)
    log.publish(old, 1, 900)
    latest = log.latest()
    assert latest is not None
    assert latest.save == new


def test_no_clock_has_a_say(posix_store: PosixStore) -> None:
    log = PublicationLog(posix_store)
    for step in (1, 2, 3):
        entry, _ = log.publish(put_save(posix_store, f"exec/a/{step}"), 1, step)
        for name in (f"pub/{entry.name}", entry.save, f"{entry.save}/weights.safetensors"):
            os.utime(posix_store.locate(name), (2_000_000_000 - step, 2_000_000_000 - step))
    latest = log.latest()
    assert latest is not None
    assert latest.step == 3
    assert prune(log, 1) == ["exec/a/1", "exec/a/2"]


def test_of_two_saves_of_one_step_the_greater_name_counts(log: PublicationLog) -> None:
    saves = [put_save(log.store, f"exec/a/{name}") for name in ("x", "y", "zz")]
    names = sorted(log.publish(save, 1, 1)[0].name for save in saves)
    assert len(names) == 3
    latest = log.latest()
    assert latest is not None
    assert latest.name == names[-1]


@pytest.mark.parametrize("name", ["README", "x/y", "0-0-MFRGG"])
def test_a_stray_name_in_pub_stops_everything(log: PublicationLog, name: str) -> None:
    log.publish(put_save(log.store, "exec/a/b"), 1, 1)
    log.store.write(f"pub/{name}", b"")
    for operation in (log.latest, log.entries, log.claim_epoch):
        with pytest.raises(LogError, match=name.split("/")[0]):
            operation()


def test_publishing_what_is_not_there_creates_nothing(log: PublicationLog) -> None:
    with pytest.raises(SaveGone, match="exec/a/none"):
        log.publish("exec/a/none", 1, 1)
    with pytest.raises(ConfigurationError):
        log.publish("exec/../..", 1, 1)
    with pytest.raises(ConfigurationError, match="step"):
        log.publish("exec/a/none", 1, -1)
    with pytest.raises(ConfigurationError, match="shorter"):
        log.publish("exec/" + "/".join(["d" * 200] * 5), 1, 1)
    assert log.store.listing("pub").files == []


def test_epochs_rise_strictly_and_hold_who_claimed_them(log: PublicationLog) -> None:
    epochs = [log.claim_epoch({"host": "node-1", "pid": 7}) for _ in range(3)]
    assert [epoch.number for epoch in epochs] == [1, 2, 3]
    assert len({epoch.token for epoch in epochs}) == 3
    claim = json.loads(log.store.read(f"epochs/{2:020d}"))
    assert claim == {"v": 1, "token": epochs[1].token, "host": "node-1", "pid": 7}


def test_an_epoch_outranks_what_was_published_by_hand(log: PublicationLog) -> None:
    log.publish(put_save(log.store, "exec/a/b"), 41, 1)
    assert log.claim_epoch().number == 42


def test_a_torn_claim_burns_its_number(log: PublicationLog) -> None:
    log.store.write(f"epochs/{1:020d}", b'{"v": 1, "tok')
    assert log.claim_epoch().number == 2


def test_a_claim_that_landed_with_its_reply_lost_is_ours(log: PublicationLog, monkeypatch: pytest.MonkeyPatch) -> None:
    create = type(log.store).create

    def landed_but_lost(store: Store, name: str, data: bytes = b"") -> bool:
        create(store, name, data)
        return False

    monkeypatch.setattr(type(log.store), "create", landed_but_lost)
    epoch = log.claim_epoch()
    monkeypatch.undo()
    assert epoch.number == 1
    assert log.claim_epoch().number == 2


def test_somebody_elses_claim_is_not_ours(log: PublicationLog, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(log), "_last_epoch", lambda self: 0)  # looked before the others claimed
    assert [log.claim_epoch().number for _ in range(3)] == [1, 2, 3]


def test_strange_names_in_epochs_are_named(log: PublicationLog) -> None:
    log.store.write("epochs/latest", b"")
    with pytest.raises(LogError, match="epochs/latest"):
        log.claim_epoch()


@pytest.mark.parametrize("info", [{"token": "x"}, {"v": 2}, {"x": object()}, {"x": float("nan")}])
def test_claim_info_must_be_plain(log: PublicationLog, info: dict[str, object]) -> None:
    with pytest.raises(ConfigurationError):
        log.claim_epoch(info)
    assert log.store.names("epochs") == []


def test_an_s3_root_needs_credentials() -> None:
    with pytest.raises(ConfigurationError, match="needs credentials"):
        PublicationLog("s3://bucket/prefix")
