"""What a running job is asked to do: checked, put in its sub-job's queue, executed once, recorded, answered."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import math
import sqlite3
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field
from typing import Any

from cortex_training import wire
from cortex_training.local.chunks import Chunk, ChunkGroup, read_chunk
from cortex_training.local.execution_log import ExecutionLog
from cortex_training.local.jobs import Job, SubJob
from cortex_training.local.lifecycle import LifeCycle
from cortex_training.local.memory import memory
from cortex_training.local.refusals import Refusal
from cortex_training.local.request_store import RequestStore
from cortex_training.local.requests import CancelledWhileRunning, Delivery, Execution, Request, deliver, read_delivery
from cortex_training.local.settings import ServiceSettings
from cortex_training.local.weather_jobs import JobWeather
from cortex_training.states import RequestState

_log = logging.getLogger("cortex_training.local")
_EXPLAINED_BY_MEMORY = ("forward-backward", "step")
"""Operations that leave a snapshot of the memory when they fail, whether or not the job asked for telemetry."""
_SMALL_BYTES = 256 * 1024
"""Frames up to this size are hashed and decoded in the event loop: handing them to a thread would cost more."""


@dataclass
class Outcome:
    """What an executed operation leaves behind."""

    result: Any
    record: dict[str, Any] = field(default_factory=dict)
    """Fields for the execution log."""
    then: Callable[[], None] | None = None
    """Called in the event loop before the request shows as done."""


class Operations:
    """Runs work in sub-jobs' threads. Everything but the work itself happens in the event loop."""

    def __init__(
        self,
        settings: ServiceSettings,
        lifecycle: LifeCycle,
        execution_log: ExecutionLog,
        requests: RequestStore,
        job_weather: JobWeather,
    ) -> None:
        self.settings = settings
        self._job_weather = job_weather
        self._lifecycle = lifecycle
        self._execution_log = execution_log
        self._requests = requests
        self._tasks: set[asyncio.Task[None]] = set()

    def submit(self, job: Job, sub_job: SubJob, execution: Execution, work: Callable[[], Outcome]) -> dict[str, Any]:
        """Put `work` into the sub-job's queue. Returns the reply that names the request to poll."""
        future = worker_of(sub_job).submit(self.prepare(job, sub_job, execution, work))
        return self.follow(job, execution, [future])

    def follow(self, job: Job, execution: Execution, futures: Sequence[Future[Outcome]]) -> dict[str, Any]:
        """Finish `execution` when all futures are done; the first one's outcome is its result."""
        execution.drop_from_queue = futures[0].cancel
        job.in_flight += 1
        task = asyncio.get_running_loop().create_task(self._finish(job, execution, futures))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        # The first request has the execution's own id, which is also what the execution log says.
        return self._reply(job, Request(execution, execution.execution_id))

    def again(self, job: Job, execution: Execution) -> dict[str, Any]:
        """A further request id for something that was already submitted."""
        return self._reply(job, Request(execution))

    async def submit_framed(
        self, job: Job, sub_job: SubJob, body: bytes, start: Callable[[bytes, Delivery, Chunk | None], Any]
    ) -> dict[str, Any]:
        """Take a frame, whole or as the next chunk of a group, and start its execution when it is complete.

        `start` is called once per complete frame, with its bytes, how to deliver the result and the chunk it came in;
        it returns the Execution and the reply, or is awaited for them.
        """
        chunk = await aside(len(body), lambda: read_chunk(body, max_frame_bytes=self.settings.max_frame_bytes))
        job.require_running("forward-backward or generate")
        if chunk is None:
            _, reply = await start(body, _delivery_of(body), None)
            return dict(reply)
        group = sub_job.chunk_groups.accept(chunk)
        self._make_room_beside(group)
        if not chunk.is_last:
            return {
                "chunk_cached": True,
                "job_id": job.job_id,
                "chunk_group_id": chunk.group_id,
                "chunk_idx": chunk.index,
            }
        async with group.joining:
            if group.execution is not None:
                return self.again(job, group.execution)
            try:
                frame = await aside(chunk.logical_bytes, lambda: wire.decode_byte_chunks(list(group.frames.values())))
                group.execution, reply = await start(frame, _delivery_of(frame), chunk)
            except wire.WireError as error:
                sub_job.chunk_groups.forget(chunk.group_id)
                raise Refusal(400, f"chunk group {chunk.group_id} is not the frame it says: {error}") from None
            except Refusal:
                sub_job.chunk_groups.forget(chunk.group_id)
                raise
            sub_job.chunk_groups.release(group)
            return dict(reply)

    def _make_room_beside(self, newest: ChunkGroup) -> None:
        """Forget the partial groups that waited longest while all of them together hold too much."""
        places = [sub_job.chunk_groups for job in self._lifecycle.jobs.values() for sub_job in job.sub_jobs]
        waiting = sorted(
            ((group.touched, place, group) for place in places for group in place.partial if group is not newest),
            key=lambda one: one[0],
        )
        held = newest.retained_bytes + sum(group.retained_bytes for _, _, group in waiting)
        for _, place, group in waiting:
            if held <= self.settings.max_partial_bytes:
                return
            if not group.joining.locked():
                held -= group.retained_bytes
                place.forget(group.group_id)

    def _reply(self, job: Job, request: Request) -> dict[str, Any]:
        # On disk before anyone knows the id: who asks for it after a crash gets an answer.
        self._requests.add(request)
        job.requests[request.request_id] = request
        job.touch()
        return {"request_id": request.request_id, "job_id": job.job_id}

    def prepare(
        self, job: Job, sub_job: SubJob, execution: Execution, work: Callable[[], Outcome]
    ) -> Callable[[], Outcome]:
        """What the sub-job's thread is to do: `work`, and bring its result into the form that polls show."""
        loop = asyncio.get_running_loop()
        fate = self._job_weather.fate_of(execution)
        execution.failure = fate.fails_after

        def run() -> Outcome:
            loop.call_soon_threadsafe(execution.move_to, RequestState.RUNNING)
            began = time.monotonic()
            try:
                while sub_job.before_next:
                    sub_job.before_next.popleft()()
                fate.before()
                outcome = work()
                chunk_bytes = self.settings.result_chunk_bytes
                outcome.result = deliver(outcome.result, execution.delivery, chunk_bytes=chunk_bytes)
                return outcome
            finally:
                execution.busy_s, execution.ended_at = time.monotonic() - began, time.time()

        return run

    async def _finish(self, job: Job, execution: Execution, futures: Sequence[Future[Outcome]]) -> None:
        await asyncio.gather(*[asyncio.wrap_future(future) for future in futures], return_exceptions=True)
        told: dict[str, Any] = {}
        try:
            if any(future.cancelled() for future in futures):
                if execution.failure is not None and not execution.stop.is_set():
                    execution.move_to(RequestState.FAILED, error=execution.failure)
                else:
                    execution.move_to(RequestState.CANCELLED, error="cancelled before it began")
                return
            outcomes = [future.result() for future in futures]
            outcome = outcomes[0]
            told = outcome.record
            # On record before anyone can see the result: what a caller knows of, the log has.
            self._record(execution, outcome)
            if outcome.then is not None:
                outcome.then()
            if execution.failure is not None:
                execution.move_to(RequestState.FAILED, error=execution.failure)
            else:
                execution.result, execution.result_chunks = outcome.result
                execution.move_to(RequestState.DONE)
            self._job_weather.executed(job, execution, outcome.record.get("global_steps"))
        except CancelledWhileRunning:
            execution.move_to(RequestState.CANCELLED, error="cancelled while it ran")
        except Exception as error:
            expected = isinstance(error, ValueError | Refusal)
            if not expected:
                _log.exception("%s of job %s failed", execution.operation, job.job_id)
            execution.move_to(RequestState.FAILED, error=str(error) if expected else f"{type(error).__name__}: {error}")
        finally:
            # The futures hold what was computed, and would as long as the job remembers its requests.
            execution.drop_from_queue = lambda: False
            job.note_execution(execution)
            self._keep(execution, told)
            self._tell(job, execution, told)
            self._lifecycle.finished_one(job)

    def _record(self, execution: Execution, outcome: Outcome) -> None:
        self._execution_log.record(
            {
                "op": execution.operation,
                "job_id": execution.job_id,
                "sub_job": execution.sub_job_id,
                "request_id": execution.execution_id,
                "chunk_group": execution.chunk_group_id,
                "frame_sha256": execution.frame_sha256,
                "global_steps": None,
                "loss": None,
                "seconds": round(execution.busy_s, 6),
                **outcome.record,
            }
        )

    def _keep(self, execution: Execution, record: dict[str, Any]) -> None:
        try:
            self._requests.finish(execution, record)
        except sqlite3.Error:
            # It was executed all the same, and whoever polls before the service ends gets the result.
            _log.exception("the end of %s could not be written to the data folder", execution.execution_id)

    def _tell(self, job: Job, execution: Execution, record: dict[str, Any]) -> None:
        """Write the operation's training event into its sub-job's log."""
        sub_job = job.sub_job(execution.sub_job_id)
        if sub_job is None:
            return
        message = " ".join(filter(None, [execution.operation, str(execution.state), _told(record), execution.error]))
        event: dict[str, Any] = {
            "request_id": execution.execution_id,
            "event": execution.operation,
            "state": str(execution.state),
        }
        if execution.state != RequestState.FAILED:
            sub_job.log.add(message, **event, **record)
            return
        if execution.operation in _EXPLAINED_BY_MEMORY:
            event["memory"] = memory()
        sub_job.log.add(message, level="ERROR", **event, error=execution.error)


