"""Waiting until a job runs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

from airflow.sdk.exceptions import AirflowFailException

from airflow_cortex_training.failures import clear_failures
from airflow_cortex_training.hooks.cortex_training import CortexTrainingHook
from airflow_cortex_training.links import CortexTrainingJobLink, job_url, note
from airflow_cortex_training.operators.base import require_text
from airflow_cortex_training.sensors.base import CortexTrainingSensor
from airflow_cortex_training.triggers.events import Status
from airflow_cortex_training.triggers.jobs import CortexTrainingJobTrigger
from cortex_training.errors import JobFailed
from cortex_training.states import JobState, is_terminal_job, job_state

if TYPE_CHECKING:
    from cortex_training.client import CortexTrainingClient


class CortexTrainingWaitForRunningSensor(CortexTrainingSensor):
    """Waits until a job runs. A job that ended fails the task for good, with the service's reason.

    It owns no job: `CortexTrainingCancelJobOperator` ends the job when this sensor gives up.

    Args:
        job_id: the job; usually another task's output.
        conn_id, database, schema, endpoint, deferrable, inline_s: see `CortexTrainingSensor`.

    Returns (XCom): the job's id.
    """

    template_fields = (*CortexTrainingSensor.template_fields, "job_id")

    operator_extra_links = (CortexTrainingJobLink(),)

    def __init__(self, *, job_id: str, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.job_id = job_id
        self._state = ""

    def check(self) -> None:
        self.job_id = require_text(self, "job_id", self.job_id)

    def look(self, source: CortexTrainingClient) -> str | None:
        note(self, CortexTrainingJobLink, job_url(source, self.job_id))
        job = source.get_job(self.job_id)
        state = job_state(job.get("status"))
        if state != self._state:
            self._state = state
            self.log.info("job %s is %s", self.job_id, state)
        if is_terminal_job(state):
            self._ended(source, state, str(job.get("reason") or ""))
        return self.job_id if state == JobState.RUNNING else None

    def trigger(self, *, started: float, not_before: float, deadline: float) -> CortexTrainingJobTrigger:
        return CortexTrainingJobTrigger(
            target=self.target.to_kwargs(),
            job_id=self.job_id,
            started=started,
            not_before=not_before,
            deadline=deadline,
        )

    def concluded(self, event: dict[str, Any]) -> str:
        self.job_id = event.get("job_id") or self.job_id
        if event.get("status") != Status.RUNNING:
            with CortexTrainingHook.for_target(self.target).get_conn() as client:
                self._ended(client, str(event.get("state") or "unknown"), str(event.get("error") or ""))
        return self.job_id

    def ids(self) -> dict[str, Any]:
        return {"job_id": self.job_id}

    def awaited(self) -> str:
        return f"job {self.job_id} running"

    def _ended(self, client: CortexTrainingClient, state: str, reason: str) -> NoReturn:
        try:
            with clear_failures(client):
                raise JobFailed(job_id=self.job_id, state=state, reason=reason)
        except JobFailed as error:
            # No later look can find it running.
            raise AirflowFailException(str(error)) from error
