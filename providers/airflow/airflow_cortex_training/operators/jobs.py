"""Jobs: create one that a retry finds again, and cancel whatever a pipeline left running."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NoReturn

from airflow.sdk import XComArg
from airflow.sdk.exceptions import AirflowFailException, TaskDeferralError, TaskDeferralTimeout

from airflow_cortex_training.durable import DurableRecord
from airflow_cortex_training.experiment_names import default_experiment_name
from airflow_cortex_training.failures import clear_failures
from airflow_cortex_training.links import CortexTrainingJobLink, job_url, note
from airflow_cortex_training.operators.base import (
    BACKSTOP_S,
    DEFER_GRACE_S,
    INLINE_S,
    CortexTrainingOperator,
    default_deferrable,
    require_text,
)
from airflow_cortex_training.run_folder import end_run
from airflow_cortex_training.triggers.events import Status, is_of_another_wait
from airflow_cortex_training.triggers.job_ends import CortexTrainingJobEndsTrigger
from airflow_cortex_training.triggers.jobs import CortexTrainingJobTrigger
from cortex_training.config import SubJobConfig, check_matching_lora
from cortex_training.errors import (
    ConfigurationError,
    ConflictError,
    CortexTrainingError,
    DeadlineExceeded,
    JobFailed,
    NotFoundError,
)
from cortex_training.identity import new_job_id
from cortex_training.protocol.jobs import difference_from
from cortex_training.states import JobState, is_terminal_job, job_state

if TYPE_CHECKING:
    from airflow.sdk import Context

    from airflow_cortex_training.hooks.cortex_training import CortexTrainingHook
    from cortex_training.client import CortexTrainingClient

JOB_ID_KEY = "job_id"
_LOOK_S = 1.0


class CortexTrainingCreateJobOperator(CortexTrainingOperator):
    """Create a job, once, however often the task is tried, and on demand wait until it runs.

    The job's id is written to the task's state before the job is created. A retry finds it and adopts the job; a job
    that ended in the meantime is replaced. When the task is cleared the old job is cancelled and a new one is
    created. Pair it with `CortexTrainingCancelJobOperator` as teardown.

    Args:
        sub_jobs: sub-jobs as `cortex_training.config.SubJobConfig` or as the service's JSON; at most one trains.
        hardware: ``H200``, ``B200`` or ``B300``; the connection's default, else the service's.
        experiment_name: default ``<dag id>_<run id>``, cleaned of what experiment names can't hold.
        idle_timeout_seconds: the service ends a job that got no request for so long. Between tasks and retries nobody
            talks to the job, so choose it longer than ``retries * retry_delay`` plus the scheduler's own gaps.
        pending_timeout_seconds: the service gives up a job that got no GPUs for so long.
        wait_for_completion: succeed only when the job runs. A try that waits in vain leaves the job to the next try;
            the last one cancels it.
        timeout_s: longest wait of one try, seconds; ``execution_timeout`` shortens it.
        deferrable: wait in the triggerer; default is Airflow's ``[operators] default_deferrable``.
        inline_s: how long a deferrable task looks on the worker first.
        cancel_on_kill: whether the job is cancelled when a user ends the task while it creates or waits.

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
    operator_extra_links = (CortexTrainingJobLink(),)

    def __init__(
        self,
        *,
        sub_jobs: Sequence[SubJobConfig | Mapping[str, Any]],
        hardware: str | None = None,
        experiment_name: str | None = None,
        idle_timeout_seconds: int | None = None,
        pending_timeout_seconds: int | None = None,
        wait_for_completion: bool = False,
        timeout_s: float = 86_400.0,
        deferrable: bool | None = None,
        inline_s: float = INLINE_S,
        cancel_on_kill: bool = True,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.wait_for_completion = wait_for_completion
        self.timeout_s = timeout_s
        self.deferrable = default_deferrable() if deferrable is None else deferrable
        self.inline_s = inline_s
        self.cancel_on_kill = cancel_on_kill
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
            limit_s = self.time_limit_s(self.timeout_s)
        with hook.get_conn(patience_s=limit_s) as client:
            with clear_failures():
                if record.superseded:
                    cancel_quietly(client, record.superseded.get("job_id"), self.log.info)
                job_id = self._adopt(client, record, body) or self._create(client, record, body, context)
            self._created = (client, job_id)
            note(self, CortexTrainingJobLink, job_url(settings, job_id))
            self.log.info("job %s is the job of this run", job_id)
            if not self.wait_for_completion:
                return job_id
            wait_s = min(self.inline_s, limit_s) if self.deferrable else limit_s
            with self._gives_up_at_last(client, job_id, context), clear_failures(client):
                if self._runs_within(client, job_id, wait_s):
                    return job_id
                if wait_s >= limit_s:
                    raise self._too_late(job_id)
        return self._defer(record, job_id, limit_s - wait_s)

    def execute_complete(
        self,
        context: Context,
        event: dict[str, Any] | None = None,
        job_id: str | None = None,
        deadline: float | None = None,
    ) -> str:
        """The worker leg after the trigger's event. One about another job is no word about this one."""
        event = event or {}
        record = DurableRecord(context)
        job_id = (record.current or {}).get("job_id") or job_id or event.get("job_id")
        with clear_failures():
            job_id = require_text(self, "job_id", job_id)
        if is_of_another_wait(event, job_id=job_id):
            self.log.warning("waiting on for job %s: %s is about another one", job_id, event)
            limit_s = self.time_limit_s(self.timeout_s)
            return self._defer(record, job_id, limit_s if deadline is None else max(0.0, deadline - time.time()))
        with clear_failures(), self.hook.get_conn() as client:
            note(self, CortexTrainingJobLink, job_url(client, job_id))
            with self._gives_up_at_last(client, job_id, context), clear_failures(client):
                status, error = event.get("status", Status.RUNNING), str(event.get("error") or "")
                if status == Status.TIMEOUT:
                    raise self._too_late(job_id)
                if status == Status.ENDED:
                    raise JobFailed(job_id=job_id, state=str(event.get("state") or "unknown"), reason=error)
                if status != Status.RUNNING:
                    raise AirflowFailException(f"waiting for job {job_id}: {error or 'the wait ended'}")
        return job_id

    def resume_execution(self, next_method: str, next_kwargs: dict[str, Any] | None, context: Context) -> Any:
        try:
            return super().resume_execution(next_method, next_kwargs, context)
        except (TaskDeferralError, TaskDeferralTimeout) as error:
            job_id = (DurableRecord(context).current or {}).get("job_id")
            # A limit that passed with nobody there to tell: no event and no execute_complete will come. A trigger that
            # crashed leaves the job to the next try, if there is one.
            if isinstance(error, TaskDeferralTimeout) or is_last_try(context):
                with self.hook.get_conn() as client:
                    cancel_quietly(client, job_id, self.log.info)
            raise

    def on_kill(self) -> None:
        if self._created is not None and self.cancel_on_kill:
            client, job_id = self._created
            cancel_quietly(client, job_id, self.log.info)

    def _runs_within(self, client: CortexTrainingClient, job_id: str, wait_s: float) -> bool:
        try:
            client.wait_for_job(job_id, timeout_s=max(wait_s, 0.1))
        except DeadlineExceeded:
            return False
        return True

    def _defer(self, record: DurableRecord, job_id: str, left_s: float) -> NoReturn:
        now = time.time()
        self.defer(
            trigger=CortexTrainingJobTrigger(
                target=self.target.to_kwargs(),
                job_id=job_id,
                started=now,
                not_before=now + DEFER_GRACE_S,
                deadline=now + left_s,
                generation=record.generation,
                cancel_on_kill=self.cancel_on_kill,
            ),
            method_name="execute_complete",
            kwargs={"job_id": job_id, "deadline": now + left_s},
            timeout=timedelta(seconds=left_s + BACKSTOP_S),
        )

    def _too_late(self, job_id: str) -> DeadlineExceeded:
        limit_s = self.time_limit_s(self.timeout_s)
        return DeadlineExceeded(
            f"job {job_id} did not run within {limit_s:.0f} s; a retry waits for it again, the last try cancels it",
            timeout_s=limit_s,
        )

    @contextlib.contextmanager
    def _gives_up_at_last(self, client: CortexTrainingClient, job_id: str, context: Context) -> Iterator[None]:
        """Between tries the job stays: the retry goes on with it. After the last one nobody would."""
        try:
            yield
        except JobFailed:
            raise
        except (CortexTrainingError, AirflowFailException) as error:
            if isinstance(error, AirflowFailException) or is_last_try(context):
                cancel_quietly(client, job_id, self.log.info)
            raise

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
        state = job_state(job.get("status"))
        if is_terminal_job(state) or state == JobState.CANCELLING:
            self.log.warning(
                "job %s of an earlier try is %s (%s); creating another one",
                job_id,
                state,
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
        self.log.info("adopted job %s of an earlier try (%s)", job_id, state)
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
            if is_last_try(context):
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
    """Cancel jobs. Made for a teardown: succeeds when there is nothing (left) to cancel, and a job that can't be
    cancelled keeps none of the others alive.

    Args:
        job_id: a job, or a list of jobs; None and empty texts are ignored, because a create that never ran left none.
        root: root of a training run; every job in its journal is cancelled, replacements included, and a driver that is
            still alive somewhere can create no other.
        credentials: for a root in a bucket: a list ``kind:location,…``, as the training plan has it.
        wait_for_completion: succeed only when all these jobs have ended and hold no GPUs any more.
        timeout_s: longest such wait, seconds; ``execution_timeout`` shortens it.
        deferrable: wait in the triggerer; default is Airflow's ``[operators] default_deferrable``.
        inline_s: how long a deferrable task looks on the worker first. Most jobs end within it.

    Returns (XCom): the ids that were asked to end.
    """

    template_fields = (*CortexTrainingOperator.template_fields, "job_id", "root", "credentials")
    ui_color = "#f4e3e3"

    def __init__(
        self,
        *,
        job_id: str | Sequence[str] | None = None,
        root: str | None = None,
        credentials: str | None = None,
        wait_for_completion: bool = False,
        timeout_s: float = 600.0,
        deferrable: bool | None = None,
        inline_s: float = INLINE_S,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.deferrable = default_deferrable() if deferrable is None else deferrable
        self.inline_s = inline_s
        self.job_id = job_id
        self.root = root
        self.credentials = credentials
        self.wait_for_completion = wait_for_completion
        self.timeout_s = timeout_s

    def execute(self, context: Context) -> list[str]:
        named = [self.job_id] if isinstance(self.job_id, str) else list(self.job_id or [])
        job_ids = [job_id for job_id in named if job_id]
        with clear_failures():
            hook = self.hook
            cancelled = self._cancel_all(hook, job_ids)
            self.log.info("cancelled: %s", ", ".join(cancelled) or "nothing, no job was left")
            if not self.wait_for_completion:
                return cancelled
            limit_s = self.time_limit_s(float(self.timeout_s))
            wait_s = min(self.inline_s, limit_s) if self.deferrable else limit_s
            with hook.get_conn(patience_s=wait_s) as client:
                alive = _alive_after(client, list(dict.fromkeys((*job_ids, *cancelled))), wait_s)
            if alive and wait_s >= limit_s:
                raise self._too_late(alive)
        if alive:
            self._defer(alive, cancelled, limit_s - wait_s)
        return cancelled

    def execute_complete(
        self,
        context: Context,
        event: dict[str, Any] | None = None,
        cancelled: list[str] | None = None,
        job_ids: list[str] | None = None,
        deadline: float | None = None,
    ) -> list[str]:
        """The worker leg after the trigger's event. One that is not about `job_ids` is no word about them."""
        event = event or {}
        cancelled = list(cancelled or event.get("cancelled") or [])
        status = event.get("status", Status.ENDED)
        if job_ids and deadline and is_of_another_wait(event, job_ids=job_ids):
            self.log.warning("waiting on for the end of %s: %s is about something else", ", ".join(job_ids), event)
            self._defer(job_ids, cancelled, max(0.0, deadline - time.time()))
        if status == Status.TIMEOUT:
            raise self._too_late(event.get("alive") or cancelled)
        if status != Status.ENDED:
            raise AirflowFailException(
                f"task {self.task_id}: waiting for the end of {', '.join(event.get('alive') or cancelled)}: "
                f"{event.get('error') or 'the wait ended'}"
            )
        return cancelled

    def _cancel_all(self, hook: CortexTrainingHook, job_ids: list[str]) -> list[str]:
        """Ask all to end, and only then raise what kept one of them alive: nobody may come after this task."""
        cancelled: list[str] = []
        problems: list[CortexTrainingError] = []
        if self.root:
            # First: a driver that is still alive would take the end of its job for a loss.
            try:
                cancelled += end_run(hook.settings(), str(self.root), self.credentials or None)
            except CortexTrainingError as problem:
                problems.append(problem)
        with hook.get_conn() as client:
            for job_id in job_ids:
                try:
                    if cancel_job(client, job_id):
                        cancelled.append(job_id)
                except CortexTrainingError as problem:
                    problems.append(problem)
        for other in problems[1:]:
            self.log.error("%s", other)
        if problems:
            raise problems[0]
        return list(dict.fromkeys(cancelled))

    def _defer(self, alive: list[str], cancelled: list[str], left_s: float) -> NoReturn:
        now = time.time()
        self.defer(
            trigger=CortexTrainingJobEndsTrigger(
                target=self.target.to_kwargs(),
                job_ids=alive,
                cancelled=cancelled,
                started=now,
                not_before=now + DEFER_GRACE_S,
                deadline=now + left_s,
            ),
            method_name="execute_complete",
            kwargs={"cancelled": cancelled, "job_ids": alive, "deadline": now + left_s},
            timeout=timedelta(seconds=left_s + BACKSTOP_S),
        )

    def _too_late(self, alive: Sequence[str]) -> DeadlineExceeded:
        limit_s = self.time_limit_s(float(self.timeout_s))
        return DeadlineExceeded(
            f"{', '.join(alive)} did not end within {limit_s:.0f} s of being cancelled; a retry waits again",
            timeout_s=limit_s,
        )


def is_last_try(context: Context) -> bool:
    """Whether no retry follows this try."""
    return bool(context["ti"].try_number > context["ti"].max_tries)


def _alive_after(client: CortexTrainingClient, job_ids: list[str], wait_s: float) -> list[str]:
    """Which of these jobs have not ended after so many seconds; it looks at least once."""
    deadline = time.monotonic() + wait_s
    while alive := [job_id for job_id in job_ids if not _has_ended(client, job_id)]:
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            return alive
        time.sleep(min(_LOOK_S, left_s))
        job_ids = alive
    return []


def _has_ended(client: CortexTrainingClient, job_id: str) -> bool:
    try:
        return is_terminal_job(client.get_job(job_id).get("status"))
    except NotFoundError:
        return True


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
