"""What both stores promise, and what the directory promises alone."""

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from cortex_training.errors import ConfigurationError
from cortex_training.publication import (
    Listing,
    PosixStore,
    PublicationLog,
    RootError,
    SaveError,
    Store,
    StoreError,
)


def test_create_has_one_winner_and_leaves_the_winners_bytes(store: Store) -> None:
    assert store.create("journal/1", b"first")
    assert not store.create("journal/1", b"second")
    assert store.read("journal/1") == b"first"
    assert store.create("pub/empty")
    assert not store.create("pub/empty")
    assert store.read("pub/empty") == b""


def test_listing_shows_what_is_directly_in_a_folder(store: Store) -> None:
    for name in ("a/2", "a/10", "a/1", "a/b/c", "ab/x"):
        store.create(name, b"x")
    assert store.listing("a") == Listing(["1", "10", "2"], ["b"])
    assert store.names("a") == ["1", "10", "2"]
    assert store.listing("nothing") == Listing([], [])


def test_read_and_exists_tell_what_is_missing(store: Store) -> None:
    with pytest.raises(FileNotFoundError, match="journal/7"):
        store.read("journal/7")
    assert not store.exists("journal/7")
    store.write("journal/7", b"")
    assert store.exists("journal/7")
    assert (store.size("journal/7"), store.size("journal/8")) == (0, None)


def test_write_replaces_and_remove_is_repeatable(store: Store) -> None:
    store.write("exec/a/m.json", b"one")
    store.write("exec/a/m.json", b"two")
    assert store.read("exec/a/m.json") == b"two"
    assert store.holds_save("exec/a")
    store.remove("exec/a/m.json")
    store.remove("exec/a/m.json")
    assert not store.exists("exec/a/m.json")


def test_remove_folder_takes_that_folder_alone(store: Store) -> None:
    for name in ("exec/a/checkpoint-1/deep/w", "exec/a/checkpoint-1/.metadata", "exec/a/checkpoint-10/w"):
        store.write(name, b"w")
    assert store.remove_folder("exec/a/checkpoint-1", first=(".metadata", "absent")) is None
    assert store.remove_folder("exec/a/checkpoint-1") is None
    assert not store.holds_save("exec/a/checkpoint-1")
    assert store.read("exec/a/checkpoint-10/w") == b"w"


def test_staged_files_are_in_the_store_afterwards(store: Store) -> None:
    with store.staged("exec/a/cp_1") as folder:
        Path(folder, "deep").mkdir()
        Path(folder, "deep", "w").write_bytes(b"weights")
    assert store.read("exec/a/cp_1/deep/w") == b"weights"


@pytest.mark.parametrize("name", ["", "/x", "../x", "a/../../x", "a//b", "a/./b", "a\x00b"])
def test_names_that_leave_the_root_are_refused(store: Store, name: str) -> None:
    for operation in (store.create, store.read, store.listing, store.remove, store.remove_folder, store.exists):
        with pytest.raises(ConfigurationError):
            operation(name)


def test_a_missing_root_is_an_error_and_not_an_empty_log(tmp_path: Path) -> None:
    with pytest.raises(RootError, match="nowhere"):
        PosixStore(tmp_path / "nowhere")
    (tmp_path / "file").write_text("")
    with pytest.raises(RootError, match="file"):
        PosixStore(tmp_path / "file")


