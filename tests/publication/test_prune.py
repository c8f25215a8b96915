"""Pruning: what goes, what stays, and what a crash, a link or a second prune can't break."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from cortex_training.errors import ConfigurationError
from cortex_training.publication import (
    FRAMEWORKS,
    LogError,
    PosixStore,
    PublicationLog,
    SaveGone,
    Store,
    StoreError,
    Watch,
    prune,
)
from tests.publication.crashes import killed_at_each_call
from tests.publication.servers import put_save


@pytest.fixture
def log(store: Store) -> PublicationLog:
    return PublicationLog(store)


def publish(log: PublicationLog, save: str, epoch: int, step: int) -> str:
    log.publish(put_save(log.store, save), epoch, step)
    return save


def saves(log: PublicationLog) -> list[str]:
    return [entry.save for entry in log.entries()]


def test_the_latest_entries_stay_with_their_saves(log: PublicationLog) -> None:
    made = [publish(log, f"exec/a/checkpoint-{step}", 1, step) for step in (1, 2, 9, 10, 100)]
    removed: list[str] = []
    assert prune(log, 2, removed=removed.append) == made[:3]
    assert removed == [log.store.locate(save) for save in made[:3]]
    assert saves(log) == made[3:]
    assert [log.store.holds_save(save) for save in made] == [False] * 3 + [True] * 2
    assert prune(log, 2) == []
    assert prune(log, 1) == [made[3]]
    assert prune(log, 1) == []
    assert saves(log) == made[4:]


def test_an_empty_log_is_pruned_to_itself(log: PublicationLog) -> None:
    assert prune(log) == []


@pytest.mark.parametrize("keep", [0, -1, True, 1.5])
def test_keep_is_at_least_one(log: PublicationLog, keep: object) -> None:
    publish(log, "exec/a/b", 1, 1)
    with pytest.raises(ConfigurationError, match="keep"):
        prune(log, keep)  # type: ignore[arg-type]
    assert saves(log) == ["exec/a/b"]


def test_a_save_stays_while_an_entry_names_it_or_one_inside_or_around_it(log: PublicationLog) -> None:
    publish(log, "exec/a/same", 1, 1)
    publish(log, "exec/a/outer/inner", 1, 2)
    publish(log, "exec/a/around", 1, 3)
    publish(log, "exec/a/gone", 1, 4)
    publish(log, "exec/a/around-not", 1, 5)
    publish(log, "exec/a/same", 2, 1)
    publish(log, "exec/a/outer", 2, 2)
    publish(log, "exec/a/around/inner", 2, 3)
    assert prune(log, 3) == ["exec/a/gone", "exec/a/around-not"]
    for save in ("exec/a/same", "exec/a/outer/inner", "exec/a/around"):
        assert log.store.read(f"{save}/weights.safetensors") == b"weights"


def test_a_stray_name_stops_prune_before_anything_is_removed(log: PublicationLog) -> None:
    made = [publish(log, f"exec/a/{step}", 1, step) for step in (1, 2)]
    log.store.write("pub/zzz", b"")
    with pytest.raises(LogError, match="zzz"):
        prune(log, 1)
    log.store.remove("pub/zzz")
    assert saves(log) == made
    assert all(log.store.holds_save(save) for save in made)


def test_a_save_or_an_entry_that_is_gone_already_is_fine(log: PublicationLog) -> None:
    publish(log, "exec/a/1", 1, 1)
    publish(log, "exec/a/2", 1, 2)
    publish(log, "exec/a/3", 1, 3)
    log.store.remove_folder("exec/a/1")
    assert prune(log, 1, removing=lambda save: log.withdraw(log.entries()[0]) if len(saves(log)) > 1 else None)
    assert saves(log) == ["exec/a/3"]


def entries_over_pages(store: Store, count: int) -> None:
    log = PublicationLog(store)
    for number in range(count):
        log.store.create(f"pub/{number:020d}-{1:020d}-MV4GKYZPMEXTC")
    latest = publish(log, "exec/z", 2000, 1)
    assert len(log.entries()) == count + 1
    assert saves(log)[-1] == latest
    assert prune(log, count - 2) == []
    assert [entry.epoch for entry in log.entries()[:2]] == [3, 4]


def test_entries_over_several_pages_of_a_listing(s3_store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    client = s3_store.connection.client  # type: ignore[attr-defined]
    whole = client.list_objects_v2
    monkeypatch.setattr(client, "list_objects_v2", lambda **arguments: whole(**{"MaxKeys": 10, **arguments}))
    entries_over_pages(s3_store, 33)


@pytest.mark.long
def test_more_than_a_thousand_entries(s3_store: Store) -> None:
    entries_over_pages(s3_store, 1003)


def test_a_save_is_removed_in_as_many_batches_as_it_takes(log: PublicationLog, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cortex_training.publication.s3._DELETE_PAGE", 4)
    save = publish(log, "exec/a/1", 1, 1)
    for number in range(11):
        log.store.create(f"{save}/{number}")
    publish(log, "exec/a/2", 1, 2)
    assert prune(log, 1) == [save]
    assert not log.store.holds_save(save)


@pytest.mark.long
def test_more_than_a_thousand_files(log: PublicationLog) -> None:
    """More than a page of a listing, while what was listed is being deleted."""
    save = publish(log, "exec/a/1", 1, 1)
    for number in range(2100):
        log.store.create(f"{save}/{number:04d}")
    publish(log, "exec/a/2", 1, 2)
    assert prune(log, 1) == [save]
    assert not log.store.holds_save(save)


def test_what_a_watch_publishes_again_between_entry_and_folder_is_withdrawn(log: PublicationLog) -> None:
    doomed = publish(log, "exec/a/checkpoint-1", 1, 1)
    log.store.write(f"{doomed}/trainer_state.json", b'{"global_step": 1}')
    publish(log, "exec/a/checkpoint-2", 1, 2)
    resurrected: list[str] = []
    remove_folder = type(log.store).remove_folder

    def watch_was_faster(store: Store, name: str, first: tuple[str, ...] = ()) -> str | None:
        watch = Watch(log, FRAMEWORKS["hf"], "exec/a", 1)
        watch.scan(lambda entry: resurrected.append(entry.save))
        return remove_folder(store, name, first)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(log.store), "remove_folder", watch_was_faster)
        assert prune(log, 1) == [doomed]
    assert resurrected == [doomed]
    assert saves(log) == ["exec/a/checkpoint-2"]


def test_what_is_published_after_the_entries_went_keeps_its_folder(log: PublicationLog) -> None:
    save = publish(log, "exec/a/1", 1, 1)
    publish(log, "exec/a/2", 1, 2)
    withdraw = type(log).withdraw

    def then_republished(self: PublicationLog, entry: object) -> None:
        withdraw(self, entry)  # type: ignore[arg-type]
        log.publish(save, 9, 1)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(log), "withdraw", then_republished)
        assert prune(log, 1) == []
    assert saves(log) == ["exec/a/2", "exec/a/1"]
    assert log.store.holds_save(save)


def test_a_publisher_that_lost_against_prune_takes_its_entry_back(log: PublicationLog) -> None:
    save = put_save(log.store, "exec/a/1")
    create = type(log.store).create

    def pruned_meanwhile(store: Store, name: str, data: bytes = b"") -> bool:
        store.remove_folder(save)
        return create(store, name, data)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(log.store), "create", pruned_meanwhile)
        found: list[object] = []
        Watch(log, FRAMEWORKS["cortex"], "exec/a", 1).scan(found.append)
        with pytest.raises(SaveGone, match="exec/a/1"):
            log.publish(put_save(log.store, save), 1, 1)
    assert saves(log) == []


def test_two_prunes_at_once_remove_each_save_once_or_find_it_gone(log: PublicationLog) -> None:
    made = [publish(log, f"exec/a/{step}", 1, step) for step in range(12)]
    faults: list[BaseException] = []

    def go() -> None:
        try:
            prune(log, 2)
        except BaseException as fault:
            faults.append(fault)

    threads = [threading.Thread(target=go) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert faults == []
    assert saves(log) == made[-2:]
    assert [log.store.holds_save(save) for save in made] == [False] * 10 + [True] * 2


# --- links ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    folder = tmp_path / "outside"
    (folder / "checkpoint-1").mkdir(parents=True)
    (folder / "checkpoint-1" / "precious").write_text("precious")
    return folder


@pytest.mark.parametrize("link", ["exec", "exec/a", "exec/a/checkpoint-1"])
def test_a_link_on_the_way_leaves_the_folder_in_place(posix_store: PosixStore, outside: Path, link: str) -> None:
    log = PublicationLog(posix_store)
    publish(log, "exec/a/checkpoint-1", 1, 1)
    publish(log, "other/2", 1, 2)
    publish(log, "other/3", 1, 3)
    path = Path(posix_store.locate(link))
    path.rename(outside / "moved")
    path.symlink_to(outside / "moved")
    left: list[tuple[str, str]] = []
    assert prune(log, 1, left=lambda location, reason: left.append((location, reason))) == ["other/2"]
    assert left == [(posix_store.locate("exec/a/checkpoint-1"), f"{path} is a symbolic link")]
    assert path.is_symlink()
    assert Path(posix_store.locate("exec/a/checkpoint-1/weights.safetensors")).read_bytes() == b"weights"


def test_links_inside_a_save_are_unlinked_and_not_followed(posix_store: PosixStore, outside: Path) -> None:
    log = PublicationLog(posix_store)
    save = publish(log, "exec/a/checkpoint-1", 1, 1)
    publish(log, "exec/a/checkpoint-2", 1, 2)
    Path(posix_store.locate(f"{save}/folder")).symlink_to(outside)
    Path(posix_store.locate(f"{save}/file")).symlink_to(outside / "checkpoint-1" / "precious")
    assert prune(log, 1) == [save]
    assert (outside / "checkpoint-1" / "precious").read_text() == "precious"


# Swaps a folder for a link to `decoy` and back, each state as long as the other, whatever is removed meanwhile.
RACER = """
import contextlib, os, random, shutil, sys, time
victim, decoy, aside = sys.argv[1:]
def put_back():
    with contextlib.suppress(OSError):
        os.rename(aside, victim)
    shutil.rmtree(aside, ignore_errors=True)  # where there is another one by now, or nowhere to put it
