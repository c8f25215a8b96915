"""Downloads over poor lines, from links that expire."""

from __future__ import annotations

import dataclasses
import hashlib
import logging
import os
import re
import socket
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest

from cortex_training.errors import ProtocolError
from cortex_training.publication import (
    DownloadError,
    SavedFile,
    SaveManifest,
    Store,
    download_checkpoint,
    export_save,
)
from cortex_training.publication.export import NOTE_NAME
from tests.publication.servers import serving

SECRET = "X-Signature-hush"


@dataclass
class LinkServer:
    """Serves files by links of a generation; links of earlier generations are expired.

    `cut`: how many bytes of each reply arrive before the connection drops, in order of requests; None: all.
    `answers`: statuses given instead, in order of requests; None: serve.
    """

    files: dict[str, bytes]
    generation: int = 0
    exports: int = 0
    etag: str | None = '"v1"'
    ranges: bool = True
    cut: list[int | None] = field(default_factory=list)
    answers: list[int | None] = field(default_factory=list)
    requests: list[tuple[str, str | None]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    port: int = 0
    expire_after_export: int = 0

    def export_checkpoint(self, job_id: str, checkpoint_id: str) -> dict[str, Any]:
        assert (job_id, checkpoint_id) == ("job", "cp_1")
        self.exports += 1
        links = [
            {
                "filename": name,
                "url": f"http://127.0.0.1:{self.port}/{self.generation}/{name}?{SECRET}",
                "size_bytes": len(data),
            }
            for name, data in self.files.items()
        ]
        if self.exports <= self.expire_after_export:
            self.generation += 1
        return {"checkpoint_id": checkpoint_id, "files": links, "expires_at": "2026-07-20T19:05:00Z"}


class LinkHandler(BaseHTTPRequestHandler):
    server_state: LinkServer

    def do_GET(self) -> None:
        state = self.server_state
        asked = self.headers.get("Range")
        path, _, query = self.path.removeprefix("/").partition("?")
        generation, _, name = path.partition("/")
        state.requests.append((name, asked))
        state.headers.append(dict(self.headers))
        answer = state.answers.pop(0) if state.answers else None
        cut = state.cut.pop(0) if state.cut else None
        if answer is not None or query != SECRET or int(generation) < state.generation:
            self._reply(answer or 403, {}, b"")
            return
        data = state.files[name]
        tag = {"ETag": state.etag} if state.etag else {}
        matches = self.headers.get("If-Range") in (None, state.etag)
        if asked and state.ranges and matches:
            start = int(re.fullmatch(r"bytes=(\d+)-", asked)[1])  # type: ignore[index]
            span = {"Content-Range": f"bytes {start}-{len(data) - 1}/{len(data)}"}
            self._reply(206, tag | span, data[start:], cut)
        else:
            self._reply(200, tag, data, cut)

    def _reply(self, status: int, headers: dict[str, str], data: bytes, cut: int | None = None) -> None:
        self.send_response_only(status)
        for name, value in ({"Content-Length": str(len(data))} | headers).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data if cut is None else data[:cut])
        if cut is not None:
            self.wfile.flush()
            self.connection.shutdown(socket.SHUT_RDWR)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[LinkServer]:
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    files = {"model.safetensors": os.urandom(3_000_000), "deep/config.json": b'{"a": 1}', "empty": b""}
    state = LinkServer(files)
    with serving(type("Handler", (LinkHandler,), {"server_state": state})) as port:
        state.port = port
        yield state


def download(server: LinkServer, dest: Path, **options: Any) -> list[SavedFile]:
    saved = download_checkpoint(server, "job", "cp_1", dest, **options)
    for file in saved:
        data = (dest / file.path).read_bytes()
        assert data == server.files[file.path]
        assert (file.size, file.sha256) == (len(data), hashlib.sha256(data).hexdigest())
    assert sorted(file.path for file in saved) == sorted(server.files)
    left = {str(path.relative_to(dest)) for path in dest.rglob("*") if path.is_file()}
    assert left == {*server.files, NOTE_NAME}
    return saved


