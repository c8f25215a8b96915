"""Jobs: create one that a retry finds again, and cancel whatever a pipeline left running."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from airflow.sdk import XComArg
from airflow.sdk.exceptions import AirflowFailException

from airflow_cortex_training.durable import DurableRecord
from airflow_cortex_training.operators.base import CortexTrainingOperator, clear_failures
from airflow_cortex_training.run_folder import end_run
from cortex_training.config import SubJobConfig, check_matching_lora
from cortex_training.errors import (
    ConfigurationError,
    ConflictError,
    CortexTrainingError,
    NotFoundError,
)
from cortex_training.identity import new_job_id
from cortex_training.protocol.jobs import difference_from
from cortex_training.states import is_terminal_job, job_state

if TYPE_CHECKING:
    from airflow.sdk import Context

    from cortex_training.client import CortexTrainingClient

JOB_ID_KEY = "job_id"


class CortexTrainingCreateJobOperator(CortexTrainingOperator):
    """Create a job, once, however often the task is tried. Does not wait until it runs.

    The job's id is written to the task's state before the job is created. A retry finds it and adopts the job; a job
    that ended in the meantime is replaced. When the task is cleared the old job is cancelled and a new one is
    created. Pair it with `CortexTrainingCancelJobOperator` as teardown.

    Args:
        sub_jobs: sub-jobs as `cortex_training.config.SubJobConfig` or as the service's JSON; at most one trains.
        hardware: ``H200``, ``B200`` or ``B300``; the connection's default, else the service's.
        experiment_name: default ``<dag id>.<run id>``, cleaned of what experiment names can't hold.
        idle_timeout_seconds: the service ends a job that got no request for so long. Between tasks and retries nobody
            talks to the job, so choose it longer than ``retries * retry_delay`` plus the scheduler's own gaps.
        pending_timeout_seconds: the service gives up a job that got no GPUs for so long.

    Returns (XCom): the job's id. It is also pushed as ``job_id`` *before* the job is created; `job_id_output` refers
    to that one.
    """

    template_fields = (
        *CortexTrainingOperator.template_fields,
        "sub_jobs",
        "hardware",
        "experiment_name",
        "idle_timeout_seconds",
        "pending_timeout_seconds",
    )

    def __init__(
        self,
        *,
        sub_jobs: Sequence[SubJobConfig | Mapping[str, Any]],
        hardware: str | None = None,
        experiment_name: str | None = None,
        idle_timeout_seconds: int | None = None,
        pending_timeout_seconds: int | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.sub_jobs = sub_jobs
        self.hardware = hardware
        self.experiment_name = experiment_name
        self.idle_timeout_seconds = idle_timeout_seconds
        self.pending_timeout_seconds = pending_timeout_seconds
        self._created: tuple[CortexTrainingClient, str] | None = None

    @property
    def job_id_output(self) -> XComArg:
        """The id as it was written before the create: there even when the task failed right after it."""
        return XComArg(self, key=JOB_ID_KEY)

    def execute(self, context: Context) -> str:
        with clear_failures():
            hook = self.hook
            settings = hook.settings()
            body = self._body(context, default_hardware=settings.hardware)
            record = DurableRecord(context)
            with hook.get_conn() as client:
                if record.superseded:
                    cancel_quietly(client, record.superseded.get("job_id"), self.log.info)
                job_id = self._adopt(client, record, body)
                if job_id is None:
                    job_id = self._create(client, record, body, context)
        self.log.info("job %s is the job of this run", job_id)
        return job_id

    def on_kill(self) -> None:
        if self._created is not None:
            client, job_id = self._created
            cancel_quietly(client, job_id, self.log.info)

    def _adopt(self, client: CortexTrainingClient, record: DurableRecord, body: Mapping[str, Any]) -> str | None:
        """The job that an earlier try of this generation created and that is still worth something."""
        job_id = record.current.get("job_id") if record.current else None
        if not job_id:
            return None
        try:
            job = client.get_job(job_id)
        except NotFoundError:
            # Written down, and never created: the try died in between.
            return None
        if is_terminal_job(job.get("status")):
            self.log.warning(
                "job %s of an earlier try is %s (%s); creating another one",
                job_id,
                job_state(job.get("status")),
                job.get("reason") or "no reason given",
            )
            record.write(job_id="")
            return None
        difference = difference_from(body["sub_job_configs"], job.get("sub_jobs"))
        if difference:
            raise AirflowFailException(
                f"job {job_id}, which an earlier try of this task created, is not what the DAG says now: {difference}. "
                "Clear the task to cancel that job and create another one."
            )
        record.publish_token(job_id)
        self._push_id(record, job_id)
        self.log.info("adopted job %s of an earlier try (%s)", job_id, job_state(job.get("status")))
        return str(job_id)

    def _create(
        self, client: CortexTrainingClient, record: DurableRecord, body: dict[str, Any], context: Context
    ) -> str:
        job_id = (record.current or {}).get("job_id") or new_job_id()
        record.write(job_id=job_id)
        record.publish_token(job_id)
        self._push_id(record, job_id)
        self._created = (client, job_id)
        try:
            answered = str(client.create_job_from_body({**body, "job_id": job_id})["job_id"])
        except ConflictError as error:
            # The client adopts a job that exists under our id; it is raised only when that job can't be used any more.
            raise AirflowFailException(f"{error} Clear the task to start with a new id.") from error
        except CortexTrainingError:
            if context["ti"].try_number > context["ti"].max_tries:
                # Nobody will look for the job again: a create whose answer was lost must not leave it allocated.
                cancel_quietly(client, job_id, self.log.info)
            raise
        if answered != job_id:
            # A service that gives its own ids: create was at most once, and from here on this is the job.
            self.log.info("the service named the job %s, not %s", answered, job_id)
            record.write(job_id=answered)
            record.publish_token(answered)
            self._push_id(record, answered)
            self._created = (client, answered)
        return answered

    def _push_id(self, record: DurableRecord, job_id: str) -> None:
        record.task_instance.xcom_push(key=JOB_ID_KEY, value=job_id)

    def _body(self, context: Context, *, default_hardware: str | None) -> dict[str, Any]:
        if not isinstance(self.sub_jobs, (list, tuple)) or not self.sub_jobs:
            raise ConfigurationError.of(f"task {self.task_id}: sub_jobs", self.sub_jobs, "give a list of sub-jobs")
        typed = [sub_job for sub_job in self.sub_jobs if isinstance(sub_job, SubJobConfig)]
        for sub_job in typed:
            sub_job.validate()
        check_matching_lora(typed)
        body: dict[str, Any] = {
            "sub_job_configs": [s.to_wire() if isinstance(s, SubJobConfig) else dict(s) for s in self.sub_jobs],
            "experiment_name": self.experiment_name or default_experiment_name(context),
            "hardware": self.hardware or default_hardware,
            "idle_timeout_seconds": self.idle_timeout_seconds,
            "pending_timeout_seconds": self.pending_timeout_seconds,
        }
        return {name: value for name, value in body.items() if value is not None}


class CortexTrainingCancelJobOperator(CortexTrainingOperator):
    """Cancel jobs. Made for a teardown: succeeds when there is nothing (left) to cancel.

    Args:
        job_id: a job, or a list of jobs; None and empty texts are ignored, because a create that never ran left none.
        root: root of a training run; every job in its journal is cancelled, replacements included, and a driver that is
            still alive somewhere can create no other.

    Returns (XCom): the ids that were asked to end.
    """

    template_fields = (*CortexTrainingOperator.template_fields, "job_id", "root")
    ui_color = "#f4e3e3"

    def __init__(self, *, job_id: str | Sequence[str] | None = None, root: str | None = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.job_id = job_id
        self.root = root

    def execute(self, context: Context) -> list[str]:
        named = [self.job_id] if isinstance(self.job_id, str) else list(self.job_id or [])
        job_ids = [job_id for job_id in named if job_id]
        with clear_failures():
            hook = self.hook
            with hook.get_conn() as client:
                cancelled = [job_id for job_id in job_ids if cancel_job(client, job_id)]
            if self.root:
                cancelled += end_run(hook.settings(), str(self.root))
        self.log.info("cancelled: %s", ", ".join(cancelled) or "nothing, no job was left")
        return cancelled


def cancel_job(client: CortexTrainingClient, job_id: str) -> bool:
    """Cancel a job; False when it had ended already or never was. Raises when the service can't be asked."""
    try:
        client.cancel_job(job_id)
    except (NotFoundError, ConflictError):
        return False
    return True


def cancel_quietly(client: CortexTrainingClient, job_id: object, say: Any) -> None:
    """`cancel_job` where a failure must not hide what is going on: it is said in the log, and the job ends at its idle
    timeout."""
    if not isinstance(job_id, str) or not job_id:
        return
    try:
        if cancel_job(client, job_id):
            say("cancelled job %s", job_id)
    except CortexTrainingError as error:
        say("could not cancel job %s, it ends at its idle timeout: %s", job_id, error)


def default_experiment_name(context: Context) -> str:
    """``<dag id>.<run id>`` in the characters an experiment's name can hold."""
    raw = f"{context['dag_run'].dag_id}_{context['dag_run'].run_id}"
    return "".join(c if c.isalnum() else "_" for c in raw)[:120]