print("ready", flush=True)
while True:
    time.sleep(random.uniform(0, 0.0003))
    with contextlib.suppress(OSError):
        os.rename(victim, aside)
        with contextlib.suppress(OSError):
            os.symlink(decoy, victim)
        time.sleep(random.uniform(0, 0.0003))
        with contextlib.suppress(OSError):
            os.unlink(victim)
        put_back()
"""


@pytest.mark.parametrize("often", [10, pytest.param(1000, marks=pytest.mark.long)])
@pytest.mark.parametrize("victim", ["exec/a", "exec/a/save", "exec/a/save/deep"])
def test_a_link_swapped_in_at_any_moment_never_lets_prune_out(
    posix_store: PosixStore, outside: Path, tmp_path: Path, victim: str, often: int
) -> None:
    """Another process keeps swapping a folder on the way for a link to the outside, which holds the same names."""
    for folder in ("save/deep", "deep", "save"):
        (outside / folder).mkdir(parents=True, exist_ok=True)
        (outside / folder / "precious").write_text("precious")
    precious = sorted(outside.rglob("precious"))
    save = Path(posix_store.locate("exec/a/save"))
    command = [sys.executable, "-c", RACER, posix_store.locate(victim), str(outside), str(tmp_path / "aside")]
    racer = subprocess.Popen(command, stdout=subprocess.PIPE)
    outcomes = {"link": 0, "removed": 0, "refused": 0}
    # A link within the folder that goes is removed with it, so that race shows in nothing but what stays outside.
    met = "removed" if victim.startswith("exec/a/save/") else "link"
    try:
        assert racer.stdout is not None
        assert racer.stdout.readline() == b"ready\n"
        while min(outcomes["removed"], outcomes[met]) < often:
            assert racer.poll() is None
            with contextlib.suppress(OSError):
                (save / "deep").mkdir(parents=True, exist_ok=True)
                (save / "deep" / "shard").write_text("x")
            there = save.is_dir()
            try:
                link = posix_store.remove_folder("exec/a/save")
            except StoreError:
                outcomes["refused"] += 1  # a folder that would not stay empty
            else:
                outcomes["link" if link else "removed"] += there
            # Writing through a link that was swapped in is the writer's affair; removing is ours.
            assert [path for path in precious if not path.exists()] == [], outcomes
    finally:
        racer.kill()
        racer.wait()
        assert racer.stdout is not None
        racer.stdout.close()
    print(f"\n{victim}: {outcomes}")


# --- crashes --------------------------------------------------------------------------------------------------------

PRUNE = """
from cortex_training.publication import PublicationLog, prune
def work(root):
    prune(PublicationLog(root), 1)
