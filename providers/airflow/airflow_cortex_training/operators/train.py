"""A whole training run as one task."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NoReturn

from airflow.sdk.exceptions import AirflowFailException, TaskDeferralError, TaskDeferralTimeout

from airflow_cortex_training.durable import DurableRecord
from airflow_cortex_training.experiment_names import default_experiment_name
from airflow_cortex_training.failures import clear_failures
from airflow_cortex_training.links import (
    CortexTrainingCheckpointLink,
    CortexTrainingJobLink,
    CortexTrainingRunLink,
    JobLinkOfRun,
    job_url,
    location_url,
    note,
    run_url,
)
from airflow_cortex_training.operators.base import (
    BACKSTOP_S,
    DEFER_GRACE_S,
    CortexTrainingOperator,
    default_deferrable,
    with_fields,
)
from airflow_cortex_training.operators.checkpoints import attempt_id
from airflow_cortex_training.operators.jobs import is_last_try
from airflow_cortex_training.roots import open_root
from airflow_cortex_training.run_folder import (
    DrivenByAnother,
    check_inputs,
    end_run,
    is_over,
    may_hold_jobs,
    next_folder,
    write_plan,
)
from airflow_cortex_training.triggers.engine import STOP_S
from airflow_cortex_training.triggers.events import Status, is_of_another_wait
from airflow_cortex_training.triggers.train import CortexTrainingTrainTrigger
from cortex_training.errors import ConfigurationError, CortexTrainingError, DeadlineExceeded
from cortex_training.identity import new_token
from cortex_training.training import TrainingPlan
from cortex_training.training.root import is_bucket

if TYPE_CHECKING:
    from airflow.sdk import Context

    from airflow_cortex_training.connection import ConnectionSettings
    from cortex_training.training import Progress, TrainingResult

WEEK_S = 7 * 86_400.0
KILL_S = 20.0

ON_CLEAR = ("resume", "restart")


class CortexTrainingTrainOperator(CortexTrainingOperator):
    """Train as a plan says, to the end, through crashes of workers, triggerers and jobs.

    Deferrable, the run is driven from the triggerer and holds no worker; workers and triggerers must then see
    `plan.root` and `plan.dataset` under the same paths. For a root in a bucket, ``airflow:CONN_ID`` in
    `plan.credentials` is an Airflow connection. Otherwise it is driven here, on the worker. Progress goes to
    the task's log and, one row a step, to ``metrics.jsonl`` in the root.

    A retry goes on where the last driver stopped: no step is executed twice, none is left out. When the task is
    cleared, jobs of its earlier generation are cancelled, and then

    * ``on_clear="resume"`` goes on from the root's latest publication; a run that was over starts anew beside it;
    * ``on_clear="restart"`` starts anew, in ``<root>-r2``, ``-r3``, ...

    A plan with `job_id` trains on a job that another task owns: it is never cancelled or replaced here, and when only
    a new job could help the task fails and says why. A plan with `sub_jobs` owns its jobs; cancel what an aborted DAG
    run leaves with `CortexTrainingCancelJobOperator(root=...)` as teardown.

    Args:
        plan: `cortex_training.training.TrainingPlan`, or its JSON. Templated; with numbers in templates set
            ``render_template_as_native_obj=True`` on the DAG.
        timeout_s: longest time for one try, seconds; ``execution_timeout`` shortens it. Jobs of the run are cancelled
            when it is over; a retry goes on from the latest publication.
        deferrable: default is Airflow's ``[operators] default_deferrable``.
        on_clear: see above.
        cancel_on_kill: whether the jobs of the run are cancelled when a user ends the task. Without it they live on to
            their idle timeout, or until the teardown cancels them.

    An `AssetAlias` among the `outlets` gets an event about `assets.publications(root)`, with the last publication.

    Returns (XCom): the run's `cortex_training.training.TrainingResult`: ``root``, ``job_id``, ``steps``,
    ``global_steps``, ``first_loss``, ``last_loss``, ``checkpoint_id``, ``entry``, ``segments``, ``epoch``.
    """

    template_fields = (*CortexTrainingOperator.template_fields, "plan")
    ui_color = "#c9e8f7"
    operator_extra_links = (CortexTrainingRunLink(), CortexTrainingJobLink(), CortexTrainingCheckpointLink())

    def __init__(
        self,
        *,
        plan: TrainingPlan | Mapping[str, Any],
        timeout_s: float = WEEK_S,
        deferrable: bool | None = None,
        on_clear: str = "resume",
        cancel_on_kill: bool = True,
        **kwargs: Any,
    ) -> None:
        super().__init__(**with_fields(kwargs))
        self.cancel_on_kill = cancel_on_kill
        self.plan = plan
        self.timeout_s = timeout_s
        self.deferrable = default_deferrable() if deferrable is None else deferrable
        if on_clear not in ON_CLEAR:
            raise ConfigurationError.of(f"task {self.task_id}: on_clear", on_clear, f"use one of {', '.join(ON_CLEAR)}")
        self.on_clear = on_clear
        self._driving: tuple[TrainingPlan, ConnectionSettings, str] | None = None
        self._trained: dict[str, Any] | None = None

    def execute(self, context: Context) -> dict[str, Any]:
        known = DurableRecord(context).current or {}
        begun = (known.get("root"), known.get("credentials"))
        try:
            with self._keeping_a_live_run(context, *begun):
                settings, plan, record, attempt, nonce = self._prepared(context)
        except TrainingRunError:
            self._cancel_if_last_try(context, *begun)
            raise
        if not self.deferrable:
            return self._drive(plan, settings, attempt, context)
        return self._defer(plan, record, attempt, nonce)

    def _prepared(self, context: Context) -> tuple[ConnectionSettings, TrainingPlan, DurableRecord, str, str]:
        """Check the plan, and leave it and this try's name where the driver finds them."""
        with clear_failures():
            settings = self.hook.settings()
            plan = self._checked_plan(context, settings)
            record = DurableRecord(context)
            plan = self._rooted(context, plan, record)
            check_inputs(plan)
            self._note_links(context, settings, plan)
            attempt, nonce = attempt_id(context), new_token()
            record.write(root=plan.root, attempt=attempt, credentials=plan.credentials)
            record.publish_token(plan.root)
            if self.deferrable:
                write_plan(plan, attempt, nonce)
        return settings, plan, record, attempt, nonce

    def _defer(self, plan: TrainingPlan, record: DurableRecord, attempt: str, nonce: str) -> NoReturn:
        limit_s = self.time_limit_s(self.timeout_s)
        now = time.time()
        self.defer(
            trigger=CortexTrainingTrainTrigger(
                target=self.target.to_kwargs(),
                root=plan.root,
                attempt=attempt,
                nonce=nonce,
                not_before=now + DEFER_GRACE_S,
                deadline=now + limit_s,
                generation=record.generation,
                cancel_on_kill=self.cancel_on_kill,
                credentials=plan.credentials,
            ),
            method_name="execute_complete",
            kwargs={"root": plan.root, "credentials": plan.credentials, "attempt": attempt},
            timeout=timedelta(seconds=limit_s + BACKSTOP_S),
        )

    def execute_complete(
        self,
        context: Context,
        event: dict[str, Any] | None = None,
        root: str | None = None,
        credentials: str | None = None,
        attempt: str | None = None,
    ) -> dict[str, Any]:
        """The worker leg after the run: hand over its result, or fail without leaving a job behind.

        An event of another run or try is no word about this one, which is driven on.
        """
        event = event or {}
        # Releases that named no attempt in their events may still run in a triggerer.
        if is_of_another_wait(event, root=root) or (attempt and event.get("attempt", attempt) != attempt):
            self.log.warning("driving on the run in %s: %s is about another one", root, event)
            return self.execute(context)
        known = DurableRecord(context).current or {}
        root = root or event.get("root") or known.get("root")
        credentials = credentials or known.get("credentials")
        if event.get("status") == Status.TRAINED:
            result = dict(event["result"])
            with contextlib.suppress(CortexTrainingError):
                self._note_result(context, self.hook.settings(), result)
            with clear_failures():
                self._announce(context, result, credentials)
            self.log.info("trained %s steps, loss %s -> %s", result["steps"], result["first_loss"], result["last_loss"])
            self._trained = result
            return result
        reason = str(event.get("error") or "the trigger gave no reason")
        if event.get("status") == Status.TIMEOUT:
            self._cancel_journal(context, root, credentials)
            raise self._too_late(str(root))
        # One machine may lack what another had: its shared folder, its data. That is no reason to end a live run.
        mendable = event.get("configuration") and root and may_hold_jobs(root, attempt_id(context), credentials)
        if not mendable and (event.get("permanent") or event.get("status") == Status.DENIED):
            self._cancel_journal(context, root, credentials)
            raise AirflowFailException(f"the training run in {root}: {reason}")
        self._cancel_if_last_try(context, root, credentials)
        raise TrainingRunError(f"the training run in {root}: {reason}")

    def resume_execution(self, next_method: str, next_kwargs: dict[str, Any] | None, context: Context) -> Any:
        try:
            return super().resume_execution(next_method, next_kwargs, context)
        except TaskDeferralTimeout:
            # Neither an event nor execute_complete will come: this is the only place left to end the run's jobs.
            known = DurableRecord(context).current or {}
            self._cancel_journal(context, known.get("root"), known.get("credentials"))
            raise
        except TaskDeferralError:
            known = DurableRecord(context).current or {}
            self._cancel_if_last_try(context, known.get("root"), known.get("credentials"))
            raise

    def get_openlineage_facets_on_complete(self, task_instance: Any) -> Any:
        from airflow_cortex_training.lineage import of_training

        plan = self.plan.to_dict() if isinstance(self.plan, TrainingPlan) else self.plan
        return of_training(plan, self._trained, self.hook.settings())

    def on_kill(self) -> None:
        if self._driving is None or not self.cancel_on_kill:
            return
        # Airflow calls this from a signal handler, on the thread whose event loop drives the run: another loop needs
        # another thread.
        thread = threading.Thread(target=self._cancel_from_thread, args=self._driving, daemon=True)
        thread.start()
        thread.join(timeout=KILL_S)

    # Before

    def _checked_plan(self, context: Context, settings: ConnectionSettings) -> TrainingPlan:
        given = self.plan
        if not isinstance(given, (TrainingPlan, Mapping)):
            raise ConfigurationError.of(f"task {self.task_id}: plan", given, "give a TrainingPlan or its JSON object")
        plan = given if isinstance(given, TrainingPlan) else TrainingPlan.from_dict(given)
        if plan.owns_job:
            plan = replace(
                plan,
                experiment_name=plan.experiment_name or default_experiment_name(context),
                hardware=plan.hardware or settings.hardware,
            )
        plan.validate()
        return plan

    def _rooted(self, context: Context, plan: TrainingPlan, record: DurableRecord) -> TrainingPlan:
        """The plan with the root of this generation; jobs of an earlier generation are cancelled on the way."""
        if record.current:
            return _moved(plan, record.current)
        if record.superseded is None:
            return plan
        before = _moved(plan, record.superseded)
        self._cancel_journal(context, before.root, before.credentials)
        if self.on_clear == "restart" or is_over(before):
            return replace(plan, root=next_folder(plan.root, plan.credentials))
        return before

    # Driving on the worker

    def _drive(
        self, plan: TrainingPlan, settings: ConnectionSettings, attempt: str, context: Context
    ) -> dict[str, Any]:
        from cortex_training.training import RunFailed, RunInterrupted

        self._driving = (plan, settings, attempt)
        try:
            with self._keeping_a_live_run(context, plan.root, plan.credentials), clear_failures():
                result = asyncio.run(self._run(plan, settings, attempt, context))
        except RunInterrupted as error:
            self._cancel_journal(context, plan.root, plan.credentials)
            raise self._too_late(plan.root) from error
        except RunFailed as error:
            raise AirflowFailException(str(error)) from error
        except AirflowFailException:
            self._cancel_journal(context, plan.root, plan.credentials)
            raise
        except CortexTrainingError:
            self._cancel_if_last_try(context, plan.root, plan.credentials)
            raise
        self._driving = None
        self._trained = result.to_dict()
        self._note_result(context, settings, self._trained)
        with clear_failures():
            self._announce(context, self._trained, plan.credentials)
        return self._trained

    async def _run(
        self, plan: TrainingPlan, settings: ConnectionSettings, attempt: str, context: Context
    ) -> TrainingResult:
        from cortex_training.aio import AsyncCortexTrainingClient
        from cortex_training.training import RunInterrupted, run

        stop, job_link = asyncio.Event(), JobLinkOfRun(settings, context["ti"])

        def tell(moment: Progress) -> None:
            job_link.show(moment.job_id)
            self.log.info("%s", moment.line())

        async with AsyncCortexTrainingClient(**settings.client_arguments()) as client:
            running = asyncio.ensure_future(run(plan, client, tell, attempt=attempt, stop=stop))
            try:
                await asyncio.wait({running}, timeout=self.time_limit_s(self.timeout_s))
                stop.set()
                await asyncio.wait({running}, timeout=STOP_S)
            finally:
                # It may still wait for a service that does not answer.
                running.cancel()
                await asyncio.wait({running})
            if running.cancelled():
                raise RunInterrupted(f"{plan.root}: not ended at its deadline")
            return running.result()

    # What users see beside the log

    def _note_links(self, context: Context, settings: ConnectionSettings, plan: TrainingPlan) -> None:
        note(self, CortexTrainingRunLink, run_url(context))
        note(self, CortexTrainingCheckpointLink, location_url(plan.root, context))
        if plan.job_id:
            note(self, CortexTrainingJobLink, job_url(settings, plan.job_id))

    def _note_result(self, context: Context, settings: ConnectionSettings, result: Mapping[str, Any]) -> None:
        # The last job of several.
        note(self, CortexTrainingJobLink, job_url(settings, str(result["job_id"])))
        if result.get("entry"):
            from cortex_training.publication import Entry

            location = Entry.parse(str(result["entry"]), str(result["root"])).location
            note(self, CortexTrainingCheckpointLink, location_url(location, context))

    # After

    def _announce(self, context: Context, result: Mapping[str, Any], credentials: str | None) -> None:
        if not self.outlets or not result.get("entry"):
            return
        from airflow_cortex_training.assets import about, announce, publications
        from cortex_training.publication import Entry

        store = open_root(str(result["root"]), credentials)
        told = about(Entry.parse(str(result["entry"]), store.root), store)
        announce(self.outlets, context, publications(store.root), told)

    def _too_late(self, root: str) -> DeadlineExceeded:
        limit_s = self.time_limit_s(self.timeout_s)
        return DeadlineExceeded(
            f"the training run in {root} did not end within {limit_s:.0f} s; its jobs were cancelled. What it "
            "published counts: a retry or a clear goes on from there.",
            timeout_s=limit_s,
        )

    def _cancel_if_last_try(self, context: Context, root: str | None, credentials: str | None) -> None:
        """Between tries the job stays: the retry goes on with it. After the last one nobody would."""
        if is_last_try(context):
            self._cancel_journal(context, root, credentials)

    @contextlib.contextmanager
    def _keeping_a_live_run(self, context: Context, root: str | None, credentials: str | None) -> Iterator[None]:
        """Let a try that finds its configuration unusable be retried while a job of the run may be alive.

        A worker may lack the shared folder or the data for a moment; failing for good would end a healthy run, or leave
        its job to nobody. `root` is where an earlier leg of this task trained, if one did.
        """
        try:
            yield
        except AirflowFailException as error:
            of_configuration = isinstance(error.__cause__, ConfigurationError)
            if root and of_configuration and may_hold_jobs(root, attempt_id(context), credentials):
                raise TrainingRunError(f"the training run in {root}: {error}") from error
            raise

    def _cancel_journal(self, context: Context, root: str | None, credentials: str | None) -> None:
        if not root:
            return
        try:
            cancelled = end_run(self.hook.settings(), root, credentials, attempt_id(context))
        except DrivenByAnother as error:
            self.log.info("no job is cancelled: %s", error)
            return
        except CortexTrainingError as error:
            self.log.warning("could not cancel the jobs of %s, they end at their idle timeout: %s", root, error)
            return
        self.log.info("cancelled %s", ", ".join(cancelled) or "nothing, no job of this run was left")

    def _cancel_from_thread(self, plan: TrainingPlan, settings: ConnectionSettings, attempt: str) -> None:
        try:
            cancelled = end_run(settings, plan.root, plan.credentials, attempt)
            self.log.info("killed; cancelled %s", ", ".join(cancelled) or "nothing")
        except CortexTrainingError as error:
            self.log.warning("killed; could not cancel the jobs of %s: %s", plan.root, error)


def _moved(plan: TrainingPlan, known: Mapping[str, Any]) -> TrainingPlan:
    """The plan on the root that is on record. Where its bucket's credentials are the plan says, as long as it is in a
    bucket itself: a person may have corrected just that.
    """
    root = str(known.get("root") or plan.root)
    credentials = (plan.credentials or known.get("credentials")) if is_bucket(root) else None
    return replace(plan, root=root, credentials=credentials)


class TrainingRunError(CortexTrainingError, RuntimeError):
    """A run ended without a result for a reason that may pass; a retry goes on with it."""
