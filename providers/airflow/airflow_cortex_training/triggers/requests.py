"""Waiting for a request of a running job."""

from __future__ import annotations

import contextlib
from typing import Any

from airflow.triggers.base import BaseTrigger

from airflow_cortex_training.connection import Target
from airflow_cortex_training.hooks.cortex_training import CortexTrainingHook
from airflow_cortex_training.triggers import kill
from airflow_cortex_training.triggers.events import Status
from airflow_cortex_training.triggers.hub import PollHub, open_hub
from airflow_cortex_training.triggers.waiting import Outcome, Wait
from cortex_training.errors import ApiError, ConflictError, NotFoundError
from cortex_training.protocol.pace import Bounds
from cortex_training.protocol.polling import POLL_REFUSALS
from cortex_training.states import RequestState, is_terminal_job, is_terminal_request, job_state, request_state

_BOUNDS = Bounds(shortest_s=1.0, longest_s=15.0)
STREAMING_OPERATIONS = frozenset({"generate-stream"})


class CortexTrainingRequestTrigger(Wait, BaseTrigger):
    """Fires once when a request has its result or error, when its job ended, or at the deadline. It only reads.

    Args:
        target: `Target.to_kwargs`.
        operation: what was submitted, e.g. ``step``; requests of one operation on one job share what is known of
            their durations. ``generate-stream`` is refused: a poll takes events away from whoever reads the stream.
        started, not_before, deadline: UTC epoch seconds: when it was submitted, when an event may be fired, when to
            give up.
        generation: of the task instance, see `durable`.
        cancel_on_kill: whether the request is cancelled when a user ends the task.
        v: version of these arguments.
    """

    def __init__(
        self,
        *,
        target: dict[str, str],
        job_id: str,
        request_id: str,
        operation: str,
        started: float,
        not_before: float,
        deadline: float,
        generation: list[int],
        cancel_on_kill: bool = False,
        v: int = 1,
        **unknown: Any,
    ) -> None:
        super().__init__()
        self.target = target
        self.job_id = job_id
        self.request_id = request_id
        self.operation = operation
        self.started = started
        self.not_before = not_before
        self.deadline = deadline
        self.generation = generation
        self.cancel_on_kill = cancel_on_kill
        self.v = v
        self.unknown = unknown

    async def outcome(self) -> Outcome:
        if self.operation in STREAMING_OPERATIONS:
            return Outcome(Status.REFUSED, error=f"{self.operation} can't be waited for here: {_STREAMS}")
        async with open_hub(Target(**self.target)) as hub:
            what = f"{self.operation} request {self.request_id} of job {self.job_id}"
            durations = hub.durations_of(self.job_id, self.operation)
            return await self.wait(lambda: self._look(hub), what, _BOUNDS, durations)

    def told(self, outcome: Outcome) -> dict[str, Any]:
        return {"job_id": self.job_id, "request_id": self.request_id, "state": outcome.state}

    async def _look(self, hub: PollHub) -> Outcome | None:
        from airflow_cortex_training.triggers.session import ReplyTooLarge

        try:
            reply = await hub.request_status(self.job_id, self.request_id)
        except ReplyTooLarge:
            # Only a finished request has so much to say. What it says is for the worker.
            return Outcome(Status.SETTLED)
        except ApiError as refusal:
            if refusal.status not in POLL_REFUSALS:
                raise
            # Polls are served while the job runs; if it does not, that is the answer.
            job = await hub.job(self.job_id)
            if is_terminal_job(job.get("status")):
                return Outcome(Status.ENDED, job_state(job.get("status")), str(job.get("reason") or refusal))
            if refusal.status != 409:
                raise
            return None
        state = request_state(reply.get("status"))
        if state == RequestState.STREAMING:
            return Outcome(Status.REFUSED, state, f"request {self.request_id} streams: {_STREAMS}")
        return Outcome(Status.SETTLED, state) if is_terminal_request(state) else None

    async def on_kill(self) -> None:
        if self.cancel_on_kill:
            await kill.unbroken(self._cancel())

    async def _cancel(self) -> None:
        if not await kill.may_cancel(self.task_instance, self.request_id, self.generation):
            return
        # A client of its own: cleanup has run by now, and the hub only reads.
        client = await CortexTrainingHook.for_target(Target(**self.target)).get_async_client()
        async with client:
            # It may have ended since.
            with contextlib.suppress(NotFoundError, ConflictError):
                await client.cancel_request(self.job_id, self.request_id)
        self.log.info("cancelled request %s of job %s: its task was ended by a user", self.request_id, self.job_id)


_STREAMS = "a poll would take its events away from the reader; use generate without streaming"
