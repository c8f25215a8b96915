"""Waiting for cancelled jobs to end."""

from __future__ import annotations

from typing import Any

from airflow.triggers.base import BaseTrigger

from airflow_cortex_training.connection import Target
from airflow_cortex_training.triggers.events import Status
from airflow_cortex_training.triggers.hub import PollHub, open_hub
from airflow_cortex_training.triggers.waiting import Outcome, Wait
from cortex_training.errors import NotFoundError
from cortex_training.protocol.pace import Bounds
from cortex_training.states import is_terminal_job

_BOUNDS = Bounds(shortest_s=1.0, longest_s=10.0)


class CortexTrainingJobEndsTrigger(Wait, BaseTrigger):
    """Fires once when all of `job_ids` have ended, or are unknown to the service, or at the deadline. It only reads.

    Args:
        job_ids: what is waited for.
        cancelled: told in the event as it is: the ids that the task reports at its end.

    Other arguments as in `CortexTrainingRequestTrigger`.
    """

    def __init__(
        self,
        *,
        target: dict[str, str],
        job_ids: list[str],
        cancelled: list[str],
        started: float,
        not_before: float,
        deadline: float,
        v: int = 3,
        **unknown: Any,
    ) -> None:
        super().__init__()
        self.target = target
        self.job_ids = job_ids
        self.cancelled = cancelled
        self.started = started
        self.not_before = not_before
        self.deadline = deadline
        self.v = v
        self.unknown = unknown
        self._alive = list(job_ids)

    async def outcome(self) -> Outcome:
        async with open_hub(Target(**self.target)) as hub:
            return await self.wait(lambda: self._look(hub), f"the end of {', '.join(self.job_ids)}", _BOUNDS)

    def told(self, outcome: Outcome) -> dict[str, Any]:
        return {"job_ids": self.job_ids, "cancelled": self.cancelled, "alive": self._alive}

    async def _look(self, hub: PollHub) -> Outcome | None:
        self._alive = [job_id for job_id in self._alive if not await _has_ended(hub, job_id)]
        return None if self._alive else Outcome(Status.ENDED)


async def _has_ended(hub: PollHub, job_id: str) -> bool:
    try:
        return is_terminal_job((await hub.job(job_id)).get("status"))
    except NotFoundError:
        return True
