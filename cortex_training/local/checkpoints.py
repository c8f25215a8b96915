"""Checkpoints on disk, and the links that their files are fetched by.

A checkpoint is a folder ``checkpoints/<job>/<checkpoint id>`` that holds checkpoint.json and ``files/``. It gets this
name when everything in it is written, so a service that is killed leaves no half of one.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import time
import uuid
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from cortex_training.local.refusals import Refusal, not_found
from cortex_training.local.requests import timestamp
from cortex_training.paths import safe_relative

_DESCRIPTION = "checkpoint.json"
_VERSION = 1


@dataclass(frozen=True)
class Checkpoint:
    """A finished checkpoint; `folder` holds what the engine wrote."""

    job_id: str
    sub_job_id: str
    checkpoint_id: str
    checkpoint_type: str
    global_steps: int
    avg_loss: float | None
    created_at: float
    n_gpus: int
    """Of the sub-job that saved it: an optimizer state cannot be loaded into another number."""
    folder: Path

    def summary(self) -> dict[str, Any]:
        """One entry of ``GET /checkpoints``."""
        return {
            "checkpoint_id": self.checkpoint_id,
            "global_steps": self.global_steps,
            "avg_loss": self.avg_loss,
            "created_at": timestamp(self.created_at),
            "checkpoint_type": self.checkpoint_type,
        }

    def files(self) -> list[tuple[str, int]]:
        """Relative names and sizes in bytes, sorted by name."""
        found = [path for path in self.folder.rglob("*") if path.is_file()]
        return sorted((path.relative_to(self.folder).as_posix(), path.stat().st_size) for path in found)


class CheckpointStore:
    """All checkpoints under one folder, also those of jobs that have ended and of earlier runs of the service."""

    def __init__(self, root: Path) -> None:
        self._root = root / "checkpoints"
        self._root.mkdir(parents=True, exist_ok=True)
        self._by_job: dict[str, dict[str, Checkpoint]] = {}
        for description in sorted(self._root.glob(f"*/*/{_DESCRIPTION}")):
            # What a killed service was still writing has a name that begins with a dot.
            if not description.parent.name.startswith("."):
                self._remember(_read(description))

    def write(self, checkpoint: Checkpoint, fill: Callable[[Path], None]) -> Checkpoint:
        """Let `fill` write the files, then make the checkpoint exist, in a worker thread. `add` makes it visible."""
        folder = self._root / safe_relative(checkpoint.job_id) / safe_relative(checkpoint.checkpoint_id)
        unfinished = folder.with_name(f".{folder.name}.{uuid.uuid4().hex}")
        (unfinished / "files").mkdir(parents=True)
        try:
            fill(unfinished / "files")
            finished = replace(checkpoint, folder=folder / "files")
            described = {"v": _VERSION, **asdict(finished), "folder": "files"}
            (unfinished / _DESCRIPTION).write_text(json.dumps(described, indent=2) + "\n")
            for path in unfinished.rglob("*"):
                _flush(path)
            if folder.exists():
                # Only a checkpoint id that names its step can come twice, and then the later save replaces the earlier
                # one.
                shutil.rmtree(folder)
            os.rename(unfinished, folder)
            _flush(folder.parent)
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)
        return finished

    def add(self, checkpoint: Checkpoint) -> None:
        self._remember(checkpoint)

    def of_job(self, job_id: str) -> list[Checkpoint]:
        return sorted(self._by_job.get(job_id, {}).values(), key=lambda checkpoint: checkpoint.created_at)

    def find(self, job_id: str, checkpoint_id: str) -> Checkpoint:
        """Raises Refusal (404)."""
        checkpoint = self._by_job.get(job_id, {}).get(checkpoint_id)
        if checkpoint is None:
            raise not_found("checkpoint", f"{checkpoint_id} of job {job_id}")
        return checkpoint

    def delete(self, job_id: str, checkpoint_id: str) -> None:
        """Raises Refusal (404) for one that is not there, also the second time."""
        checkpoint = self.find(job_id, checkpoint_id)
        del self._by_job[job_id][checkpoint_id]
        folder = checkpoint.folder.parent
        # Out of sight in one move; then its files can go in any order.
        leaving = folder.with_name(f".{folder.name}.{uuid.uuid4().hex}")
        os.rename(folder, leaving)
        shutil.rmtree(leaving, ignore_errors=True)

    def _remember(self, checkpoint: Checkpoint) -> None:
        self._by_job.setdefault(checkpoint.job_id, {})[checkpoint.checkpoint_id] = checkpoint


class ExportLinks:
    """Addresses that give a checkpoint's files to whoever has them, for a while."""

    def __init__(self, lifetime_s: float) -> None:
        self._lifetime_s = lifetime_s
        self._links: dict[str, tuple[Checkpoint, float]] = {}

    def create(self, checkpoint: Checkpoint, base_url: str) -> dict[str, Any]:
        """The answer to ``:export``. `base_url` is scheme, host and port as the caller reached this service."""
        now = time.time()
        self._links = {token: link for token, link in self._links.items() if link[1] > now}
        token, expires_at = secrets.token_urlsafe(24), now + self._lifetime_s
        self._links[token] = (checkpoint, expires_at)
        files = [
            {"filename": name, "url": f"{base_url}/exports/{token}/{name}", "size_bytes": size}
            for name, size in checkpoint.files()
        ]
        return {"checkpoint_id": checkpoint.checkpoint_id, "files": files, "expires_at": timestamp(expires_at)}

    def open(self, token: str, name: str) -> Path:
        """The file behind a link. Raises Refusal: 403 for an unknown or expired link, 404 for a file it has not."""
        checkpoint, expires_at = self._links.get(token, (None, 0.0))
        if checkpoint is None or time.time() >= expires_at:
            raise Refusal(403, "this link has expired or never existed; export the checkpoint again")
        try:
            relative = safe_relative(name)
        except ValueError as error:
            raise Refusal(400, str(error)) from None
        if relative not in {known for known, _ in checkpoint.files()}:
            raise not_found("file", name)
        return checkpoint.folder / relative


def new_checkpoint_id() -> str:
    return f"cp_{uuid.uuid4()}"


def _read(description: Path) -> Checkpoint:
    fields = json.loads(description.read_text())
    if fields.pop("v") != _VERSION:
        raise ValueError(f"{description} was written by a newer version of this service; use another --data-dir")
    return Checkpoint(**{**fields, "folder": description.parent / "files"})


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
