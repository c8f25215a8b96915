"""Bringing a weights-only checkpoint of the service into a store, as a save that can be published.

A directory holds partial files, so a try that died is gone on with in the middle of one. A bucket can't: each file is
downloaded whole, then put there. A note in the bucket says of which checkpoint its files are and which are whole, with
their SHA-256; a try that died is gone on with at the first file that is not in it, or is not there in that size.
Either way the save's manifest is written last.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol

from cortex_training.publication.errors import DownloadError
from cortex_training.publication.export import (
    STORE_NOTE_NAME,
    ExportingClient,
    Progress,
    download_checkpoint,
    read_links,
)
from cortex_training.publication.save import MANIFEST_NAME, SavedFile, SaveManifest
from cortex_training.publication.store import PosixStore


class Place(Protocol):
    """What is asked of a store: that of publications, or any other place for files."""

    def size(self, name: str) -> int | None: ...
    def read(self, name: str) -> bytes: ...
    def write(self, name: str, data: bytes) -> None: ...
    def remove(self, name: str) -> None: ...
    def staged(self, save: str) -> AbstractContextManager[str]: ...


Fetch = Callable[[ExportingClient, str, Progress | None], list[SavedFile]]


def export_save(
    client: ExportingClient,
    place: Place,
    save: str,
    manifest: SaveManifest,
    progress: Progress | None = None,
    *,
    proxy: str | None = None,
    ca_bundle: str | None = None,
) -> SaveManifest:
    """Bring the checkpoint that `manifest` names into the folder `save`, its manifest last; returns it with its files.

    Called again after a crash it goes on with what is there: in a directory in the middle of a file, in a bucket with
    the first file that is not there whole. The temporary folder needs room for the largest file of a bucket's save.
    What remains is to publish it. Raises what :func:`download_checkpoint` raises, and StoreError.
    """

    def fetch(client: ExportingClient, folder: str, progress: Progress | None) -> list[SavedFile]:
        return download_checkpoint(
            client,
            manifest.job_id,
            manifest.checkpoint_id,
            folder,
            progress,
            created_at=manifest.created_at,
            proxy=proxy,
            ca_bundle=ca_bundle,
        )

    if isinstance(place, PosixStore):
        with place.staged(save) as folder:
            files = fetch(client, folder, progress)
    else:
        files = _file_by_file(client, place, save, manifest, fetch, progress or _untold)
    complete = dataclasses.replace(manifest, files=tuple(files))
    place.write(f"{save}/{MANIFEST_NAME}", complete.to_bytes())
    return complete


def _file_by_file(
    client: ExportingClient, place: Place, save: str, manifest: SaveManifest, fetch: Fetch, progress: Progress
) -> list[SavedFile]:
    links = _Links(client, manifest.job_id, manifest.checkpoint_id)
    note = _Note(place, save, manifest)
    if not note.files:
        # Another checkpoint may have been here. Its manifest must not vouch for a mix of its files and ours.
        place.remove(f"{save}/{MANIFEST_NAME}")
    total, before = sum(links.sizes.values()), 0
    for filename, size in sorted(links.sizes.items()):
        if not note.holds(filename, size):
            with place.staged(save) as folder:
                (saved,) = fetch(links.only(filename), folder, functools.partial(_advance, progress, before, total))
            # Only now: the file is in the place when its folder has been left.
            note.add(saved)
        before += size
        progress(before, total)
    return [note.files[filename] for filename in sorted(links.sizes)]


def _untold(done: int, total: int) -> None:
    """Progress that nobody asked for."""


def _advance(progress: Progress, before: int, total: int, done: int, _of_this_file: int) -> None:
    progress(before + done, total)


class _Links:
    """The links to a checkpoint's files, asked for once, and again when one of them is refused."""

    def __init__(self, client: ExportingClient, job_id: str, checkpoint_id: str) -> None:
        self._client = client
        self._job_id = job_id
        self._checkpoint_id = checkpoint_id
        self._reply = self._export()
        links = read_links(self._reply, f"checkpoint {checkpoint_id} of job {job_id}")
        self.sizes = {filename: link.size for filename, link in links.items()}

    def only(self, filename: str) -> _OneFile:
        return _OneFile(self, filename)

    def entry(self, filename: str, *, renew: bool) -> Mapping[str, Any]:
        if renew:
            self._reply = self._export()
        for file in self._reply["files"]:
            if file.get("filename") == filename:
                return {**self._reply, "files": [file]}
        raise DownloadError(
            f"download {filename!r} of checkpoint {self._checkpoint_id} of job {self._job_id}: the checkpoint changed "
            "while it was being downloaded; delete what was downloaded and start again"
        )

    def _export(self) -> Mapping[str, Any]:
        return self._client.export_checkpoint(self._job_id, self._checkpoint_id)


class _OneFile:
    """A client whose checkpoint has one file: the first link is the known one, another one is a new one."""

    def __init__(self, links: _Links, filename: str) -> None:
        self._links = links
        self._filename = filename
        self._asked = False

    def export_checkpoint(self, job_id: str, checkpoint_id: str) -> Mapping[str, Any]:
        renew, self._asked = self._asked, True
        return self._links.entry(self._filename, renew=renew)


class _Note:
    """Which files of which checkpoint the place holds whole."""

    def __init__(self, place: Place, save: str, manifest: SaveManifest) -> None:
        self._place = place
        self._save = save
        self._origin = {
            "job_id": manifest.job_id,
            "checkpoint_id": manifest.checkpoint_id,
            "created_at": manifest.created_at,
        }
        self.files = self._read()

    def holds(self, filename: str, size: int) -> bool:
        known = self.files.get(filename)
        return known is not None and known.size == size == self._place.size(f"{self._save}/{filename}")

    def add(self, saved: SavedFile) -> None:
        self.files[saved.path] = saved
        document = {"v": 1, **self._origin, "files": [dataclasses.asdict(file) for file in self.files.values()]}
        self._place.write(self._name, json.dumps(document, sort_keys=True).encode())

    @property
    def _name(self) -> str:
        return f"{self._save}/{STORE_NOTE_NAME}"

    def _read(self) -> dict[str, SavedFile]:
        """The files of this checkpoint; none when the note is of another one, or unreadable."""
        try:
            document = json.loads(self._place.read(self._name))
            if {name: document[name] for name in self._origin} != self._origin or document["v"] != 1:
                return {}
            return {file["path"]: SavedFile(file["path"], file["size"], file["sha256"]) for file in document["files"]}
        except (FileNotFoundError, ValueError, KeyError, TypeError):
            return {}
