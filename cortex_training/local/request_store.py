"""Requests on disk: what was asked, how it ended, and its result, for polls after a restart.

An execution has one row, written when it is taken in and once more, with its result, before a poll can show its end.
Large results are read from here at every poll and kept nowhere else, so that a job of ten thousand requests does not
hold ten thousand results in memory.
"""

from __future__ import annotations

import json
import sqlite3
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, overload

from cortex_training.local.requests import Delivery, Execution, OnDisk, Request, plain_json
from cortex_training.states import RequestState

_VERSION = 1
_TABLES = """
CREATE TABLE executions (
    execution_id TEXT PRIMARY KEY, job_id TEXT NOT NULL, sub_job_id TEXT NOT NULL, operation TEXT NOT NULL,
    chunk_group_id TEXT, frame_sha256 TEXT, streaming INTEGER NOT NULL, state TEXT NOT NULL, error TEXT NOT NULL,
    created_at REAL NOT NULL, updated_at REAL NOT NULL, ended_at REAL, record TEXT, result TEXT, events TEXT,
    chunks INTEGER NOT NULL
) STRICT;
CREATE INDEX executions_of_job ON executions (job_id, created_at);
CREATE TABLE further_requests (
    request_id TEXT PRIMARY KEY, execution_id TEXT NOT NULL, created_at REAL NOT NULL
) STRICT;
CREATE TABLE result_chunks (
    execution_id TEXT NOT NULL, position INTEGER NOT NULL, frame BLOB NOT NULL, PRIMARY KEY (execution_id, position)
) STRICT, WITHOUT ROWID;
"""
_KEPT_IN_MEMORY = 16 * 1024
"""Results up to this many bytes of JSON stay in memory too: they are what pollers ask for most."""
_OVER = (RequestState.DONE, RequestState.FAILED, RequestState.CANCELLED)


