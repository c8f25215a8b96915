"""Waiting for a request that another task sent."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from airflow.sdk.exceptions import AirflowFailException

from airflow_cortex_training.failures import clear_failures
from airflow_cortex_training.hooks.cortex_training import CortexTrainingHook
from airflow_cortex_training.links import CortexTrainingJobLink, job_url, note
from airflow_cortex_training.operators.base import require_text, with_fields
from airflow_cortex_training.sensors.base import CortexTrainingSensor
from airflow_cortex_training.triggers.events import Status
from airflow_cortex_training.triggers.requests import CortexTrainingRequestTrigger
from cortex_training.errors import ApiError, JobFailed, RequestFailed
from cortex_training.protocol.polling import POLL_REFUSALS
from cortex_training.states import RequestState, is_terminal_job, is_terminal_request, job_state, request_state

if TYPE_CHECKING:
    from cortex_training.client import CortexTrainingClient

OPERATION = "request"


class CortexTrainingRequestSensor(CortexTrainingSensor):
    """Waits until a request is done. One that failed, was cancelled, or whose job ended fails the task for good.

    For requests sent with ``wait_for_completion=False``. Results are not fetched: they may be large.

    Args:
        job_id, request_id: usually another task's output.
        conn_id, database, schema, endpoint, deferrable, inline_s: see `CortexTrainingSensor`.

    Returns (XCom): ``job_id``, ``request_id``, ``state``.
    """

    template_fields = (*CortexTrainingSensor.template_fields, "job_id", "request_id")

    operator_extra_links = (CortexTrainingJobLink(),)

    def __init__(self, *, job_id: str, request_id: str, **kwargs: Any) -> None:
        super().__init__(**with_fields(kwargs))
        self.job_id = job_id
        self.request_id = request_id

    def check(self) -> None:
        self.job_id = require_text(self, "job_id", self.job_id)
        self.request_id = require_text(self, "request_id", self.request_id)

    def look(self, source: CortexTrainingClient) -> dict[str, Any] | None:
        note(self, CortexTrainingJobLink, job_url(source, self.job_id))
        try:
            reply = source.get_request_status(self.job_id, self.request_id, max_events=1)
        except ApiError as refusal:
            if refusal.status not in POLL_REFUSALS:
                raise
            # Polls are served while the job runs; if it does not, that is the answer.
            job = source.get_job(self.job_id)
            if is_terminal_job(job.get("status")):
                self._job_ended(source, job_state(job.get("status")), str(job.get("reason") or refusal))
            if refusal.status != 409:
                raise
            return None
        state = request_state(reply.get("status"))
        if state == RequestState.STREAMING:
            raise AirflowFailException(
                f"{self.awaited()}: it streams, and a look takes its events away from the reader; send it without"
            )
        if not is_terminal_request(state):
            return None
        return self._settled(source, state, str(reply.get("error") or ""))

    def trigger(self, *, started: float, not_before: float, deadline: float) -> CortexTrainingRequestTrigger:
        return CortexTrainingRequestTrigger(
            target=self.target.to_kwargs(),
            job_id=self.job_id,
            request_id=self.request_id,
            operation=OPERATION,
            started=started,
            not_before=not_before,
            deadline=deadline,
            generation=[],
        )

    def concluded(self, event: dict[str, Any]) -> dict[str, Any]:
        self.job_id = event.get("job_id") or self.job_id
        self.request_id = event.get("request_id") or self.request_id
        with clear_failures(), CortexTrainingHook.for_target(self.target).get_conn() as client:
            if event.get("status") == Status.ENDED:
                self._job_ended(client, str(event.get("state") or "unknown"), str(event.get("error") or ""))
            found = self.look(client)
        if found is None:
            raise AirflowFailException(f"{self.awaited()}: the trigger saw its end, and a look after it does not")
        return found

    def ids(self) -> dict[str, Any]:
        return {"job_id": self.job_id, "request_id": self.request_id}

    def awaited(self) -> str:
        return f"request {self.request_id} of job {self.job_id} done"

    def _settled(self, client: CortexTrainingClient, state: str, error: str) -> dict[str, Any]:
        if state != RequestState.DONE:
            failure = RequestFailed(job_id=self.job_id, request_id=self.request_id, state=state, error=error)
            self._fail(client, failure)
        return {"job_id": self.job_id, "request_id": self.request_id, "state": str(state)}

    def _job_ended(self, client: CortexTrainingClient, state: str, reason: str) -> None:
        self._fail(client, JobFailed(job_id=self.job_id, state=state, reason=reason))

    def _fail(self, client: CortexTrainingClient, failure: JobFailed | RequestFailed) -> None:
        try:
            with clear_failures(client):
                raise failure
        except (JobFailed, RequestFailed) as error:
            # An end is an end, however often it is looked at.
            raise AirflowFailException(f"request {self.request_id}: {error}") from error
