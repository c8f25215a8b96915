"""The service's state and its control plane: jobs, capacity, experiment names, checkpoints."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Mapping
from typing import Any

from starlette.routing import Route

from cortex_training.local.artifacts import RunArtifacts
from cortex_training.local.capacity import HARDWARE
from cortex_training.local.checkpoints import CheckpointStore, ExportLinks
from cortex_training.local.chunks import ChunkGroups
from cortex_training.local.credentials import Credentials
from cortex_training.local.data_plane import DataPlane, refuse_other_size
from cortex_training.local.execution_log import ExecutionLog
from cortex_training.local.generation import Generation
from cortex_training.local.generic_operation import GenericOperation
from cortex_training.local.job_spec import JobSpec, SubJobSpec, read_job_spec
from cortex_training.local.job_store import JobStore, StoredJob
from cortex_training.local.jobs import Job, SubJob
from cortex_training.local.lifecycle import LifeCycle
from cortex_training.local.models import ModelChoice, choose_model
from cortex_training.local.operations import Operations
from cortex_training.local.refusals import Refusal, bad_field, job_not_running, not_found
from cortex_training.local.request_store import RequestStore
from cortex_training.local.requests import Request, refuse_unknown
from cortex_training.local.restart import Comeback, comeback_of, ended_by_restart
from cortex_training.local.sessions import Sessions
from cortex_training.local.settings import ServiceSettings
from cortex_training.local.snowflake_files import SnowflakeFiles
from cortex_training.local.spelling import Spelling
from cortex_training.local.sub_job_log import SubJobLog
from cortex_training.local.weather import Weather
from cortex_training.local.weather_jobs import JobWeather, Tokens
from cortex_training.local.weather_rules import Faults
from cortex_training.states import JobState, job_state

_log = logging.getLogger("cortex_training.local")
_DEFAULT_EXPERIMENT = "CORTEX_TRAINING"


class Service:
    """Everything behind the HTTP routes. Its methods run in the event loop and raise Refusal for what they don't do."""

    def __init__(self, settings: ServiceSettings) -> None:
        self.settings = settings
        self._store = JobStore(settings.data_dir)
        self.requests = RequestStore(settings.data_dir)
        self.checkpoints = CheckpointStore(settings.data_dir)
        self.spelling = Spelling(settings.assumptions)
        self.export_links = ExportLinks(settings.export_link_s)
        self.execution_log = ExecutionLog(settings.execution_log_file)
        self.artifacts = RunArtifacts(settings.data_dir, settings.seal_s)
        self._lifecycle = LifeCycle(settings, self.checkpoints, self._store, self.artifacts)
        self.weather = Weather(settings.faults or Faults())
        self.sessions = self._new_sessions() if settings.snowflake else None
        self.job_weather = JobWeather(self.weather, self._lifecycle, settings.assumptions, Tokens(self.sessions))
        operations = Operations(settings, self._lifecycle, self.execution_log, self.requests, self.job_weather)
        self.data_plane = DataPlane(operations, self.checkpoints)
        self.generation = Generation(operations)
        self.generic_operation = GenericOperation(operations, self.data_plane)
        self.credentials = Credentials(settings.token, self.sessions)
        self.snowflake_routes = self._answering_the_connector(self.sessions) if self.sessions is not None else []

    def start(self) -> None:
        for stored in self._store.read():
            try:
                self._take_back(stored)
            except Refusal as refusal:
                # Written when the service knew less of what is wrong with a job. Its checkpoints are still there.
                _log.error("job %s of an earlier run can't be read any more: %s", stored.job_id, refusal.message)
        self._lifecycle.start_watching()

    def _take_back(self, stored: StoredJob) -> None:
        """Show a job of an earlier run of the service, or let it go on. Raises Refusal when its body is not valid."""
        spec, (state, reason) = read_job_spec(stored.body), ended_by_restart(stored)
        job = _restored(stored, spec, [], state, reason)
        if self.settings.resume_jobs and state == JobState.FAILED != stored.state:
            try:
                job.sub_jobs = [self._sub_job(job.job_id, at, one) for at, one in enumerate(spec.sub_jobs)]
            except Refusal as refusal:
                job.reason += f", and can't go on: {refusal.message}"
            else:
                comeback = comeback_of(job, self.checkpoints, self.requests)
                if isinstance(comeback, Comeback):
                    self._resume(job, comeback)
                    return
                job.reason = comeback
        job.sub_jobs = [
            SubJob(one, one.id_in(job.job_id), ModelChoice(one.model_name, "", None, True)) for one in spec.sub_jobs
        ]
        self._lifecycle.remember(job)

    def _resume(self, job: Job, comeback: Comeback) -> None:
        training = job.first_of("training")
        if training is not None:
            training.resumes_from = comeback.training_from
            lost = "executed, and lost when the service was restarted: it is in no checkpoint that the job goes on from"
            self.requests.lose(job.job_id, [training.sub_job_id], comeback.lost_after, lost)
        job.resumed = comeback.note
        job.move_to(JobState.PENDING, comeback.note)
        for sub_job in job.sub_jobs:
            sub_job.log.add(comeback.note, level="WARNING")
        self._lifecycle.admit(job)

    def stop(self) -> None:
        self._lifecycle.shut_down()
        self.execution_log.close()
        self.requests.close()
        self._store.close()

    def create_job(self, database: str, schema: str, body: object) -> dict[str, Any]:
        spec = read_job_spec(body)
        job_id = spec.job_id
        if job_id is None or self.settings.assumptions.job_ids == "ignored":
            job_id = str(uuid.uuid4())
        if job_id in self._lifecycle.jobs:
            raise Refusal(409, f"job {job_id} already exists", job_id=job_id)
        sub_jobs = [self._sub_job(job_id, position, one) for position, one in enumerate(spec.sub_jobs)]
        self._lifecycle.admit(Job(job_id, spec, database, schema, sub_jobs))
        return {"job_id": job_id}

    def job(self, database: str, schema: str, job_id: str) -> Job:
        """Raises Refusal (404) for an id that is unknown, or known in another schema."""
        job = self._lifecycle.jobs.get(job_id)
        if job is None or (job.database.upper(), job.schema.upper()) != (database.upper(), schema.upper()):
            raise not_found("job", job_id)
        return job

    def describe(self, job: Job) -> dict[str, Any]:
        return self.spelling.job(job.describe())

    def list_jobs(self, database: str, schema: str, status: str | None) -> dict[str, Any]:
        wanted = job_state(status) if status else None
        mine = [
            job
            for job in self._lifecycle.jobs.values()
            if (job.database.upper(), job.schema.upper()) == (database.upper(), schema.upper())
        ]
        return {"jobs": [self.describe(job) for job in mine if wanted is None or job.state == wanted]}

    def cancel_job(self, job: Job) -> dict[str, Any]:
        self._lifecycle.cancel(job)
        return {"job_id": job.job_id, "status": str(job.state)}

    def capacity(self, hardware: str | None) -> dict[str, Any]:
        if hardware is not None and hardware not in HARDWARE:
            raise bad_field("hardware", hardware, f"must be one of {', '.join(HARDWARE)}")
        return self.spelling.capacity(self.capacity_report(hardware))

    def capacity_report(self, hardware: str | None) -> dict[str, Any]:
        """What ``GET /capacity`` says, before it is spelled."""
        return self._lifecycle.capacity.report(hardware, self._lifecycle.waiting_gpus())

    @property
    def jobs(self) -> Mapping[str, Job]:
        """Every job by its id, oldest first."""
        return self._lifecycle.jobs

    def experiment_run(self, job: Job) -> dict[str, Any]:
        experiment, run = _experiment_run(job)
        return {"experiment_name": experiment, "experiment_run_name": run}

    def _new_sessions(self) -> Sessions:
        # Imported here and not above: fakesnow and DuckDB take a second and 100 MB.
        from cortex_training.local.snowflake_side import end_session

        return Sessions(self.settings.session_s, end_session)

    def _answering_the_connector(self, sessions: Sessions) -> list[Route]:
        from cortex_training.local.snowflake_side import SnowflakeSide
        from cortex_training.local.snowflake_sql import SqlEngine

        files = SnowflakeFiles(self.artifacts, self._jobs_of_run)
        engine = SqlEngine(self.settings.data_dir / "stages")
        return SnowflakeSide(engine, sessions, self.credentials, files).routes()

    def _jobs_of_run(self, experiment: str, run: str) -> list[str] | None:
        """Jobs whose files the run holds, all of them finished if the job has ended; None: there is no such run."""
        jobs = [job for job in list(self._lifecycle.jobs.values()) if _experiment_run(job) == (experiment, run)]
        for job in jobs:
            if job.has_ended():
                self.artifacts.seal(job.job_id)
        return [job.job_id for job in jobs] or None

    def poll(self, job: Job, request_id: str, cursor: str | None, max_events: str | None) -> dict[str, Any]:
        if job.state != JobState.RUNNING and self.settings.assumptions.ended_job_polls == "refused":
            raise job_not_running(job.job_id, job.state, job.reason, f"request {request_id}")
        request = job.requests.get(request_id) or self._earlier_request(job, request_id)
        page = request.page(cursor, max_events)
        if page["events"] and request.execution.streaming and request.execution.is_over:
            self.requests.keep_events(request.execution)
        return self.spelling.poll(page)

    def _earlier_request(self, job: Job, request_id: str) -> Request:
        """A request from before the service was restarted. Raises Refusal (404)."""
        found = self.requests.find(job.job_id, request_id)
        if found is None:
            raise refuse_unknown(request_id, job.job_id)
        job.requests[request_id] = found
        return found

    async def delete_checkpoint(self, job_id: str, checkpoint_id: str) -> None:
        await asyncio.to_thread(self.checkpoints.delete, job_id, checkpoint_id)

    def _sub_job(self, job_id: str, position: int, spec: SubJobSpec) -> SubJob:
        try:
            model = choose_model(spec.model_name, self.settings.models, strict=self.settings.strict_models)
        except Refusal as refusal:
            refusal.message = f"sub_job_configs.{position}.{refusal.message}"
            raise
        if spec.kind == "log_probability" and self.settings.assumptions.log_probability == "refused":
            raise Refusal(400, f"sub_job_configs.{position}: log_probability sub-jobs are not currently supported")
        _refuse_longer_than_window(position, spec, model)
        if spec.multiplex_job_id is not None and spec.multiplex_job_id.startswith(f"{job_id}:"):
            raise Refusal(400, f"sub_job_configs.{position}: multiplex_job_id names a sub-job of the job being created")
        groups = ChunkGroups(evict_completed=self.settings.assumptions.chunk_groups == "evict_completed")
        sub_job_id = spec.id_in(job_id)
        log = SubJobLog(lambda entry: self.artifacts.log(job_id, sub_job_id, entry))
        sub_job = SubJob(spec, sub_job_id, model, groups, log)
        if spec.source is not None:
            self._check_source(position, sub_job)
        return sub_job

    def _check_source(self, position: int, sub_job: SubJob) -> None:
        source, field = sub_job.spec.source, f"sub_job_configs.{position}.source_checkpoint_info"
        if source is None or source.job_id is None:
            raise bad_field(f"{field}.source_job_id", None, "must name the job that saved the checkpoint")
        checkpoint = self.checkpoints.find(source.job_id, source.checkpoint_id)
        if sub_job.spec.kind != "training" and checkpoint.checkpoint_type != "weights-only":
            raise bad_field(
                f"{field}.checkpoint_id",
                source.checkpoint_id,
                "sampling starts from a weights-only checkpoint; this one is resumable",
            )
        refuse_other_size(checkpoint, sub_job)


