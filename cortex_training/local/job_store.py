"""Jobs on disk: what a restarted service still knows of them."""

from __future__ import annotations

import fcntl
import json
import sqlite3
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cortex_training.local.jobs import Job
from cortex_training.states import JobState

_VERSION = 1
_TABLES = """
CREATE TABLE jobs (
    job_id TEXT PRIMARY KEY, database TEXT NOT NULL, schema TEXT NOT NULL, body TEXT NOT NULL, state TEXT NOT NULL,
    reason TEXT NOT NULL, created_at REAL NOT NULL, updated_at REAL NOT NULL, gpu_seconds REAL NOT NULL
) STRICT;
"""


@dataclass(frozen=True)
class StoredJob:
    """One row; times are epoch seconds."""

    job_id: str
    database: str
    schema: str
    body: dict[str, Any]
    state: JobState
    reason: str
    created_at: float
    updated_at: float
    gpu_seconds: float


class JobStore:
    """`jobs.sqlite` in the data folder. Used by the event loop alone, and by one service at a time."""

    def __init__(self, data_dir: Path) -> None:
        """Raises OSError when another service uses the folder, ValueError when a newer one wrote it."""
        data_dir.mkdir(parents=True, exist_ok=True)
        self._lock = (data_dir / "service.lock").open("w")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._lock.close()
            raise OSError(f"{data_dir} is in use by another service; give this one its own --data-dir") from None
        self._rows = sqlite3.connect(data_dir / "jobs.sqlite", isolation_level=None)
        self._rows.execute("PRAGMA journal_mode = WAL")
        # A power cut may take the last state changes with it; a killed process takes nothing.
        self._rows.execute("PRAGMA synchronous = NORMAL")
        [version] = self._rows.execute("PRAGMA user_version").fetchone()
        if version == 0:
            self._rows.executescript(f"BEGIN; {_TABLES} PRAGMA user_version = {_VERSION}; COMMIT;")
        elif version != _VERSION:
            raise ValueError(f"{data_dir} was written by a newer version of this service; use another --data-dir")

    def write(self, job: Job) -> None:
        """Remember the job as it is now."""
        self._rows.execute(
            "INSERT INTO jobs VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT (job_id) DO UPDATE SET"
            " state = excluded.state, reason = excluded.reason, updated_at = excluded.updated_at,"
            " gpu_seconds = excluded.gpu_seconds",
            (
                job.job_id,
                job.database,
                job.schema,
                json.dumps(job.spec.wire),
                str(job.state),
                job.reason,
                job.created_at,
                job.updated_at,
                job.gpu_seconds,
            ),
        )

    def read(self) -> Iterator[StoredJob]:
        """Every job, oldest first, as it was when the service that wrote it ended or was killed."""
        for row in self._rows.execute("SELECT * FROM jobs ORDER BY created_at, rowid").fetchall():
            yield StoredJob(row[0], row[1], row[2], json.loads(row[3]), JobState(row[4]), *row[5:])

    def close(self) -> None:
        self._rows.close()
        self._lock.close()
