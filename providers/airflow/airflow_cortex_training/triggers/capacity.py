"""Waiting for free GPUs."""

from __future__ import annotations

from typing import Any

from airflow.triggers.base import BaseTrigger

from airflow_cortex_training.capacity import Enough, enough
from airflow_cortex_training.connection import Target
from airflow_cortex_training.triggers.events import Status
from airflow_cortex_training.triggers.hub import PollHub, open_hub
from airflow_cortex_training.triggers.waiting import Outcome, Wait
from cortex_training.protocol.pace import Bounds

_BOUNDS = Bounds(shortest_s=5.0, longest_s=60.0)


class CortexTrainingCapacityTrigger(Wait, BaseTrigger):
    """Fires once when `gpus` GPUs of `hardware` are free, when the service tells nothing, or at the deadline.

    It only reads. Other arguments as in `CortexTrainingRequestTrigger`.
    """

    def __init__(
        self,
        *,
        target: dict[str, str],
        gpus: int,
        hardware: str | None,
        started: float,
        not_before: float,
        deadline: float,
        v: int = 2,
        **unknown: Any,
    ) -> None:
        super().__init__()
        self.target = target
        self.gpus = gpus
        self.hardware = hardware
        self.started = started
        self.not_before = not_before
        self.deadline = deadline
        self.v = v
        self.unknown = unknown
        self._available: int | None = None

    async def outcome(self) -> Outcome:
        what = f"{self.gpus} GPUs of {self.hardware or 'any hardware'}"
        async with open_hub(Target(**self.target)) as hub:
            return await self.wait(lambda: self._look(hub), what, _BOUNDS)

    def told(self, outcome: Outcome) -> dict[str, Any]:
        return {"hardware": self.hardware, "available_gpus": self._available}

    async def _look(self, hub: PollHub) -> Outcome | None:
        capacity = await hub.capacity(self.hardware)
        verdict = enough(capacity, self.gpus)
        if verdict == Enough.NEVER:
            most = capacity["max_total_gpus"]
            return Outcome(Status.REFUSED, error=f"{self.gpus} GPUs are wanted, the account has {most} at most")
        if verdict == Enough.NOT_NOW:
            return None
        self._available = None if verdict == Enough.UNKNOWN else int(capacity["available_gpus"])
        return Outcome(Status.AVAILABLE)
