"""Waiting for a job to run."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from airflow.triggers.base import BaseTrigger, TriggerEvent

from airflow_cortex_training.connection import Target
from airflow_cortex_training.triggers.events import Status, event
from airflow_cortex_training.triggers.hub import PollHub, open_hub
from airflow_cortex_training.triggers.waiting import TRIGGER_VERSION, Outcome, check_version, sleep_until, wait_for
from cortex_training.protocol.pace import Bounds
from cortex_training.states import JobState, is_terminal_job, job_state

_BOUNDS = Bounds(shortest_s=2.0, longest_s=20.0)


class CortexTrainingJobTrigger(BaseTrigger):
    """Fires once when a job runs, when it ended, or at the deadline.

    It owns no job and cancels none. Arguments as in `CortexTrainingRequestTrigger`.
    """

    def __init__(
        self,
        *,
        target: dict[str, str],
        job_id: str,
        started: float,
        not_before: float,
        deadline: float,
        v: int = TRIGGER_VERSION,
        **unknown: Any,
    ) -> None:
        super().__init__()
        self.target = target
        self.job_id = job_id
        self.started = started
        self.not_before = not_before
        self.deadline = deadline
        self.v = v
        self.unknown = unknown

    def serialize(self) -> tuple[str, dict[str, Any]]:
        return (
            f"{self.__class__.__module__}.{self.__class__.__qualname__}",
            {
                "v": self.v,
                "target": self.target,
                "job_id": self.job_id,
                "started": self.started,
                "not_before": self.not_before,
                "deadline": self.deadline,
                **self.unknown,
            },
        )

    async def run(self) -> AsyncIterator[TriggerEvent]:
        check_version(self, self.v, self.unknown)
        async with open_hub(Target(**self.target)) as hub:
            outcome = await wait_for(
                lambda: self._look(hub),
                what=f"job {self.job_id}",
                started=self.started,
                deadline=self.deadline,
                bounds=_BOUNDS,
                log=self.log,
            )
        await sleep_until(self.not_before)
        yield TriggerEvent(event(outcome.status, job_id=self.job_id, state=outcome.state, error=outcome.error))
        return

    async def _look(self, hub: PollHub) -> Outcome | None:
        job = await hub.job(self.job_id)
        state = job_state(job.get("status"))
        if state == JobState.RUNNING:
            return Outcome(Status.RUNNING, state)
        if is_terminal_job(state):
            return Outcome(Status.ENDED, state, str(job.get("reason") or ""))
        return None