def test_every_file_arrives_with_its_checksum(server: LinkServer, tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    download(server, tmp_path / "cp_1", progress=lambda done, total: seen.append((done, total)))
    total = sum(map(len, server.files.values()))
    assert seen[-1] == (total, total)
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)


def test_files_that_are_whole_are_not_fetched_again(server: LinkServer, tmp_path: Path) -> None:
    first = download(server, tmp_path)
    (tmp_path / "deep" / "config.json").write_bytes(b"short")
    server.requests.clear()
    assert download(server, tmp_path) == first
    assert server.requests == [("deep/config.json", None)]


def test_what_another_process_put_there_is_made_durable(
    server: LinkServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may have been killed right before: a power loss would take names that the manifest vouches for."""
    dest = tmp_path / "cp_1"
    download(server, dest)
    synced: list[str] = []
    monkeypatch.setattr("cortex_training.publication.durable.sync_folder", synced.append)
    download(server, dest)
    assert {str(folder) for folder in (tmp_path, dest, dest / "deep")} <= set(synced)


def overwritten(server: LinkServer) -> None:
    """The checkpoint is overwritten by another one, whose files have the same names and sizes."""
    server.files = {name: os.urandom(len(data)) for name, data in server.files.items()}


def test_a_later_checkpoint_of_the_same_name_and_sizes_is_fetched_anew(server: LinkServer, tmp_path: Path) -> None:
    download(server, tmp_path, created_at="2026-07-20T19:05:00Z")
    (tmp_path / ".cortex-save.json").write_text("{}")
    overwritten(server)
    server.answers = [None, *[500] * 5]
    with pytest.raises(DownloadError):
        download(server, tmp_path, created_at="2026-07-21T19:05:00Z")
    # A folder that is neither checkpoint must not look like a save, nor may what is left of the first one count later.
    assert not (tmp_path / ".cortex-save.json").exists()
    download(server, tmp_path, created_at="2026-07-21T19:05:00Z")


def test_a_part_of_another_checkpoint_is_not_continued(server: LinkServer, tmp_path: Path) -> None:
    server.etag = None
    server.cut = [None, 1_100_000]
    server.answers = [None, None, *[500] * 5]
    with pytest.raises(DownloadError):
        download(server, tmp_path, created_at="2026-07-20T19:05:00Z")
    overwritten(server)
    server.requests.clear()
    download(server, tmp_path, created_at="2026-07-21T19:05:00Z")
    assert {span for _, span in server.requests} == {None}


def test_files_of_unknown_origin_are_not_trusted(server: LinkServer, tmp_path: Path) -> None:
    for name, data in server.files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(bytes(len(data)))
    download(server, tmp_path)


def test_a_download_over_a_dropping_line_goes_on_where_it_was(server: LinkServer, tmp_path: Path) -> None:
    server.cut = [None, 1_100_000, 1_200_000]  # the small file, and twice the large one
    download(server, tmp_path)
    asked = [span for name, span in server.requests if name == "model.safetensors"]
    assert asked[0] is None
    assert len(asked) == 3
    assert [int(span[6:-1]) > 0 for span in asked[1:] if span] == [True, True]


def test_a_download_by_another_process_goes_on_where_it_was(server: LinkServer, tmp_path: Path) -> None:
    server.cut = [None, 1_100_000]
    server.answers = [None, None, *[500] * 5]
    with pytest.raises(DownloadError, match=r"'model\.safetensors'.*status 500.*call again to go on"):
        download(server, tmp_path)
    server.requests.clear()
    assert not (tmp_path / "model.safetensors").exists()
    download(server, tmp_path)
    (name, span), *rest = server.requests
    assert name == "model.safetensors"
    assert span is not None
    assert int(span[6:-1]) >= 1_000_000
    assert rest == []


@pytest.mark.parametrize("change", ["ranges", "etag"])
def test_a_file_that_cannot_be_resumed_begins_anew(server: LinkServer, tmp_path: Path, change: str) -> None:
    server.cut = [None, 2_000_000]
    server.answers = [None, None, *[500] * 5]
    with pytest.raises(DownloadError):
        download(server, tmp_path)
    if change == "ranges":
        server.ranges = False
    else:
        # The checkpoint was overwritten by one of the same size.
        server.etag = '"v2"'
        server.files["model.safetensors"] = os.urandom(3_000_000)
    seen: list[int] = []
    download(server, tmp_path, progress=lambda done, total: seen.append(done))
    assert max(seen) == sum(map(len, server.files.values()))


@pytest.mark.parametrize("etag", [None, 'W/"weak"'])
def test_without_a_strong_etag_a_range_is_asked_for_plainly(
    server: LinkServer, tmp_path: Path, etag: str | None
) -> None:
    server.etag = etag
    server.cut = [None, 1_500_000]
    download(server, tmp_path)
    assert "If-Range" not in server.headers[-1]
    assert server.requests[-1][1] is not None


@pytest.mark.parametrize("status", [403, 404, 410])
def test_an_expired_link_is_exported_again(server: LinkServer, tmp_path: Path, status: int) -> None:
    server.answers = [None, status]
    download(server, tmp_path)
    assert server.exports == 2


def test_links_that_are_expired_when_they_come_are_given_up(server: LinkServer, tmp_path: Path) -> None:
    server.expire_after_export = 99
    with pytest.raises(DownloadError, match="refused with status 403; gave up after 5 tries") as raised:
        download(server, tmp_path)
    assert server.exports == 5
    assert SECRET not in str(raised.value)


def test_a_checkpoint_that_changed_between_exports_is_an_error(server: LinkServer, tmp_path: Path) -> None:
    server.expire_after_export = 1
    original = server.export_checkpoint

    def changing(job_id: str, checkpoint_id: str) -> dict[str, Any]:
        reply = original(job_id, checkpoint_id)
        server.files["deep/config.json"] += b" "
        return reply

    server.export_checkpoint = changing  # type: ignore[method-assign]
    with pytest.raises(DownloadError, match="changed while it was being downloaded"):
        download_checkpoint(server, "job", "cp_1", tmp_path)


@pytest.mark.parametrize("status", [400, 301, 500])
def test_other_answers_are_errors_without_the_link(server: LinkServer, tmp_path: Path, status: int) -> None:
    server.answers = [status] * 9
    with pytest.raises(DownloadError, match=f"status {status}") as raised:
        download(server, tmp_path)
    assert SECRET not in str(raised.value)


def test_a_store_that_sends_too_much_is_an_error(server: LinkServer, tmp_path: Path) -> None:
    class Understating:
        def export_checkpoint(self, job_id: str, checkpoint_id: str) -> dict[str, Any]:
            reply = server.export_checkpoint(job_id, checkpoint_id)
            reply["files"][0]["size_bytes"] -= 1
            return reply

    with pytest.raises(DownloadError, match="more than the 2999999 bytes"):
        download_checkpoint(Understating(), "job", "cp_1", tmp_path)
    assert not (tmp_path / "model.safetensors").exists()


def test_no_server_is_an_error_without_the_link(server: LinkServer, tmp_path: Path) -> None:
    server.port = 1
    with pytest.raises(DownloadError, match=r"no reply \(ConnectionError\)") as raised:
        download(server, tmp_path)
    assert SECRET not in str(raised.value)
    assert raised.value.__cause__ is None


def files_reply(**change: object) -> dict[str, Any]:
    return {"files": [{"filename": "a", "url": "https://x/a?hush", "size_bytes": 1} | change]}


@pytest.mark.parametrize(
    "reply",
    [
        {},
        {"files": []},
        {"files": ["a"]},
        files_reply(filename=None),
        files_reply(filename="../a"),
        files_reply(filename="/etc/passwd"),
        files_reply(filename="a/../../b"),
        files_reply(filename="a\\b"),
        files_reply(filename=".cortex-save.json"),
        files_reply(filename=".cortex-download/x"),
        files_reply(filename=NOTE_NAME),
        files_reply(size_bytes=-1),
        files_reply(size_bytes="1"),
        files_reply(url="file:///etc/passwd"),
        files_reply(url=None),
        {"files": files_reply()["files"] * 2},
    ],
)
def test_replies_that_are_refused_write_nothing(tmp_path: Path, reply: dict[str, Any]) -> None:
    class Client:
        def export_checkpoint(self, job_id: str, checkpoint_id: str) -> dict[str, Any]:
            return reply

    with pytest.raises(ProtocolError, match="export checkpoint cp_1 of job job") as raised:
        download_checkpoint(Client(), "job", "cp_1", tmp_path / "cp_1")
    assert "hush" not in str(raised.value)
    assert list(tmp_path.iterdir()) == []


def test_links_and_credentials_go_nowhere_else(
    server: LinkServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    netrc = tmp_path / "netrc"
    netrc.write_text("machine 127.0.0.1 login someone password netrc-password\n")
    netrc.chmod(0o600)
    monkeypatch.setenv("NETRC", str(netrc))
    server.answers = [None, 403]
    download(server, tmp_path / "cp_1")
    assert SECRET not in caplog.text
    assert all("Authorization" not in headers for headers in server.headers)


def test_the_environments_proxy_is_used_and_a_named_one_wins(
    server: LinkServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    with pytest.raises(DownloadError, match="ProxyError"):
        download_checkpoint(server, "job", "cp_1", tmp_path)
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    download(server, tmp_path)
    with pytest.raises(DownloadError, match="ProxyError"):
        download_checkpoint(server, "job", "cp_1", tmp_path / "other", proxy="http://127.0.0.1:2")


def test_a_full_disk_is_an_error_that_names_the_folder(
    server: LinkServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(DownloadError, match=f"to {tmp_path}/cp_1: No space left"):
        download_checkpoint(server, "job", "cp_1", tmp_path / "cp_1")


def test_an_exported_save_has_its_manifest_last(server: LinkServer, store: Store) -> None:
    manifest = SaveManifest("job", "cp_1", "weights-only", 12)
    server.answers = [None, None, *[500] * 5]
    server.cut = [None, 1_000]
    with pytest.raises(DownloadError):
        export_save(server, store, "exec/a/cp_1", manifest)
    assert not store.exists("exec/a/cp_1/.cortex-save.json")
    complete = export_save(server, store, "exec/a/cp_1", manifest)
    assert SaveManifest.read(store, "exec/a/cp_1") == complete
    for file in complete.files:
        assert store.read(f"exec/a/cp_1/{file.path}") == server.files[file.path]
    overwritten(server)
    later = dataclasses.replace(manifest, created_at="2026-07-21T19:05:00Z")
    for file in export_save(server, store, "exec/a/cp_1", later).files:
        assert store.read(f"exec/a/cp_1/{file.path}") == server.files[file.path]


def test_a_bucket_keeps_what_it_holds_whole(server: LinkServer, s3_store: Store) -> None:
    manifest, save = SaveManifest("job", "cp_1", "weights-only", 12), "exec/a/cp_1"
    server.answers = [None, *[500] * 5]
    with pytest.raises(DownloadError):
        export_save(server, s3_store, save, manifest)
    fetched = len(server.requests)
    export_save(server, s3_store, save, manifest)
    # The small files are there, the large one is missing.
    assert len(server.requests) == fetched + 1
    assert export_save(server, s3_store, save, manifest).files
    assert len(server.requests) == fetched + 1
    # Of another length than the note says: somebody wrote there.
    s3_store.write(f"{save}/deep/config.json", b"{}")
    export_save(server, s3_store, save, manifest)
    assert len(server.requests) == fetched + 2
    assert s3_store.read(f"{save}/deep/config.json") == server.files["deep/config.json"]


def test_progress_into_a_bucket_is_that_of_the_whole_checkpoint(server: LinkServer, s3_store: Store) -> None:
    told: list[tuple[int, int]] = []
    export_save(
        server,
        s3_store,
        "exec/a/cp_1",
        SaveManifest("job", "cp_1", "weights-only", 12),
        lambda done, total: told.append((done, total)),
    )
    total = sum(len(data) for data in server.files.values())
    assert {total} == {of for _, of in told}
    assert [done for done, _ in told] == sorted(done for done, _ in told)
    assert told[-1] == (total, total)
