"""A job and its sub-jobs: states, times, what it shows of itself."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass, field
from typing import Any

from cortex_training.local.checkpoints import Checkpoint
from cortex_training.local.chunks import ChunkGroups
from cortex_training.local.job_spec import JobSpec, SubJobSpec
from cortex_training.local.models import ModelChoice
from cortex_training.local.refusals import job_not_running, workers_restarting
from cortex_training.local.requests import Execution, Request, timestamp
from cortex_training.local.sub_job_log import SubJobLog
from cortex_training.states import JobState, is_terminal_job


@dataclass
class SubJob:
    """A model and the one thread that works on it, which does one operation after another."""

    spec: SubJobSpec
    sub_job_id: str
    model: ModelChoice
    chunk_groups: ChunkGroups = field(default_factory=ChunkGroups)
    log: SubJobLog = field(default_factory=SubJobLog)
    sample_ids: set[str] = field(default_factory=set)
    """Samples whose routing a router replay could still ask for."""
    engine: Any = None
    """A TrainingEngine or SamplingEngine, while the job runs."""
    worker: Executor | None = None
    resumes_from: Checkpoint | None = None
    """Its own checkpoint that it goes on from after a restart, instead of where its job's creation says."""
    before_next: deque[Callable[[], None]] = field(default_factory=deque)
    """What its thread does before the next operation."""
    restarting_until: float = 0.0
    """Monotonic seconds."""

    @property
    def restarts(self) -> bool:
        return time.monotonic() < self.restarting_until

    def describe(self, state: str) -> dict[str, Any]:
        if state == JobState.RUNNING and self.restarts:
            state = str(JobState.INITIALIZING)
        return {"sub_job_id": self.sub_job_id, "status": state, **self.spec.wire}


@dataclass
class Job:
    """Belongs to the event loop: no worker thread changes it."""

    job_id: str
    spec: JobSpec
    database: str
    schema: str
    sub_jobs: list[SubJob]
    state: JobState = JobState.PENDING
    reason: str = ""
    created_at: float = field(default_factory=time.time)
    updated_at: float = field(default_factory=time.time)
    created_clock: float = field(default_factory=time.monotonic)
    running_clock: float | None = None
    ended_clock: float | None = None
    active_clock: float = field(default_factory=time.monotonic)
    """When it was last asked to do something, or finished doing it."""
    earlier_gpu_seconds: float = 0.0
    """Counted before the service was restarted."""
    resumed: str = ""
    """What a job that goes on after a restart says of it."""
    in_flight: int = 0
    """Executions that wait or run."""
    requests: dict[str, Request] = field(default_factory=dict, repr=False)
    slow_cancel_s: float = 0.0
    """How long a cancellation takes at least."""
    busy: dict[str, tuple[int, float]] = field(default_factory=dict)
    """By operation: executions that are over, and the seconds that they took in all."""

    def move_to(self, state: JobState, reason: str | None = None) -> None:
        self.state = state
        self.updated_at = time.time()
        if reason is not None:
            self.reason = reason
        if state == JobState.RUNNING:
            self.running_clock = self.active_clock = time.monotonic()
        if is_terminal_job(state):
            self.ended_clock = time.monotonic()

    def has_ended(self) -> bool:
        return is_terminal_job(self.state)

    @property
    def gpu_seconds(self) -> float:
        """GPUs times seconds since it ran, until it ended."""
        if self.running_clock is None:
            return self.earlier_gpu_seconds
        until = self.ended_clock if self.ended_clock is not None else time.monotonic()
        return self.earlier_gpu_seconds + self.spec.n_gpus * (until - self.running_clock)

    def note_execution(self, execution: Execution) -> None:
        """Count what a sub-job's thread did, if it did anything."""
        if execution.busy_s:
            count, seconds = self.busy.get(execution.operation, (0, 0.0))
            self.busy[execution.operation] = (count + 1, seconds + execution.busy_s)

    def touch(self) -> None:
        """Put off the idle timeout."""
        self.active_clock = time.monotonic()

    def require_running(self, asked: str) -> None:
        """Raises Refusal (409) with the job's state and reason."""
        if self.state != JobState.RUNNING:
            raise job_not_running(self.job_id, self.state, self.reason, asked)
        for sub_job in self.sub_jobs:
            if sub_job.restarts:
                raise workers_restarting(sub_job.sub_job_id, asked)

    def sub_job(self, sub_job_id: str) -> SubJob | None:
        return next((one for one in self.sub_jobs if one.sub_job_id == sub_job_id), None)

    def first_of(self, kind: str) -> SubJob | None:
        return next((one for one in self.sub_jobs if one.spec.kind == kind), None)

    def describe(self) -> dict[str, Any]:
        """The body of ``GET /{job_id}``; `gpu_seconds` is this service's own addition."""
        described: dict[str, Any] = {
            "job_id": self.job_id,
            "status": str(self.state),
            "reason": self.reason,
            "created_at": timestamp(self.created_at),
            "updated_at": timestamp(self.updated_at),
            "submitted_by": "LOCAL",
            "owner_role": "LOCAL",
            "hardware": self.spec.hardware,
            "idle_timeout_seconds": self.spec.idle_timeout_s,
            "pending_timeout_seconds": self.spec.pending_timeout_s,
            "gpu_seconds": round(self.gpu_seconds, 3),
            "sub_jobs": [sub_job.describe(str(self.state)) for sub_job in self.sub_jobs],
        }
        if self.spec.experiment_name is not None:
            described["experiment_name"] = self.spec.experiment_name
        return described
