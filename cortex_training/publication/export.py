"""Download the files of a weights-only checkpoint from the links the service exports.

A link is a secret that works for anybody who has it: it appears in no log record, exception or file made here, and it
is fetched by a session that carries no credentials of ours.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import requests

from cortex_training.errors import ProtocolError
from cortex_training.paths import safe_relative
from cortex_training.proxies import checked_proxy, environment_proxy
from cortex_training.publication import durable
from cortex_training.publication.errors import DownloadError
from cortex_training.publication.quiet import quiet_libraries
from cortex_training.publication.save import MANIFEST_NAME, SavedFile

#: Called with bytes downloaded so far and bytes in all.
Progress = Callable[[int, int], None]

CONNECT_TIMEOUT_S = 30.0
READ_TIMEOUT_S = 60.0
#: Fruitless tries in a row at one file. A try that brought bytes starts the count again: a long download over a
#: poor line is not a failing one.
MAX_TRIES = 5

_BLOCK_BYTES = 1024 * 1024
_PARTIAL_FOLDER = ".cortex-download"
#: Says which checkpoint the files beside it are of.
NOTE_NAME = ".cortex-download.json"
#: The same, of a store that can't hold half a file; see `into_store`.
STORE_NOTE_NAME = ".cortex-export.json"
_LINK_EXPIRED = frozenset({403, 404, 410})
_TRANSIENT = frozenset({408, 429, 500, 502, 503, 504})
_CONTENT_RANGE = re.compile(r"bytes (\d+)-\d+/(\d+|\*)", re.ASCII)


class ExportingClient(Protocol):
    """The one call that is needed of a client."""

    def export_checkpoint(self, job_id: str, checkpoint_id: str) -> Mapping[str, Any]: ...


@dataclass(frozen=True)
class Link:
    """A file of a checkpoint; `url` is a secret, and not in its representation."""

    filename: str
    url: str
    size: int

    def __repr__(self) -> str:
        return f"Link({self.filename!r}, size={self.size})"


class _TryAgain(Exception):
    """A try at a file that failed in a way that another try may not; its text is free of links."""


class _Expired(_TryAgain):
    """The link is not honoured (any more)."""


def download_checkpoint(
    client: ExportingClient,
    job_id: str,
    checkpoint_id: str,
    dest: str | os.PathLike[str],
    progress: Progress | None = None,
    *,
    created_at: str | None = None,
    proxy: str | None = None,
    ca_bundle: str | None = None,
) -> list[SavedFile]:
    """Download every file of a checkpoint into the folder `dest`, and say what was written. Blocks.

    Files that are whole already are kept, partial ones are resumed, a link that has expired is exported again. Each
    file appears under its name only when it has its full size and is synced. The service gives sizes only; the SHA-256
    is computed here. `proxy` is used instead of the environment's; `ca_bundle` instead of the built-in authorities.

    A note in the folder says which checkpoint its files are of; files of another one, or of nobody knows which, are
    fetched anew. Give `created_at`, as the service lists it: ids may come again, and sizes say nothing of weights.

    Raises ConfigurationError for a proxy that is no URL, DownloadError (naming checkpoint and file), ProtocolError for
    a reply or a file name that is refused, and whatever `client.export_checkpoint` raises.
    """
    folder = os.path.abspath(os.fspath(dest))
    proxy = checked_proxy(proxy)
    download = _Download(client, job_id, checkpoint_id, created_at, folder, _plain_session(ca_bundle), proxy, progress)
    with quiet_libraries(), download.session:
        try:
            return download.run()
        except OSError as problem:
            if isinstance(problem, requests.RequestException):
                raise
            raise DownloadError(
                f"download checkpoint {checkpoint_id} of job {job_id} to {folder}: {problem.strerror or problem}"
            ) from problem


class _Download:
    def __init__(
        self,
        client: ExportingClient,
        job_id: str,
        checkpoint_id: str,
        created_at: str | None,
        folder: str,
        session: requests.Session,
        proxy: str | None,
        progress: Progress | None,
    ) -> None:
        self.session = session
        self._client = client
        self._job_id = job_id
        self._checkpoint_id = checkpoint_id
        self._created_at = created_at
        self._folder = folder
        self._partial_folder = os.path.join(folder, _PARTIAL_FOLDER)
        self._proxy = proxy
        self._progress = progress
        self._links: dict[str, Link] = {}
        self._done = 0

    def run(self) -> list[SavedFile]:
        self._links = self._export()
        durable.make_folder(self._folder)
        self._settle_origin()
        durable.make_folder(self._partial_folder)
        saved = [self._fetch(filename) for filename in sorted(self._links)]
        shutil.rmtree(self._partial_folder)
        durable.sync_folder(self._folder)
        return saved

    def _settle_origin(self) -> None:
        """See to it that whatever is in the folder is of this checkpoint, and that the folder says so."""
        path = os.path.join(self._folder, NOTE_NAME)
        origin = {"job_id": self._job_id, "checkpoint_id": self._checkpoint_id, "created_at": self._created_at}
        note = json.dumps({"v": 1, **origin}, sort_keys=True).encode() + b"\n"
        if os.path.exists(path) and Path(path).read_bytes() == note:
            return
        # The manifest first and the note last: after a crash in between nothing here passes for either checkpoint.
        for filename in (MANIFEST_NAME, *self._links):
            target = os.path.join(self._folder, *filename.split("/"))
            if os.path.isfile(target):
                os.unlink(target)
                durable.sync_folder(os.path.dirname(target))
        if os.path.isdir(self._partial_folder):
            shutil.rmtree(self._partial_folder)
        durable.sync_folder(self._folder)
        durable.replace_whole(path, note)
        durable.sync_folder(self._folder)

    def _export(self) -> dict[str, Link]:
        return read_links(self._client.export_checkpoint(self._job_id, self._checkpoint_id), self._what)

    @property
    def _what(self) -> str:
        return f"checkpoint {self._checkpoint_id} of job {self._job_id}"

    def _fetch(self, filename: str) -> SavedFile:
        size = self._links[filename].size
        target = os.path.join(self._folder, *filename.split("/"))
        if os.path.isfile(target) and os.path.getsize(target) == size:
            digest, _ = _hash_file(target)
            # Whoever put it there may have been killed before its name was durable.
            durable.sync_folder(os.path.dirname(target))
            self._advance(size)
            return SavedFile(filename, size, digest.hexdigest())
        partial = _Partial(os.path.join(self._partial_folder, hashlib.sha256(filename.encode()).hexdigest()[:32]))
        sha256 = self._fill(partial, filename)
        durable.make_folder(os.path.dirname(target))
        os.replace(partial.path, target)
        durable.sync_folder(os.path.dirname(target))
        return SavedFile(filename, size, sha256)

    def _fill(self, partial: _Partial, filename: str) -> str:
        """Bring a partial file to its full size, over as many tries as bring bytes; its SHA-256."""
        fruitless = 0
        while True:
            link = self._links[filename]
            before = partial.size()
            done = self._done
            try:
                return self._receive(partial, link)
            except _TryAgain as reason:
                self._done = done
                fruitless = 0 if partial.size() > before else fruitless + 1
                if fruitless >= MAX_TRIES:
                    raise DownloadError(
                        f"download {filename!r} of {self._what}: {reason}; gave up after {MAX_TRIES} tries without a "
                        "new byte. What is there was kept: call again to go on"
                    ) from None
                time.sleep(min(0.1 * 2**fruitless, 5.0))
                if isinstance(reason, _Expired):
                    self._renew(filename)

    def _renew(self, filename: str) -> None:
        size = self._links[filename].size
        links = self._export()
        if filename not in links or links[filename].size != size:
            raise DownloadError(
                f"download {filename!r} of {self._what}: the checkpoint changed while it was being downloaded; "
                "delete what was downloaded and start again"
            )
        self._links = links

    def _receive(self, partial: _Partial, link: Link) -> str:
        """One try: hash what is there, ask for the rest, append it."""
        have = partial.size()
        if have > link.size:
            partial.discard()
            have = 0
        digest, _ = _hash_file(partial.path) if have else (hashlib.sha256(), 0)
        self._advance(have)
        if have < link.size:
            with self._request(link, have, partial.validator()) as response:
                if have and response.status_code == 200:
                    # The store ignores ranges, or the file changed since its first part came.
                    self._advance(-have)
                    partial.discard()
                    digest, have = hashlib.sha256(), 0
                if not have:
                    partial.remember_validator(response.headers.get("ETag", ""))
                self._append(partial, response, link, digest, have)
        partial.sync()
        return digest.hexdigest()

    def _request(self, link: Link, have: int, validator: str) -> requests.Response:
        headers = {"Range": f"bytes={have}-"} if have else {}
        if have and validator:
            headers["If-Range"] = validator
        proxy = self._proxy or environment_proxy(link.url)
        proxies = {"http": proxy, "https": proxy} if proxy else {}
        timeout = (CONNECT_TIMEOUT_S, READ_TIMEOUT_S)
        try:
            response = self.session.get(link.url, headers=headers, stream=True, timeout=timeout, proxies=proxies)
        except requests.RequestException as problem:
            # The exception's text holds the link; its class says enough.
            raise _TryAgain(f"no reply ({type(problem).__name__})") from None
        with contextlib.ExitStack() as closing:
            closing.callback(response.close)
            self._check(response, link, have)
            closing.pop_all()
        return response

    def _check(self, response: requests.Response, link: Link, have: int) -> None:
        status = response.status_code
        if status in _LINK_EXPIRED:
            raise _Expired(f"the link was refused with status {status}")
        if status in _TRANSIENT:
            raise _TryAgain(f"the store answered status {status}")
        if status == 206 and have:
            found = _CONTENT_RANGE.fullmatch(response.headers.get("Content-Range", ""))
            if found and int(found[1]) == have and found[2] in ("*", str(link.size)):
                return
            raise DownloadError(
                f"download {link.filename!r} of {self._what}: asked for bytes from {have} of {link.size}, "
                f"got Content-Range {response.headers.get('Content-Range')!r}"
            )
        if status != 200:
            raise DownloadError(f"download {link.filename!r} of {self._what}: the store answered status {status}")

    def _append(self, partial: _Partial, response: requests.Response, link: Link, digest: _Digest, have: int) -> None:
        try:
            with open(partial.path, "ab") as file:
                for block in response.iter_content(_BLOCK_BYTES):
                    have += len(block)
                    if have > link.size:
                        break
                    file.write(block)
                    digest.update(block)
                    self._advance(len(block))
        except requests.RequestException as problem:
            raise _TryAgain(f"the connection was lost ({type(problem).__name__})") from None
        if have > link.size:
            partial.discard()
            raise DownloadError(
                f"download {link.filename!r} of {self._what}: the store sent more than the "
                f"{link.size} bytes the service announced"
            )
        if have < link.size:
            raise _TryAgain(f"got {have} of {link.size} bytes")

    def _advance(self, count: int) -> None:
        self._done += count
        if self._progress is not None and count > 0:
            self._progress(self._done, sum(link.size for link in self._links.values()))


class _Digest(Protocol):
    def update(self, data: bytes, /) -> None: ...
    def hexdigest(self) -> str: ...


class _Partial:
    """A file that is being downloaded, with the store's name (ETag) of the version its first bytes came from."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._validator_path = f"{path}.etag"

    def size(self) -> int:
        return os.path.getsize(self.path) if os.path.exists(self.path) else 0

    def validator(self) -> str:
        """A strong ETag, or nothing: a weak one doesn't promise equal bytes, so no store resumes by it."""
        if not os.path.exists(self._validator_path):
            return ""
        with open(self._validator_path, encoding="latin-1") as file:
            etag = file.read()
        return "" if etag.startswith("W/") else etag

    def remember_validator(self, etag: str) -> None:
        durable.replace_whole(self._validator_path, etag.encode("latin-1"))

    def discard(self) -> None:
        for path in (self.path, self._validator_path):
            if os.path.exists(path):
                os.unlink(path)

    def sync(self) -> None:
        with open(self.path, "ab") as file:
            os.fsync(file.fileno())