def test_a_root_that_vanishes_is_an_error_too(tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()
    store = PosixStore(root)
    root.rmdir()
    for operation in (
        lambda: store.listing("pub"),
        lambda: store.read("pub/x"),
        lambda: store.create("pub/x"),
        lambda: store.remove_folder("exec/a"),
    ):
        with pytest.raises(RootError):
            operation()
    assert not root.exists()


def test_the_root_may_be_a_link(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    store = PosixStore(tmp_path / "link")
    assert store.create("pub/x")
    assert store.root == str(tmp_path / "link")


def test_relative_roots_become_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert PosixStore(".").root == str(tmp_path)


def test_a_record_that_is_being_written_is_invisible(posix_store: PosixStore, monkeypatch: pytest.MonkeyPatch) -> None:
    posix_store.create("journal/1", b"x")
    seen = []
    link = os.link

    def looking_link(source: str, target: str) -> None:
        seen.append((posix_store.names("journal"), posix_store.exists("journal/2")))
        link(source, target)

    monkeypatch.setattr(os, "link", looking_link)
    posix_store.create("journal/2", b"y" * 100_000)
    assert seen == [(["1"], False)]
    assert posix_store.names("journal") == ["1", "2"]
    assert sorted(os.listdir(posix_store.locate("journal"))) == ["1", "2"]


def test_a_link_whose_reply_was_lost_counts_as_ours(posix_store: PosixStore, monkeypatch: pytest.MonkeyPatch) -> None:
    link = os.link

    def twice(source: str, target: str) -> None:
        link(source, target)
        link(source, target)  # as an NFS client does that got no reply; this one raises

    monkeypatch.setattr(os, "link", twice)
    assert posix_store.create("journal/1", b"x")


def test_records_and_names_are_synced(posix_store: PosixStore, monkeypatch: pytest.MonkeyPatch) -> None:
    synced = []
    fsync = os.fsync

    def recording(handle: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{handle}"))
        fsync(handle)

    monkeypatch.setattr(os, "fsync", recording)
    posix_store.create("pub/x")
    assert synced == [posix_store.root, posix_store.locate("pub/x"), posix_store.locate("pub")]


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EIO])
def test_what_the_file_system_refuses_names_the_path(
    posix_store: PosixStore, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    def refuse(*arguments: object, **options: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(StoreError, match="pub/x") as raised:
        posix_store.create("pub/x", b"data")
    assert os.strerror(code) in str(raised.value)
    monkeypatch.undo()
    assert posix_store.names("pub") == []


def test_a_disk_that_does_not_answer_is_not_a_save_that_is_gone(
    posix_store: PosixStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or the entry of a good save would be taken back."""
    posix_store.write("exec/a/1/w", b"w")
    log = PublicationLog(posix_store)
    create, look = PosixStore.create, os.stat

    def then_stale(self: PosixStore, name: str, data: bytes = b"") -> bool:
        created = create(self, name, data)

        def stale(path: object, **options: Any) -> os.stat_result:
            if str(path).endswith("exec/a/1"):
                raise OSError(errno.ESTALE, "Stale file handle")
            return look(path, **options)  # type: ignore[arg-type]

        monkeypatch.setattr(os, "stat", stale)
        return created

    monkeypatch.setattr(PosixStore, "create", then_stale)
    with pytest.raises(StoreError, match=r"exec/a/1: Stale file handle") as raised:
        log.publish("exec/a/1", 1, 1)
    assert not isinstance(raised.value, SaveError)
    monkeypatch.undo()
    assert [entry.save for entry in log.entries()] == ["exec/a/1"]


def test_a_folder_that_goes_while_a_record_is_made_is_a_store_error(
    posix_store: PosixStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    posix_store.create("exec/a/1", b"x")
    monkeypatch.setattr(PosixStore, "_make_folder", lambda store, path: None)
    with pytest.raises(StoreError, match="exec/gone/1"):
        posix_store.create("exec/gone/1", b"x")
    with pytest.raises(StoreError, match="exec/gone/1"):
        posix_store.write("exec/gone/1", b"x")


def test_a_folder_that_somebody_else_made_is_made_durable_once(
    posix_store: PosixStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever made it may have been killed before its name was synced: a power loss takes everything in it."""
    os.makedirs(os.path.join(posix_store.root, "exec/a"))
    synced = []
    monkeypatch.setattr("cortex_training.publication.durable.sync_folder", synced.append)
    posix_store.create("exec/a/1", b"x")
    posix_store.create("exec/a/2", b"x")
    exec_, attempt = posix_store.locate("exec"), posix_store.locate("exec/a")
    assert synced == [posix_store.root, exec_, attempt, attempt]


def test_names_over_255_bytes_and_files_in_the_way_are_store_errors(posix_store: PosixStore) -> None:
    with pytest.raises(StoreError, match="shorten the name"):
        posix_store.create("pub/" + "x" * 256)
    posix_store.create("file", b"x")
    with pytest.raises(StoreError, match="file"):
        posix_store.listing("file")


def test_an_oversized_record_is_refused(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cortex_training.publication.store.MAX_RECORD_BYTES", 10)
    monkeypatch.setattr("cortex_training.publication.s3.MAX_RECORD_BYTES", 10, raising=False)
    store.write("exec/a/state", b"x" * 11)
    with pytest.raises(StoreError, match=r"exec/a/state.*larger than 10 bytes"):
        store.read("exec/a/state")
