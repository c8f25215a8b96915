"""The life of one asynchronous call, over as many processes as it takes: intent, POST, wait, result.

::

    execute           validate -> write intent -> POST once -> write request id -> poll a little -> defer
    (triggerer)       ask for the request's state; tells ids only
    execute_complete  fetch the result, or the error, and finish

A retry begins with the record of the try before it: a request id is waited for again, an intent without one is
settled by the operator's own rule, because nobody can know whether that POST arrived.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator, Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

from airflow.sdk.exceptions import AirflowFailException, TaskDeferralTimeout

from airflow_cortex_training.durable import DurableRecord
from airflow_cortex_training.failures import clear_failures
from airflow_cortex_training.links import CortexTrainingJobLink, job_url, note
from airflow_cortex_training.operators.base import (
    BACKSTOP_S,
    DEFER_GRACE_S,
    INLINE_S,
    CortexTrainingOperator,
    default_deferrable,
    require_text,
    with_fields,
)
from airflow_cortex_training.triggers.events import Status, is_of_another_wait
from airflow_cortex_training.triggers.requests import CortexTrainingRequestTrigger
from cortex_training.errors import (
    ApiError,
    ConfigurationError,
    CortexTrainingError,
    DeadlineExceeded,
    JobFailed,
    NotFoundError,
    RequestFailed,
    SendRefused,
    TransportError,
)
from cortex_training.states import RequestState, is_terminal_request, request_state

if TYPE_CHECKING:
    from airflow.sdk import Context

    from cortex_training.client import CortexTrainingClient

RESULT_TIMEOUT_S = 600.0
MAX_TRIGGER_BYTES = 1000


class CortexTrainingRequestOperator(CortexTrainingOperator):
    """One call on a running job that answers with a request.

    Args:
        job_id: the job; usually another task's output.
        timeout_s: longest wait for the request, over all legs of one try; ``execution_timeout`` shortens it.
        deferrable: wait in the triggerer; default is Airflow's ``[operators] default_deferrable``.
        inline_s: how long a worker polls before it defers. Most requests end within it and save the second leg.
        wait_for_completion: without it the task ends when the request is sent, with ``job_id`` and ``request_id`` as
            its result; `CortexTrainingRequestSensor` waits for it then.
        cancel_on_kill: whether the request is cancelled when a user ends the task, or Airflow's own limit of the
            deferral passes; default depends on the operation.

    When the job ends, the task fails for good: the job is another task's to replace.

    Subclasses give `operation`, `submit` and `finish`, and override `check` and `settle_intent` where their call
    needs it.
    """

    template_fields = (*CortexTrainingOperator.template_fields, "job_id")

    operation: ClassVar[str]
    operator_extra_links = (CortexTrainingJobLink(),)
    cancels_on_kill: ClassVar[bool] = False

    def __init__(
        self,
        *,
        job_id: str,
        timeout_s: float = 1800.0,
        deferrable: bool | None = None,
        inline_s: float = INLINE_S,
        wait_for_completion: bool = True,
        cancel_on_kill: bool | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**with_fields(kwargs))
        self.wait_for_completion = wait_for_completion
        self.cancel_on_kill = self.cancels_on_kill if cancel_on_kill is None else cancel_on_kill
        self.job_id = job_id
        self.timeout_s = timeout_s
        self.deferrable = default_deferrable() if deferrable is None else deferrable
        self.inline_s = inline_s
        self._submitted: tuple[CortexTrainingClient, str, str] | None = None

    # What an operation says about itself

    def check(self) -> None:
        """Validate the arguments, before anything remote. Raises `ConfigurationError`."""

    def intent(self, client: CortexTrainingClient, record: DurableRecord) -> dict[str, Any]:
        """What to write down before the POST, beside the job and the operation."""
        return {}

    def submit(self, client: CortexTrainingClient, intent: Mapping[str, Any]) -> str | dict[str, Any]:
        """POST once; returns the request id, or the result itself of a call that is answered at once."""
        raise NotImplementedError

    def settle_intent(self, intent: Mapping[str, Any]) -> None:
        """An earlier try wrote `intent` and may have sent it. Return to send again, raise to refuse."""

    def settle_failure(self, intent: Mapping[str, Any]) -> None:
        """The request of an earlier try failed, as the service confirmed. Return to send again, raise to refuse."""

    def settle_clear(self, client: CortexTrainingClient, superseded: Mapping[str, Any]) -> None:
        """The task was cleared after it had sent `superseded` to this job. Return to send again, raise to refuse."""

    def finish(self, client: CortexTrainingClient, result: dict[str, Any], context: Context) -> Any:
        """Turn the service's result into what goes into XCom: ids and numbers."""
        raise NotImplementedError

    # The legs

    def execute(self, context: Context) -> Any:
        with clear_failures():
            self.job_id = require_text(self, "job_id", self.job_id)
            self.check()
            record = DurableRecord(context)
            hook = self.hook
            trigger = self._trigger(record, request_id="0" * 36, started=time.time(), limit_s=self.timeout_s)
            _check_kwargs(trigger)
            limit_s = self.time_limit_s(self.timeout_s)
            client = hook.get_conn(patience_s=limit_s)
        with client, _final_with_its_job(), clear_failures(client, self._names):
            note(self, CortexTrainingJobLink, job_url(client, self.job_id))
            request_id = self._request_of_earlier_try(client, record)
            if request_id is None:
                answer = self._submit(client, record)
                if not isinstance(answer, str):
                    return self.finish(client, answer, context)
                request_id = answer
            self._submitted = (client, self.job_id, request_id)
            if not self.wait_for_completion:
                return {"job_id": self.job_id, "request_id": request_id}
            if self.cancel_on_kill:
                record.publish_token(request_id)
            started = float((record.current or {}).get("started") or time.time())
            wait_s = min(self.inline_s, limit_s) if self.deferrable else limit_s
            try:
                if wait_s > 0:
                    return self._complete(client, record, request_id, wait_s, context)
            except DeadlineExceeded as error:
                if not self.deferrable or wait_s >= limit_s:
                    raise self._too_late(request_id, limit_s) from error
        return self._defer(record, request_id, started, limit_s - wait_s)

    def _defer(self, record: DurableRecord, request_id: str, started: float, left_s: float) -> NoReturn:
        trigger = self._trigger(record, request_id, started, left_s)
        self.defer(
            trigger=trigger,
            method_name="execute_complete",
            kwargs={"job_id": self.job_id, "request_id": request_id, "deadline": trigger.deadline},
            # The trigger ends at its own deadline, with an event. This is for the night no triggerer runs.
            timeout=timedelta(seconds=left_s + BACKSTOP_S),
        )

    def execute_complete(
        self,
        context: Context,
        event: dict[str, Any] | None = None,
        job_id: str | None = None,
        request_id: str | None = None,
        deadline: float | None = None,
    ) -> Any:
        """The worker leg after the trigger's event; everything it needs is in the event, too.

        An event about another request than this try's is no word about this one, which is waited for again.
        """
        event = event or {}
        record = DurableRecord(context)
        known = record.current or {}
        self.job_id = known.get("job_id") or job_id or event.get("job_id") or self.job_id
        request_id = known.get("request_id") or request_id or event.get("request_id")
        status = event.get("status", Status.SETTLED)
        with clear_failures():
            request_id = require_text(self, "request_id", request_id)
            hook = self.hook
        if is_of_another_wait(event, job_id=self.job_id, request_id=request_id):
            self.log.warning(
                "waiting on for request %s of job %s: %s is about another one", request_id, self.job_id, event
            )
            now = time.time()
            left_s = self.time_limit_s(self.timeout_s) if deadline is None else max(0.0, deadline - now)
            return self._defer(record, request_id, float(known.get("started") or now), left_s)
        with clear_failures(), hook.get_conn() as client, _final_with_its_job(), clear_failures(client, self._names):
            note(self, CortexTrainingJobLink, job_url(client, self.job_id))
            self._submitted = (client, self.job_id, request_id)
            if status == Status.SETTLED:
                return self._complete(client, record, request_id, RESULT_TIMEOUT_S, context)
            raise self._failure(Status(status), request_id, event)

    def resume_execution(self, next_method: str, next_kwargs: dict[str, Any] | None, context: Context) -> Any:
        try:
            return super().resume_execution(next_method, next_kwargs, context)
        except TaskDeferralTimeout:
            # No event and no execute_complete: this is the only place left where the request can be ended.
            self._cancel_request((DurableRecord(context).current or {}).get("request_id"))
            raise

    def on_kill(self) -> None:
        if self._submitted is not None and self.cancel_on_kill:
            client, job_id, request_id = self._submitted
            _cancel_request_quietly(client, job_id, request_id, self.log)

    # Steps of the legs

    def _names(self) -> dict[str, str]:
        """What every message about a failure must name."""
        return {"job": self.job_id, "request": self._submitted[2] if self._submitted else ""}

    def _request_of_earlier_try(self, client: CortexTrainingClient, record: DurableRecord) -> str | None:
        """The request to wait for again, or None when (another) one has to be sent."""
        if record.superseded and record.superseded.get("job_id") == self.job_id:
            self.settle_clear(client, record.superseded)
        earlier = record.current
        if earlier is None or earlier.get("job_id") != self.job_id:
            return None
        if earlier.get("ended") == "refused":
            return None
        if earlier.get("ended") == "failed":
            self.settle_failure(earlier)
            return None
        if not earlier.get("request_id"):
            self.settle_intent(earlier)
            return None
        request_id = str(earlier["request_id"])
        if self._has_failed(client, request_id):
            record.update(ended="failed")
            self.settle_failure(earlier)
            return None
        self.log.info("waiting again for request %s of job %s", request_id, self.job_id)
        return request_id

    def _has_failed(self, client: CortexTrainingClient, request_id: str) -> bool:
        """Whether a request has failed, or was cancelled by the kill of the try that sent it: waiting for that would
        only cost another try. What can't be asked just now is found out by who waits.
        """
        try:
            reply = client.get_request_status(self.job_id, request_id, max_events=1)
        except CortexTrainingError:
            return False
        state = request_state(reply.get("status"))
        failed = is_terminal_request(state) and state != RequestState.DONE
        if failed:
            self.log.warning("request %s of an earlier try is %s: %s", request_id, state, reply.get("error") or "")
        return failed

    def _submit(self, client: CortexTrainingClient, record: DurableRecord) -> str | dict[str, Any]:
        intent = {"operation": self.operation, **self.intent(client, record)}
        record.write(job_id=self.job_id, **intent)
        try:
            answer = self.submit(client, intent)
        except (ApiError, SendRefused, ConfigurationError, TransportError) as error:
            if not isinstance(error, TransportError) or error.sent is False:
                # Not executed, provably: without this note the next try would have to take the intent for a sent call.
                record.update(ended="refused")
            raise
        if isinstance(answer, str):
            record.update(request_id=answer, started=time.time())
            self.log.info("%s is request %s of job %s", self.operation, answer, self.job_id)
        return answer

    def _complete(
        self, client: CortexTrainingClient, record: DurableRecord, request_id: str, wait_s: float, context: Context
    ) -> Any:
        try:
            result = client.poll_request(self.job_id, request_id, timeout_s=wait_s)
        except RequestFailed:
            # The next try may send it again: this is a confirmed end, not a lost answer.
            record.update(ended="failed")
            raise
        return self.finish(client, dict(result), context)

    def _failure(self, status: Status, request_id: str, event: Mapping[str, Any]) -> Exception:
        what = f"{self.operation}, request {request_id} of job {self.job_id}"
        error = str(event.get("error") or "no reason given")
        if status == Status.TIMEOUT:
            return self._too_late(request_id, self.time_limit_s(self.timeout_s))
        if status == Status.ENDED:
            return JobFailed(job_id=self.job_id, state=str(event.get("state") or "unknown"), reason=error)
        if status == Status.LOST:
            return AirflowFailException(
                f"{what}: the service does not know it (any more): {error} Whether it was executed is unknown, so it "
                "is not sent again; look at the job's checkpoints before you clear this task."
            )
        if status == Status.DENIED:
            return AirflowFailException(f"{what}: {error} Check connection {self.conn_id!r}.")
        return AirflowFailException(f"{what}: {error}")

    def _too_late(self, request_id: str, limit_s: float) -> DeadlineExceeded:
        return DeadlineExceeded(
            f"{self.operation}, request {request_id} of job {self.job_id}, did not end within {limit_s:.0f} s. It goes "
            "on at the service, and a retry waits for it again; raise timeout_s if such requests take longer.",
            timeout_s=limit_s,
        )

    def _trigger(
        self, record: DurableRecord, request_id: str, started: float, limit_s: float
    ) -> CortexTrainingRequestTrigger:
        now = time.time()
        return CortexTrainingRequestTrigger(
            target=self.target.to_kwargs(),
            job_id=self.job_id,
            request_id=request_id,
            operation=self.operation,
            started=started,
            not_before=now + DEFER_GRACE_S,
            deadline=now + limit_s,
            generation=record.generation,
            cancel_on_kill=self.cancel_on_kill,
        )

    def _cancel_request(self, request_id: object) -> None:
        if self.cancel_on_kill and isinstance(request_id, str) and request_id:
            with self.hook.get_conn() as client:
                _cancel_request_quietly(client, self.job_id, request_id, self.log)


@contextlib.contextmanager
def _final_with_its_job() -> Iterator[None]:
    """A job that ended does not come back, however often its request is asked for or sent."""
    try:
        yield
    except JobFailed as error:
        raise AirflowFailException(str(error)) from error


def _cancel_request_quietly(client: CortexTrainingClient, job_id: str, request_id: str, log: Any) -> None:
    try:
        client.cancel_request(job_id, request_id)
    except NotFoundError:
        return
    except CortexTrainingError as error:
        log.warning("could not cancel request %s of job %s: %s", request_id, job_id, error)


def _check_kwargs(trigger: CortexTrainingRequestTrigger) -> None:
    """A trigger that can't be stored must be found before something was sent, not after."""
    size = len(json.dumps(trigger.serialize()))
    if size > MAX_TRIGGER_BYTES:
        raise ValueError(
            f"the trigger of this task would store {size} bytes, {MAX_TRIGGER_BYTES} are allowed: shorten the "
            "connection id, database, schema or endpoint"
        )