"""


def test_killed_at_any_moment_prune_leaves_no_entry_without_its_save(tmp_path: Path) -> None:
    """Also no half-removed save that a watch would take for a complete one."""
    roots = [tmp_path / f"root-{point}" for point in range(20)]
    for root in roots:
        root.mkdir()
        log = PublicationLog(root)
        for step in (1, 2, 3):
            save = publish(log, f"exec/a/checkpoint-{step}", 1, step)
            for name in ("shard-0", "shard-1", "shard-2"):
                Path(log.store.locate(save), name).write_bytes(b"x")
            Path(log.store.locate(save), "trainer_state.json").write_text(f'{{"global_step": {step}}}')
    codes = killed_at_each_call(PRUNE, ["unlink", "rmdir"], roots)
    # 2 entries; of each of 2 saves 2 markers that are not there, 5 files and the folder
    assert codes == [-signal.SIGKILL] * 18 + [0]
    for point, root in enumerate(roots[: len(codes)]):
        log = PublicationLog(root)
        for entry in log.entries():
            assert len(log.store.listing(entry.save).files) == 5, f"killed at {point}: {entry.save} is not whole"
        assert saves(log)[-1] == "exec/a/checkpoint-3"
        Watch(log, FRAMEWORKS["hf"], "exec/a", 2).scan(lambda entry: None)
        for entry in log.entries():
            assert len(log.store.listing(entry.save).files) == 5, f"killed at {point}: {entry.save} came in parts"
    assert os.listdir(roots[18] / "exec" / "a") == ["checkpoint-3"]
