"""Samples of the simulated GPUs: how long each computed since the last sample, and the memory of this process."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Executor, Future
from typing import Any, ParamSpec, TypeVar

from cortex_training.local.artifacts import RunArtifacts
from cortex_training.local.jobs import Job, SubJob
from cortex_training.local.memory import memory
from cortex_training.local.requests import timestamp
from cortex_training.states import JobState

P = ParamSpec("P")
R = TypeVar("R")

_LONGEST_TICK_S = 1.0


class MeteredExecutor(Executor):
    """A sub-job's thread that knows how many seconds it has worked."""

    def __init__(self, thread: Executor) -> None:
        self._thread = thread
        self._finished_s = 0.0
        self._began: float | None = None

    def submit(self, fn: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> Future[R]:
        return self._thread.submit(self._measured, lambda: fn(*args, **kwargs))

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        self._thread.shutdown(wait, cancel_futures=cancel_futures)

    @property
    def busy_s(self) -> float:
        """Seconds so far, with what runs at this moment."""
        began = self._began
        return self._finished_s + (time.monotonic() - began if began is not None else 0.0)

    def _measured(self, call: Callable[[], R]) -> R:
        self._began = began = time.monotonic()
        try:
            return call()
        finally:
            # In this order, a sample taken in between sees a little less, and never the same seconds twice.
            self._began = None
            self._finished_s += time.monotonic() - began


class GpuSampler:
    """Takes samples of running jobs and has their chunks sealed."""

    def __init__(self, artifacts: RunArtifacts, jobs: Callable[[], Iterable[Job]], sample_s: float) -> None:
        self._artifacts = artifacts
        self._jobs = jobs
        self._sample_s = sample_s
        self._last: dict[str, tuple[float, float]] = {}
        """Monotonic time and busy seconds of the last sample, by sub-job."""

    async def run(self) -> None:
        """Sample and seal until cancelled."""
        while True:
            await asyncio.sleep(min(self._sample_s, _LONGEST_TICK_S))
            for job in list(self._jobs()):
                if job.state in (JobState.RUNNING, JobState.CANCELLING):
                    self._sample(job, self._sample_s)
            await asyncio.to_thread(self._artifacts.seal_due)

    def job_ended(self, job: Job) -> None:
        """Take the last sample of a job that has ended, and seal all its chunks."""
        self._sample(job, 0.0)
        for sub_job in job.sub_jobs:
            self._last.pop(sub_job.sub_job_id, None)
        self._artifacts.seal(job.job_id)

    def _sample(self, job: Job, after_s: float) -> None:
        if job.running_clock is None:
            return
        now, first_gpu = time.monotonic(), 0
        for sub_job in job.sub_jobs:
            last, busy_before = self._last.get(sub_job.sub_job_id, (job.running_clock, 0.0))
            if now - last >= after_s and isinstance(sub_job.worker, MeteredExecutor):
                busy = sub_job.worker.busy_s
                records = _records(sub_job, first_gpu, now - last, busy - busy_before)
                self._artifacts.metrics(job.job_id, sub_job.sub_job_id, records)
                self._last[sub_job.sub_job_id] = (now, busy)
            first_gpu += sub_job.spec.n_gpus


def _records(sub_job: SubJob, first_gpu: int, elapsed_s: float, busy_s: float) -> list[dict[str, Any]]:
    """One record per simulated GPU; all of them show the one processor that does the work."""
    share = min(max(busy_s / elapsed_s, 0.0), 1.0) if elapsed_s > 0 else 0.0
    record = {
        "kind": "gpu",
        "record_version": 2,
        "sub_job_id": sub_job.sub_job_id,
        "sample_ts": timestamp(time.time()),
        "sample_interval_s": round(elapsed_s, 3),
        "gpu_util_pct": round(100 * share, 1),
        "fb_used_bytes": memory()["cpu_peak"],
        "fb_free_bytes": _free_bytes(),
    }
    return [{**record, "global_gpu_index": first_gpu + index} for index in range(sub_job.spec.n_gpus)]


def _free_bytes() -> int:
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError, AttributeError):
        return 0  # not every system tells
