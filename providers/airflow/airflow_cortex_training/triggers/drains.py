"""Waiting until a sampling sub-job has nothing under way, to empty its prefix cache."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from airflow.triggers.base import BaseTrigger

from airflow_cortex_training.connection import Target
from airflow_cortex_training.hooks.cortex_training import CortexTrainingHook
from airflow_cortex_training.triggers.events import Status
from airflow_cortex_training.triggers.waiting import Outcome, Wait
from cortex_training.errors import ConflictError
from cortex_training.protocol.pace import Bounds
from cortex_training.states import is_terminal_job, job_state

if TYPE_CHECKING:
    from cortex_training.aio import AsyncCortexTrainingClient

SLICE_S = 30.0
"""For how long the service is asked to hold one answer back."""

_BOUNDS = Bounds(shortest_s=1.0, longest_s=5.0)


class CortexTrainingDrainTrigger(Wait, BaseTrigger):
    """Fires once when the service has emptied the cache, when the job ended, or at the deadline.

    The wait is the call itself: the service holds its answer back, and gives nothing to look at meanwhile. It is
    asked in slices, and the call may be repeated without harm, also by another triggerer.

    Args:
        sub_job_id: None: the job's first sampling sub-job.

    Other arguments as in `CortexTrainingRequestTrigger`.
    """

    def __init__(
        self,
        *,
        target: dict[str, str],
        job_id: str,
        sub_job_id: str | None,
        started: float,
        not_before: float,
        deadline: float,
        v: int = 4,
        **unknown: Any,
    ) -> None:
        super().__init__()
        self.target = target
        self.job_id = job_id
        self.sub_job_id = sub_job_id
        self.started = started
        self.not_before = not_before
        self.deadline = deadline
        self.v = v
        self.unknown = unknown
        self._request_id = ""

    async def outcome(self) -> Outcome:
        client = await CortexTrainingHook.for_target(Target(**self.target)).get_async_client(
            request_timeout=(15.0, SLICE_S + 30.0), max_retries=0
        )
        async with client:
            return await self.wait(lambda: self._ask(client), f"the sampling of job {self.job_id} to drain", _BOUNDS)

    def told(self, outcome: Outcome) -> dict[str, Any]:
        return {"job_id": self.job_id, "request_id": self._request_id, "state": outcome.state}

    async def _ask(self, client: AsyncCortexTrainingClient) -> Outcome | None:
        left_s = max(0.0, self.deadline - time.time())
        try:
            reply = await client.reset_prefix_cache(
                self.job_id, sub_job_id=self.sub_job_id, drain=True, timeout_s=min(SLICE_S, left_s)
            )
        except ConflictError as refusal:
            # Still sampling, unless the job is over.
            job = await client.get_job(self.job_id)
            if is_terminal_job(job.get("status")):
                return Outcome(Status.ENDED, job_state(job.get("status")), str(job.get("reason") or refusal))
            return None
        self._request_id = str(reply.get("request_id") or "")
        return Outcome(Status.SETTLED)
