"""What jobs leave in their experiment runs: execution logs, console output, GPU metrics.

A job's files lie below ``runs/<job id>/`` under the names that callers look for. Log lines are appended as they come.
Console output and metrics are gathered in memory and sealed into compressed chunks, which never change.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import re
import threading
import time
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from cortex_training.local.refusals import Refusal, not_found
from cortex_training.paths import safe_relative

LOGS, STDOUT, METRICS = "_logs", "_stdout", "_metrics"
_CHUNK_STEM = {STDOUT: "console", METRICS: "gpu"}
_CHUNK_NAME = re.compile(r"(?:console|gpu)\.(?P<time>\d{8}-\d{6})\.(?P<number>\d{8})\.gz")
_SEAL_BYTES = 1024 * 1024


_APPEND = os.O_WRONLY | os.O_APPEND | os.O_CREAT


@dataclass(frozen=True)
class RunFile:
    """A finished file; `path` is relative to the experiment run."""

    path: str
    size: int
    md5: str
    modified: float
    """Unix seconds."""


@dataclass
class _Open:
    """Text of one sub-job that no chunk holds yet."""

    job_id: str
    kind: str
    sub_job_id: str
    text: list[str] = field(default_factory=list)
    size: int = 0
    since: float = field(default_factory=time.monotonic)


class RunArtifacts:
    """All jobs' files under one folder, also those of earlier runs of the service. Safe to use from any thread."""

    def __init__(self, root: Path, seal_s: float) -> None:
        self._root = root / "runs"
        self._seal_s = seal_s
        self._lock = threading.Lock()
        self._open: dict[tuple[str, str], _Open] = {}

    def log(self, job_id: str, sub_job_id: str, entry: dict[str, Any]) -> None:
        """One line of a sub-job's log: whole in the execution log, as text on its console."""
        folder = self._root / safe_relative(job_id) / LOGS / sub_job_id
        line = json.dumps(entry) + "\n"
        with self._lock:
            # One write a line: a service killed at any moment leaves whole lines, at most the last one torn.
            try:
                descriptor = os.open(folder / "execution.jsonl", _APPEND, 0o600)
            except FileNotFoundError:
                folder.mkdir(parents=True, exist_ok=True)
                descriptor = os.open(folder / "execution.jsonl", _APPEND, 0o600)
            try:
                os.write(descriptor, line.encode())
            finally:
                os.close(descriptor)
        self._add(job_id, STDOUT, sub_job_id, f"{entry['ts']} {entry['level']:<7} {entry['message']}\n")

    def metrics(self, job_id: str, sub_job_id: str, records: list[dict[str, Any]]) -> None:
        self._add(job_id, METRICS, sub_job_id, "".join(json.dumps(record) + "\n" for record in records))

    def seal_due(self) -> None:
        """Seal what is large, or waited long enough."""
        now = time.monotonic()
        with self._lock:
            due = [one for one in self._open.values() if one.size >= _SEAL_BYTES or now - one.since >= self._seal_s]
            self._seal(due)

    def seal(self, job_id: str | None = None) -> None:
        """Seal everything of a job that writes nothing more; of all jobs without `job_id`."""
        with self._lock:
            self._seal([one for one in self._open.values() if job_id in (None, one.job_id)])

    def files(self, job_id: str) -> list[RunFile]:
        """The job's finished files, by their path."""
        top = self._root / safe_relative(job_id)
        found = []
        for path in sorted(top.glob("*/*/*")):
            # What a killed service was still writing has a name that begins with a dot.
            if path.is_file() and not path.name.startswith("."):
                status = path.stat()
                digest = hashlib.md5(path.read_bytes(), usedforsecurity=False).hexdigest()
                found.append(RunFile(path.relative_to(top).as_posix(), status.st_size, digest, status.st_mtime))
        return found

    def open(self, job_id: str, name: str) -> Path:
        """The file with this path relative to the run. Raises Refusal: 400 for a name that leaves it, 404 for none."""
        try:
            path = self._root / safe_relative(job_id) / safe_relative(name)
        except ValueError as error:
            raise Refusal(400, str(error)) from None
        if path.name.startswith(".") or not path.is_file():
            raise not_found("file", name)
        return path

    def _add(self, job_id: str, kind: str, sub_job_id: str, text: str) -> None:
        with self._lock:
            open_ = self._open.setdefault((kind, sub_job_id), _Open(job_id, kind, sub_job_id))
            open_.text.append(text)
            open_.size += len(text)
            if open_.size >= _SEAL_BYTES:
                self._seal([open_])

    def _seal(self, parts: list[_Open]) -> None:
        for part in parts:
            del self._open[(part.kind, part.sub_job_id)]
            folder = self._root / safe_relative(part.job_id) / part.kind / part.sub_job_id
            folder.mkdir(parents=True, exist_ok=True)
            name = _next_name(folder, _CHUNK_STEM[part.kind])
            unfinished = folder / f".{name}"
            unfinished.write_bytes(gzip.compress("".join(part.text).encode()))
            os.rename(unfinished, folder / name)


def _next_name(folder: Path, stem: str) -> str:
    """Callers put chunks in the order of their names, so a clock that was set back must not give an earlier one."""
    stamp, number = datetime.now(UTC).strftime("%Y%m%d-%H%M%S"), 0
    for path in folder.iterdir():
        match = _CHUNK_NAME.fullmatch(path.name)
        if match is not None:
            stamp, number = max(stamp, match["time"]), max(number, int(match["number"]) + 1)
    return f"{stem}.{stamp}.{number:08d}.gz"
