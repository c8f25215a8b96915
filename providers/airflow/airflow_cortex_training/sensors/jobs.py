"""Waiting until a job runs."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NoReturn

from airflow.sdk import BaseSensorOperator
from airflow.sdk.exceptions import AirflowFailException, AirflowSensorTimeout, AirflowSkipException

from airflow_cortex_training.connection import Target
from airflow_cortex_training.hooks.cortex_training import CortexTrainingHook
from airflow_cortex_training.operators.base import (
    DEFER_GRACE_S,
    clear_failures,
    default_deferrable,
    require_text,
)
from airflow_cortex_training.triggers.events import Status
from airflow_cortex_training.triggers.jobs import CortexTrainingJobTrigger
from cortex_training.errors import DeadlineExceeded, JobFailed
from cortex_training.states import JobState, is_terminal_job, job_state

if TYPE_CHECKING:
    from airflow.sdk import Context

    from cortex_training.client import CortexTrainingClient

INLINE_S = 12.0
BACKSTOP_S = 900.0


class CortexTrainingWaitForRunningSensor(BaseSensorOperator):
    """Waits until a job runs. A job that ended fails the task for good, with the service's reason.

    It owns no job: `CortexTrainingCancelJobOperator` ends the job when this sensor gives up.

    Args:
        job_id: the job; usually another task's output.
        conn_id, database, schema, endpoint: as in every operator of this provider.
        deferrable: wait in the triggerer; default is Airflow's ``[operators] default_deferrable``. Otherwise `mode`
            chooses between holding the worker (``poke``) and coming back (``reschedule``).
        inline_s: how long a deferrable sensor polls on the worker first.

    `timeout` counts from the first look, `soft_fail` turns a timeout or an ended job into a skip, in all three modes.

    Returns (XCom): the job's id.
    """

    template_fields = ("conn_id", "database", "schema", "endpoint", "job_id")
    ui_color = "#dff3fb"

    def __init__(
        self,
        *,
        job_id: str,
        conn_id: str = CortexTrainingHook.default_conn_name,
        database: str | None = None,
        schema: str | None = None,
        endpoint: str | None = None,
        deferrable: bool | None = None,
        inline_s: float = INLINE_S,
        poke_interval: float = 15.0,
        **kwargs: Any,
    ) -> None:
        super().__init__(poke_interval=poke_interval, **kwargs)
        self.job_id = job_id
        self.conn_id = conn_id
        self.database = database
        self.schema = schema
        self.endpoint = endpoint
        self.deferrable = default_deferrable() if deferrable is None else deferrable
        self.inline_s = inline_s

    @property
    def target(self) -> Target:
        return Target(self.conn_id, self.database, self.schema, self.endpoint)

    def execute(self, context: Context) -> str:
        with clear_failures():
            self.job_id = require_text(self, "job_id", self.job_id)
        if not self.deferrable:
            super().execute(context)
            return self.job_id
        started = time.time()
        limit_s = self._limit_s()
        if self._runs_soon(min(self.inline_s, limit_s)):
            return self.job_id
        return self._defer(started, limit_s)

    def _defer(self, started: float, limit_s: float) -> NoReturn:
        self.defer(
            trigger=CortexTrainingJobTrigger(
                target=self.target.to_kwargs(),
                job_id=self.job_id,
                started=started,
                not_before=time.time() + DEFER_GRACE_S,
                deadline=started + limit_s,
            ),
            method_name="execute_complete",
            timeout=timedelta(seconds=limit_s + BACKSTOP_S),
        )

    def execute_complete(self, context: Context, event: dict[str, Any] | None = None) -> str:
        event = event or {}
        self.job_id = event.get("job_id") or self.job_id
        status = event.get("status")
        if status == Status.RUNNING:
            return self.job_id
        if status == Status.TIMEOUT:
            raise AirflowSensorTimeout(f"job {self.job_id} did not run within {self._limit_s():.0f} s")
        if status == Status.ENDED:
            state, reason = str(event.get("state") or "unknown"), str(event.get("error") or "")
            with CortexTrainingHook.for_target(self.target).get_conn() as client:
                self._ended(client, state, reason)
        raise AirflowFailException(f"job {self.job_id}: {event.get('error') or 'the wait ended without a reason'}")

    def poke(self, context: Context) -> bool:
        with clear_failures(), CortexTrainingHook.for_target(self.target).get_conn() as client:
            job = client.get_job(require_text(self, "job_id", self.job_id))
            state = job_state(job.get("status"))
            if is_terminal_job(state):
                self._ended(client, state, str(job.get("reason") or ""))
            self.log.info("job %s is %s", self.job_id, state)
            return state == JobState.RUNNING

    def _runs_soon(self, wait_s: float) -> bool:
        """Whether the job runs within `wait_s` seconds; raises when it ended."""
        states: list[str] = []

        def tell(job: dict[str, Any]) -> None:
            state = job_state(job.get("status"))
            if state not in states[-1:]:
                states.append(state)
                self.log.info("job %s is %s", self.job_id, state)

        with clear_failures(), CortexTrainingHook.for_target(self.target).get_conn() as client:
            try:
                client.wait_for_job(self.job_id, timeout_s=max(wait_s, 0.1), progress=tell)
            except DeadlineExceeded:
                return False
            except JobFailed as error:
                self._ended(client, error.state, error.reason)
        return True

    def _ended(self, client: CortexTrainingClient, state: str, reason: str) -> None:
        failure = JobFailed(job_id=self.job_id, state=state, reason=reason)
        try:
            with clear_failures(client):
                raise failure
        except JobFailed as error:
            if self.soft_fail or self.never_fail:
                raise AirflowSkipException(str(error)) from error
            # No later look can find it running.
            raise AirflowFailException(str(error)) from error

    def _limit_s(self) -> float:
        limit = self.execution_timeout
        return min(float(self.timeout), limit.total_seconds()) if isinstance(limit, timedelta) else float(self.timeout)
