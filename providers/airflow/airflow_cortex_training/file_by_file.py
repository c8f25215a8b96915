"""Bringing a checkpoint into a place that can't hold half a file: each file is downloaded whole, then put there.

A note in the place says of which checkpoint its files are and which are whole, with their SHA-256. A try that died
is gone on with at the first file that is not in it; the checkpoint's manifest is written last.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol

from cortex_training.errors import ProtocolError
from cortex_training.paths import safe_relative
from cortex_training.publication import DownloadError, SavedFile, SaveManifest, download_checkpoint
from cortex_training.publication.save import MANIFEST_NAME

NOTE_NAME = ".cortex-export.json"

Progress = Callable[[int, int], None]


class Place(Protocol):
    """A store of publications that is a bucket, or a folder of object storage."""

    def exists(self, name: str) -> bool: ...
    def read(self, name: str) -> bytes: ...
    def write(self, name: str, data: bytes) -> None: ...
    def remove(self, name: str) -> None: ...
    def staged(self, save: str) -> AbstractContextManager[str]: ...


class Exporting(Protocol):
    def export_checkpoint(self, job_id: str, checkpoint_id: str) -> Mapping[str, Any]: ...


def export_file_by_file(
    client: Exporting,
    place: Place,
    save: str,
    manifest: SaveManifest,
    progress: Progress,
    *,
    proxy: str | None = None,
    ca_bundle: str | None = None,
) -> SaveManifest:
    """Download the checkpoint that `manifest` names into `save` of `place`, its manifest last; returns it with files.

    Raises what `download_checkpoint` and the place raise. Needs room for the largest file in the temporary folder.
    """
    links = _Links(client, manifest.job_id, manifest.checkpoint_id)
    note = _Note(place, save, manifest)
    if not note.files and place.exists(f"{save}/{MANIFEST_NAME}"):
        # Another checkpoint was here. Its manifest must not vouch for a mix of its files and ours.
        place.remove(f"{save}/{MANIFEST_NAME}")
    total, before = sum(links.sizes.values()), 0
    for filename, size in sorted(links.sizes.items()):
        if not note.holds(filename, size):
            with place.staged(save) as folder:
                (saved,) = download_checkpoint(
                    links.only(filename),
                    manifest.job_id,
                    manifest.checkpoint_id,
                    folder,
                    functools.partial(_advance, progress, before, total),
                    created_at=manifest.created_at,
                    proxy=proxy,
                    ca_bundle=ca_bundle,
                )
            # Only now: the file is in the place when its folder has been left.
            note.add(saved)
        before += size
        progress(before, total)
    complete = dataclasses.replace(manifest, files=tuple(note.files[filename] for filename in sorted(links.sizes)))
    place.write(f"{save}/{MANIFEST_NAME}", complete.to_bytes())
    return complete


def _advance(progress: Progress, before: int, total: int, done: int, _of_this_file: int) -> None:
    progress(before + done, total)


class _Links:
    """The links to a checkpoint's files, asked for once, and again when one of them is refused."""

    def __init__(self, client: Exporting, job_id: str, checkpoint_id: str) -> None:
        self._client = client
        self._job_id = job_id
        self._checkpoint_id = checkpoint_id
        self._reply = self._export()
        self.sizes = self._sizes()

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
            "while it was being downloaded; clear the task to start again"
        )

    def _export(self) -> Mapping[str, Any]:
        return self._client.export_checkpoint(self._job_id, self._checkpoint_id)

    def _sizes(self) -> dict[str, int]:
        what = f"export checkpoint {self._checkpoint_id} of job {self._job_id}"
        sizes: dict[str, int] = {}
        for file in self._reply.get("files") or ():
            filename, size = file.get("filename"), file.get("size_bytes")
            if not isinstance(filename, str) or not isinstance(size, int) or filename in sizes:
                raise ProtocolError(f"{what}: the reply lists {filename!r} of {size!r} bytes")
            try:
                safe_relative(filename)
            except ValueError as problem:
                raise ProtocolError(f"{what}: file name {filename!r} is refused: {problem}") from None
            if filename in (NOTE_NAME, MANIFEST_NAME):
                raise ProtocolError(f"{what}: file name {filename!r} is refused: it is used by the export itself")
            sizes[filename] = size
        if not sizes:
            raise ProtocolError(f"{what}: the reply lists no files")
        return sizes


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
        return known is not None and known.size == size and self._place.exists(f"{self._save}/{filename}")

    def add(self, saved: SavedFile) -> None:
        self.files[saved.path] = saved
        document = {"v": 1, **self._origin, "files": [dataclasses.asdict(file) for file in self.files.values()]}
        self._place.write(self._name, json.dumps(document, sort_keys=True).encode())

    @property
    def _name(self) -> str:
        return f"{self._save}/{NOTE_NAME}"

    def _read(self) -> dict[str, SavedFile]:
        """The files of this checkpoint; none when the note is of another one, or unreadable."""
        try:
            document = json.loads(self._place.read(self._name))
            if {name: document[name] for name in self._origin} != self._origin or document["v"] != 1:
                return {}
            return {file["path"]: SavedFile(file["path"], file["size"], file["sha256"]) for file in document["files"]}
        except (FileNotFoundError, ValueError, KeyError, TypeError):
            return {}