class RequestStore:
    """`requests.sqlite` in the data folder. Its methods may be called from any thread."""

    def __init__(self, data_dir: Path) -> None:
        """Raises ValueError when a newer service wrote the folder. The job store holds the folder's lock already."""
        self._one_at_a_time = threading.Lock()
        self._rows = sqlite3.connect(data_dir / "requests.sqlite", isolation_level=None, check_same_thread=False)
        self._rows.execute("PRAGMA journal_mode = WAL")
        self._rows.execute("PRAGMA synchronous = NORMAL")
        [version] = self._rows.execute("PRAGMA user_version").fetchone()
        if version == 0:
            self._rows.executescript(f"BEGIN; {_TABLES} PRAGMA user_version = {_VERSION}; COMMIT;")
        elif version != _VERSION:
            raise ValueError(f"{data_dir} was written by a newer version of this service; use another --data-dir")
        # What a killed service had not ended can't end any more.
        self._rows.execute(
            "UPDATE executions SET error = 'the service was restarted while this was ' || state, state = ?"
            " WHERE state NOT IN (?, ?, ?)",
            (RequestState.FAILED, *_OVER),
        )

    def add(self, request: Request) -> None:
        """Remember a request before its id is given out.

        The first request of an execution has the execution's own id, so that one row tells of both.
        """
        one = request.execution
        with self._one_at_a_time:
            if request.request_id != one.execution_id:
                self._rows.execute(
                    "INSERT INTO further_requests VALUES (?, ?, ?)",
                    (request.request_id, one.execution_id, request.created_at),
                )
                return
            self._rows.execute(
                "INSERT INTO executions VALUES (?, ?, ?, ?, ?, ?, ?, ?, '', ?, ?, NULL, NULL, NULL, NULL, 0)",
                (
                    one.execution_id,
                    one.job_id,
                    one.sub_job_id,
                    one.operation,
                    one.chunk_group_id,
                    one.frame_sha256,
                    one.streaming,
                    str(one.state),
                    request.created_at,
                    one.updated_at,
                ),
            )

    def finish(self, execution: Execution, record: dict[str, Any]) -> None:
        """Remember how an execution ended, all of it or nothing; large parts of its result leave the memory.

        `record` are the numbers of its result that the status page shows.
        """
        result = None if execution.result is None else json.dumps(execution.result)
        end = (
            str(execution.state),
            execution.error,
            execution.updated_at,
            execution.ended_at,
            json.dumps(plain_json(record)),
            result,
            json.dumps(list(execution.events)) if execution.streaming else None,
            len(execution.result_chunks),
            execution.execution_id,
        )
        with self._one_at_a_time:
            if not execution.result_chunks:
                # One statement is a transaction of its own, and most executions end in one.
                self._rows.execute(_END, end)
            else:
                self._write_in_parts(execution, end)
        if result is not None and len(result) > _KEPT_IN_MEMORY:
            execution.result = self._stored_result(execution.execution_id)
        if execution.result_chunks:
            execution.result_chunks = _StoredChunks(self, execution.execution_id, len(execution.result_chunks))

    def _write_in_parts(self, execution: Execution, end: tuple[Any, ...]) -> None:
        self._rows.execute("BEGIN")
        try:
            self._rows.executemany(
                "INSERT INTO result_chunks VALUES (?, ?, ?)",
                ((execution.execution_id, at, frame) for at, frame in enumerate(execution.result_chunks)),
            )
            self._rows.execute(_END, end)
            self._rows.execute("COMMIT")
        except BaseException:
            self._rows.execute("ROLLBACK")
            raise

    def keep_events(self, execution: Execution) -> None:
        """Remember which events of a stream that is over were not taken yet."""
        with self._one_at_a_time:
            self._rows.execute(
                "UPDATE executions SET events = ? WHERE execution_id = ?",
                (json.dumps(list(execution.events)), execution.execution_id),
            )

    def find(self, job_id: str, request_id: str) -> Request | None:
        """A request of an earlier run of the service."""
        with self._one_at_a_time:
            row = self._rows.execute(
                f"SELECT coalesce(r.created_at, e.created_at), {_EXECUTION} FROM executions e"
                " LEFT JOIN further_requests r ON r.execution_id = e.execution_id AND r.request_id = :asked"
                " WHERE e.job_id = :job AND e.execution_id ="
                " coalesce((SELECT execution_id FROM further_requests WHERE request_id = :asked), :asked)",
                {"asked": request_id, "job": job_id},
            ).fetchone()
        return None if row is None else Request(self._execution(row[1:]), request_id, row[0])

    def lose(self, job_id: str, sub_job_ids: Sequence[str], after: float, error: str) -> None:
        """Show as failed what these sub-jobs did after a point in time (epoch seconds): nothing is left of it."""
        with self._one_at_a_time:
            self._rows.executemany(
                "UPDATE executions SET state = ?, error = ?, result = NULL, events = NULL, chunks = 0"
                " WHERE job_id = ? AND sub_job_id = ? AND state = ? AND ended_at > ?"
                f" AND operation IN ({', '.join(repr(name) for name in CHANGES)})",
                [(RequestState.FAILED, error, job_id, name, RequestState.DONE, after) for name in sub_job_ids],
            )

    def executed(self, job_id: str) -> list[tuple[str, str, float]]:
        """(operation, sub-job, end in epoch seconds) of everything a job did, in the order in which it ended."""
        with self._one_at_a_time:
            return self._rows.execute(
                "SELECT operation, sub_job_id, ended_at FROM executions"
                " WHERE job_id = ? AND state = ? AND ended_at IS NOT NULL ORDER BY ended_at",
                (job_id, RequestState.DONE),
            ).fetchall()

    def newest(self, job_id: str, count: int) -> list[dict[str, Any]]:
        """What the status page shows of a job's last executions, newest first."""
        with self._one_at_a_time:
            rows = self._rows.execute(
                "SELECT execution_id, created_at, operation, sub_job_id, state, error, updated_at, record"
                " FROM executions WHERE job_id = ? ORDER BY created_at DESC LIMIT ?",
                (job_id, count),
            ).fetchall()
        names = ("request_id", "created_at", "operation", "sub_job_id", "status", "error", "updated_at", "record")
        return [{**dict(zip(names, row, strict=True)), "record": json.loads(row[7] or "{}")} for row in rows]

    def losses(self, job_id: str) -> list[float | None]:
        """Mean losses of a job's forward-backwards, in the order in which they ran."""
        with self._one_at_a_time:
            rows = self._rows.execute(
                "SELECT json_extract(record, '$.loss') FROM executions"
                " WHERE job_id = ? AND operation = 'forward-backward' AND state = ? ORDER BY ended_at",
                (job_id, RequestState.DONE),
            ).fetchall()
        return [loss for (loss,) in rows]

    def close(self) -> None:
        with self._one_at_a_time:
            self._rows.close()

    def result(self, execution_id: str) -> Any:
        with self._one_at_a_time:
            [text] = self._rows.execute(
                "SELECT result FROM executions WHERE execution_id = ?", (execution_id,)
            ).fetchone()
        return None if text is None else json.loads(text)

    def chunks(self, execution_id: str, first: int, last: int) -> list[bytes]:
        with self._one_at_a_time:
            rows = self._rows.execute(
                "SELECT frame FROM result_chunks WHERE execution_id = ? AND position >= ? AND position < ?"
                " ORDER BY position",
                (execution_id, first, last),
            ).fetchall()
        return [frame for (frame,) in rows]

    def _stored_result(self, execution_id: str) -> OnDisk:
        return OnDisk(lambda: self.result(execution_id))

    def _execution(self, row: tuple[Any, ...]) -> Execution:
        (execution_id, job_id, sub_job_id, operation, group, sha256, streaming, state, error, updated, ended, *rest) = (
            row
        )
        result_bytes, events, chunks = rest
        return Execution(
            operation,
            job_id,
            sub_job_id,
            Delivery(),
            group,
            sha256,
            execution_id,
            RequestState(state),
            result=None if result_bytes is None else self._stored_result(execution_id),
            result_chunks=_StoredChunks(self, execution_id, chunks) if chunks else [],
            streaming=bool(streaming),
            events=deque(json.loads(events or "[]")),
            error=error,
            updated_at=updated,
            ended_at=ended,
        )


_END = (
    "UPDATE executions SET state = ?, error = ?, updated_at = ?, ended_at = ?, record = ?, result = ?, events = ?,"
    " chunks = ? WHERE execution_id = ?"
)

CHANGES = ("forward-backward", "step", "load")
"""Operations that change what a training sub-job holds in memory."""

_EXECUTION = (
    "e.execution_id, e.job_id, e.sub_job_id, e.operation, e.chunk_group_id, e.frame_sha256, e.streaming, e.state,"
    " e.error, e.updated_at, e.ended_at, length(e.result), e.events, e.chunks"
)


class _StoredChunks(Sequence[bytes]):
    """Result chunks that are read when a poll asks for them."""

    def __init__(self, store: RequestStore, execution_id: str, count: int) -> None:
        self._store = store
        self._execution_id = execution_id
        self._count = count

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, at: int) -> bytes: ...

    @overload
    def __getitem__(self, at: slice) -> list[bytes]: ...

    def __getitem__(self, at: int | slice) -> bytes | list[bytes]:
        if isinstance(at, int):
            return self[range(self._count)[at] : range(self._count)[at] + 1][0]
        first, last, _ = at.indices(self._count)
        return self._store.chunks(self._execution_id, first, last)

    def __iter__(self) -> Iterator[bytes]:
        return (self[at] for at in range(self._count))