def _experiment_run(job: Job) -> tuple[str, str]:
    """The names of the job's experiment and run, as ``snow://`` has them."""
    name = (job.spec.experiment_name or _DEFAULT_EXPERIMENT).upper()
    qualified = name if name.count(".") == 2 else f"{job.database.upper()}.{job.schema.upper()}.{name}"
    return qualified, f"RUN_{job.job_id.replace('-', '_').upper()}"


def _restored(stored: StoredJob, spec: JobSpec, sub_jobs: list[SubJob], state: JobState, reason: str) -> Job:
    return Job(
        stored.job_id,
        spec,
        stored.database,
        stored.schema,
        sub_jobs,
        state=state,
        reason=reason,
        created_at=stored.created_at,
        updated_at=stored.updated_at if state == stored.state else time.time(),
        earlier_gpu_seconds=stored.gpu_seconds,
    )


def _refuse_longer_than_window(position: int, spec: SubJobSpec, model: ModelChoice) -> None:
    window = model.window
    if window is not None and spec.max_seq_len > window:
        block = "training_config" if spec.kind == "training" else "inference_config"
        raise bad_field(
            f"sub_job_configs.{position}.{block}.max_seq_len",
            spec.max_seq_len,
            f"must be at most {window}, the window of {spec.model_name}",
        )
