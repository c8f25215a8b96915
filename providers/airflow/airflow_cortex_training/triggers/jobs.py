"""Waiting for a job to run."""

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
from cortex_training.errors import ConflictError, NotFoundError
from cortex_training.protocol.pace import Bounds
from cortex_training.states import JobState, is_terminal_job, job_state

_BOUNDS = Bounds(shortest_s=2.0, longest_s=20.0)


class CortexTrainingJobTrigger(Wait, BaseTrigger):
    """Fires once when a job runs, when it ended, or at the deadline.

    It cancels the job only for a task that owns it, and only when a user ends that task: `cancel_on_kill` and
    `generation`. Arguments as in `CortexTrainingRequestTrigger`.
    """

    def __init__(
        self,
        *,
        target: dict[str, str],
        job_id: str,
        started: float,
        not_before: float,
        deadline: float,
        generation: list[int] | None = None,
        cancel_on_kill: bool = False,
        v: int = 2,
        **unknown: Any,
    ) -> None:
        super().__init__()
        self.target = target
        self.job_id = job_id
        self.started = started
        self.not_before = not_before
        self.deadline = deadline
        self.generation = generation
        self.cancel_on_kill = cancel_on_kill
        self.v = v
        self.unknown = unknown

    async def outcome(self) -> Outcome:
        async with open_hub(Target(**self.target)) as hub:
            return await self.wait(lambda: self._look(hub), f"job {self.job_id}", _BOUNDS)

    def told(self, outcome: Outcome) -> dict[str, Any]:
        return {"job_id": self.job_id, "state": outcome.state}

    async def _look(self, hub: PollHub) -> Outcome | None:
        job = await hub.job(self.job_id)
        state = job_state(job.get("status"))
        if state == JobState.RUNNING:
            return Outcome(Status.RUNNING, state)
        if is_terminal_job(state):
            return Outcome(Status.ENDED, state, str(job.get("reason") or ""))
        return None

    async def on_kill(self) -> None:
        if self.cancel_on_kill:
            await kill.unbroken(self._cancel())

    async def _cancel(self) -> None:
        if not await kill.may_cancel(self.task_instance, self.job_id, self.generation or []):
            return
        # A client of its own: cleanup has run by now, and the hub only reads.
        client = await CortexTrainingHook.for_target(Target(**self.target)).get_async_client()
        async with client:
            with contextlib.suppress(NotFoundError, ConflictError):
                await client.cancel_job(self.job_id)
        self.log.info("cancelled job %s: its task was ended by a user", self.job_id)