def read_links(reply: Mapping[str, Any], what: str) -> dict[str, Link]:
    """The files of an export reply by name. Raises ProtocolError naming the file, or the field, that is refused."""
    files = reply.get("files") if isinstance(reply, Mapping) else None
    if not isinstance(files, list) or not files:
        raise ProtocolError(f"export {what}: the reply lists no files")
    links: dict[str, Link] = {}
    for file in files:
        filename, url, size = (
            (file.get(key) for key in ("filename", "url", "size_bytes")) if isinstance(file, Mapping) else (None,) * 3
        )
        if not isinstance(filename, str):
            raise ProtocolError(f"export {what}: a file in the reply has no filename")
        try:
            filename = safe_relative(filename)
        except ValueError as problem:
            raise ProtocolError(f"export {what}: file name {filename!r} is refused: {problem}") from None
        if filename.split("/")[0] in (_PARTIAL_FOLDER, NOTE_NAME, STORE_NOTE_NAME, MANIFEST_NAME):
            raise ProtocolError(f"export {what}: file name {filename!r} is refused: it is used by the download itself")
        if filename in links:
            raise ProtocolError(f"export {what}: file {filename!r} is listed twice")
        if not isinstance(size, int) or isinstance(size, bool) or size < 0:
            raise ProtocolError(f"export {what}: file {filename!r} has size_bytes {size!r}")
        if not isinstance(url, str) or not url.lower().startswith(("https://", "http://")):
            raise ProtocolError(f"export {what}: file {filename!r} has no http(s) link")
        links[filename] = Link(filename, url, size)
    return links


def _hash_file(path: str) -> tuple[_Digest, int]:
    digest, size = hashlib.sha256(), 0
    with open(path, "rb") as file:
        while block := file.read(_BLOCK_BYTES):
            digest.update(block)
            size += len(block)
    return digest, size


def _plain_session(ca_bundle: str | None) -> requests.Session:
    """A session without credentials: the environment, and netrc with it, is off."""
    session = requests.Session()
    session.trust_env = False
    session.max_redirects = 5
    session.headers["Accept-Encoding"] = "identity"
    session.verify = ca_bundle or True
    return session
