"""From pending to the end: who gets GPUs, how engines start, and when a job is taken down."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any

from cortex_training.local.artifacts import RunArtifacts
from cortex_training.local.capacity import HARDWARE, Capacity
from cortex_training.local.checkpoints import CheckpointStore
from cortex_training.local.gpu_metrics import GpuSampler, MeteredExecutor
from cortex_training.local.job_store import JobStore
from cortex_training.local.jobs import Job, SubJob
from cortex_training.local.models import model_folder
from cortex_training.local.queueing import new_worker
from cortex_training.local.refusals import Refusal, job_not_running
from cortex_training.local.settings import ServiceSettings
from cortex_training.states import JobState

_log = logging.getLogger("cortex_training.local")
_WATCH_EVERY_S, _NOTE_EVERY_S = 0.1, 2.0


class LifeCycle:
    """Moves jobs from state to state. Everything here runs in the event loop, apart from loading models."""

    def __init__(
        self, settings: ServiceSettings, checkpoints: CheckpointStore, store: JobStore, artifacts: RunArtifacts
    ) -> None:
        self._settings = settings
        self._checkpoints = checkpoints
        self._store = store
        self.capacity = Capacity(settings.gpus_per_hardware)
        self.jobs: dict[str, Job] = {}
        self._artifacts = artifacts
        self._sampler = GpuSampler(artifacts, self.jobs.values, settings.sample_s)
        self._tasks: set[asyncio.Task[None]] = set()

    def admit(self, job: Job) -> None:
        """Take a new job into the queue for GPUs."""
        self.jobs[job.job_id] = job
        self._store.write(job)
        self._place_waiting()

    def remember(self, job: Job) -> None:
        """Take in a job that ended before the service was started."""
        self.jobs[job.job_id] = job
        self._store.write(job)

    def cancel(self, job: Job) -> None:
        """End a job because its owner says so. Again is fine; a job that ended otherwise refuses (409)."""
        if job.state in (JobState.CANCELLING, JobState.CANCELLED):
            return
        if job.has_ended():
            raise job_not_running(job.job_id, job.state, job.reason, "cancel")
        self._end(job, JobState.CANCELLED, "cancelled by the caller")

    def fail(self, job: Job, state: JobState, reason: str) -> None:
        """End a job that did not ask for it. What computes runs on, and nobody sees its result."""
        for request in job.requests.values():
            request.execution.stop.set()
        self._close(job, state, reason)

    def set_capacity(self, gpus: int, hardware: str | None, *, evict: bool) -> None:
        """There are `gpus` of one hardware type, or of each. With `evict` the newest jobs that no longer fit fail."""
        for one in [hardware] if hardware else HARDWARE:
            self.capacity.resize(one, gpus)
            holders = [job for job in self.jobs.values() if job.spec.hardware == one and not job.has_ended()]
            while evict and self.capacity.free(one) < 0 and holders:
                job = holders.pop()
                if job.state != JobState.PENDING:
                    self.fail(job, JobState.FAILED, "capacity_lost")
        self._place_waiting()

    def finished_one(self, job: Job) -> None:
        """One execution of the job is over: a cancellation may have waited for it."""
        job.in_flight -= 1
        job.active_clock = time.monotonic()
        if job.state == JobState.CANCELLING and job.in_flight == 0:
            self._close(job, JobState.CANCELLED)

    def start_watching(self) -> None:
        self._spawn(self._watch())
        self._spawn(self._sampler.run())

    def shut_down(self) -> None:
        """Let go of everything without waiting for threads that compute."""
        for task in self._tasks:
            task.cancel()
        for job in self.jobs.values():
            _stop_workers(job)
        self._artifacts.seal()

    def waiting_gpus(self) -> dict[str, int]:
        """GPUs that pending jobs want, by hardware."""
        wanted: dict[str, int] = {}
        for job in self._waiting():
            wanted[job.spec.hardware] = wanted.get(job.spec.hardware, 0) + job.spec.n_gpus
        return wanted

    def _waiting(self) -> list[Job]:
        return [job for job in self.jobs.values() if job.state == JobState.PENDING]

    def _place_waiting(self) -> None:
        """Give GPUs to waiting jobs, oldest first; nobody overtakes one that does not fit on its hardware."""
        blocked: set[str] = set()
        for job in self._waiting():
            hardware, gpus = job.spec.hardware, job.spec.n_gpus
            if hardware not in blocked and self.capacity.hold(job.job_id, hardware, gpus):
                self._move(job, JobState.PLACING, "")
                self._spawn(self._bring_up(job))
            else:
                blocked.add(hardware)
                free, total = self.capacity.free(hardware), self.capacity.total(hardware)
                job.reason = f"waits for {gpus} {hardware} GPUs; {free} of {total} are free"

    async def _bring_up(self, job: Job) -> None:
        try:
            await asyncio.sleep(self._settings.placing_s)
            if job.has_ended():
                return
            self._move(job, JobState.INITIALIZING)
            for sub_job in job.sub_jobs:
                thread = new_worker(self._settings.assumptions.request_order, sub_job.sub_job_id)
                sub_job.worker = MeteredExecutor(thread)
                # Past the meter: a GPU's metrics begin when its job runs.
                building = thread.submit(self._build_engine, sub_job)
                engine = await asyncio.wrap_future(building)
                if job.has_ended():
                    return
                sub_job.engine = engine
        except asyncio.CancelledError:
            raise
        except Exception as error:
            _log.exception("job %s could not initialise", job.job_id)
            for sub_job in job.sub_jobs:
                sub_job.log.add(f"initialisation failed: {error}", level="ERROR")
            if not job.has_ended():
                message = error.message if isinstance(error, Refusal) else f"{type(error).__name__}: {error}"
                self._close(job, JobState.FAILED, f"initialisation failed: {message}")
            return
        stand_ins = sorted({one.model.name for one in job.sub_jobs if one.model.stand_in})
        reason = f"{', '.join(stand_ins)}: not on this machine, the tiny model stands in" if stand_ins else ""
        if self._settings.simulation is not None:
            reason = "simulated: operations take their time, and there is no model"
        elif reason:
            _log.warning("job %s: %s", job.job_id, reason)
        self._move(job, JobState.RUNNING, "; ".join(filter(None, [job.resumed, reason])))
        for sub_job in job.sub_jobs:
            sub_job.log.add(f"{sub_job.model.name} is ready on the model {sub_job.model.runs}")

    def _build_engine(self, sub_job: SubJob) -> Any:
        """Load the model and the checkpoint it starts from, in the sub-job's thread."""
        engine, source = self._new_engine(sub_job), sub_job.spec.source
        if sub_job.resumes_from is not None:
            engine.load(sub_job.resumes_from.folder)
        elif source is not None:
            engine.load(self._checkpoints.find(source.job_id or "", source.checkpoint_id).folder)
        return engine

    def _new_engine(self, sub_job: SubJob) -> Any:
        spec = sub_job.spec
        if self._settings.simulation is not None:
            job_id, _, position = sub_job.sub_job_id.partition(":")
            # Ids are random; the order in which jobs were created is the same every time.
            place = f"{tuple(self.jobs).index(job_id)}:{position}"
            return self._settings.simulation.engine(spec, self._settings.assumptions, place)
        # Imported here and not above: these import torch, which takes seconds.
        from cortex_training.local.engine.process import prepare_process
        from cortex_training.local.engine.sampling import SamplingEngine
        from cortex_training.local.engine.training import TrainingEngine

        prepare_process(self._settings.threads)
        folder = sub_job.model.folder or model_folder(sub_job.model.runs)
        if spec.kind == "training":
            return TrainingEngine(spec, folder, self._settings.assumptions)
        return SamplingEngine(spec, folder)

    def _end(self, job: Job, state: JobState, reason: str) -> None:
        """Take a job down; an operation that computes is let finish, because it cannot be interrupted."""
        computing = job.slow_cancel_s > 0
        if computing:
            job.in_flight += 1
            self._spawn(self._finish_later(job, job.slow_cancel_s))
        for request in job.requests.values():
            request.execution.stop.set()
            computing |= not request.execution.is_over and not request.execution.drop_from_queue()
        if computing:
            self._move(job, JobState.CANCELLING, reason)
            return
        self._close(job, state, reason)

    async def _finish_later(self, job: Job, seconds: float) -> None:
        await asyncio.sleep(seconds)
        self.finished_one(job)

    def _close(self, job: Job, state: JobState, reason: str | None = None) -> None:
        _stop_workers(job)
        self._move(job, state, reason)
        self._sampler.job_ended(job)
        self.capacity.release(job.job_id)
        self._place_waiting()

    def _move(self, job: Job, state: JobState, reason: str | None = None) -> None:
        job.move_to(state, reason)
        self._store.write(job)

    async def _watch(self) -> None:
        """Take down jobs that waited or idled too long, and note what the running ones have cost so far."""
        noted = time.monotonic()
        while True:
            await asyncio.sleep(_WATCH_EVERY_S)
            now, scale = time.monotonic(), self._settings.timeout_scale
            if now - noted > _NOTE_EVERY_S:
                noted = now
                for job in self.jobs.values():
                    if job.state == JobState.RUNNING:
                        self._store.write(job)
            for job in list(self.jobs.values()):
                if job.state == JobState.PENDING and now - job.created_clock > job.spec.pending_timeout_s * scale:
                    self._close(job, JobState.FAILED, "pending_timeout")
                idle_s = job.spec.idle_timeout_s * scale
                if job.state == JobState.RUNNING and idle_s and not job.in_flight and now - job.active_clock > idle_s:
                    self._close(job, JobState.TERMINATED, "idle_timeout")

    def _spawn(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _stop_workers(job: Job) -> None:
    """Threads end when they have finished what they compute; models are freed."""
    for sub_job in job.sub_jobs:
        if sub_job.worker is not None:
            sub_job.worker.shutdown(wait=False, cancel_futures=True)
        sub_job.engine = None