async def decoded(frame: bytes, chunk: Chunk | None, framework: wire.Framework) -> tuple[Any, str]:
    """The frame's value, and its SHA-256. Raises Refusal (400)."""
    value: tuple[Any, str] = await aside(len(frame), lambda: _decode(frame, chunk, framework))
    return value


def _decode(frame: bytes, chunk: Chunk | None, framework: wire.Framework) -> tuple[Any, str]:
    sha256 = chunk.logical_sha256 if chunk is not None else hashlib.sha256(frame).hexdigest()
    try:
        return wire.loads(frame, framework=framework), sha256
    except wire.WireError as error:
        raise Refusal(400, f"the body is not a DSSST1 frame: {error}") from None


def worker_of(sub_job: SubJob) -> Executor:
    """The thread of a running sub-job."""
    if sub_job.worker is None:
        raise RuntimeError(f"{sub_job.sub_job_id} has no thread, though its job runs")
    return sub_job.worker


def _told(record: dict[str, Any]) -> str:
    """What a log line says of a finished operation."""
    loss, steps = record.get("loss"), record.get("global_steps")
    return ", ".join(
        ([f"loss {loss:.4f}"] if loss is not None else []) + ([f"step {steps}"] if steps is not None else [])
    )


def finite(value: float | None) -> float | None:
    """A number that JSON has, or null."""
    return value if value is not None and math.isfinite(value) else None


def _delivery_of(frame: bytes) -> Delivery:
    try:
        return read_delivery(wire.read_metadata(frame))
    except wire.WireError as error:
        raise Refusal(400, f"the body is not a DSSST1 frame: {error}") from None


async def aside(size: int, work: Callable[[], Any]) -> Any:
    """Do it here when it is small, and in a thread when it would keep the event loop from everyone else."""
    return work() if size <= _SMALL_BYTES else await asyncio.to_thread(work)
