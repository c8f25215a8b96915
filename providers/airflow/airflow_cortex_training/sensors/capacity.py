"""Waiting for GPUs before asking for a job that would only be pending."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from airflow.sdk.exceptions import AirflowFailException

from airflow_cortex_training.capacity import Enough, enough
from airflow_cortex_training.hooks.cortex_training import CortexTrainingHook
from airflow_cortex_training.operators.base import with_fields
from airflow_cortex_training.sensors.base import CortexTrainingSensor
from airflow_cortex_training.triggers.capacity import CortexTrainingCapacityTrigger
from cortex_training.config import Hardware
from cortex_training.errors import ConfigurationError

if TYPE_CHECKING:
    from cortex_training.client import CortexTrainingClient


class CortexTrainingCapacitySensor(CortexTrainingSensor):
    """Waits until so many GPUs of a hardware type are free.

    That is a look, not a reservation: somebody else may take them first, and the job that is created then is pending
    like any other. When the service tells nothing about capacity the sensor warns and succeeds; when the account may
    never have so many GPUs the task fails for good.

    Args:
        gpus: how many, at least 1.
        hardware: ``H200``, ``B200`` or ``B300``; None: the connection's, else all together.
        conn_id, database, schema, endpoint, deferrable, inline_s: see `CortexTrainingSensor`.

    Returns (XCom): ``hardware``, ``available_gpus`` (None when the service does not tell).
    """

    template_fields = (*CortexTrainingSensor.template_fields, "gpus", "hardware")

    def __init__(self, *, gpus: int, hardware: str | None = None, **kwargs: Any) -> None:
        super().__init__(**with_fields(kwargs))
        self.gpus = gpus
        self.hardware = hardware

    def check(self) -> None:
        try:
            self.gpus = int(self.gpus)
        except (TypeError, ValueError):
            self.gpus = 0
        if self.gpus < 1:
            raise ConfigurationError.of(f"task {self.task_id}: gpus", self.gpus, "give a whole number, at least 1")
        if not self.hardware:
            self.hardware = CortexTrainingHook.for_target(self.target).settings().hardware
        if self.hardware and self.hardware not in set(Hardware):
            known = ", ".join(Hardware)
            raise ConfigurationError.of(f"task {self.task_id}: hardware", self.hardware, f"use one of {known}")

    def look(self, source: CortexTrainingClient) -> dict[str, Any] | None:
        capacity = source.get_capacity(self.hardware)
        verdict = enough(capacity, self.gpus)
        if verdict == Enough.NEVER:
            raise AirflowFailException(f"{self.awaited()}: the account has {capacity['max_total_gpus']} at most")
        if verdict == Enough.NOT_NOW:
            self.log.info("%d of %s GPUs are free", capacity["available_gpus"], self.gpus)
            return None
        return self._told(None if verdict == Enough.UNKNOWN else capacity["available_gpus"])

    def trigger(self, *, started: float, not_before: float, deadline: float) -> CortexTrainingCapacityTrigger:
        return CortexTrainingCapacityTrigger(
            target=self.target.to_kwargs(),
            gpus=self.gpus,
            hardware=self.hardware,
            started=started,
            not_before=not_before,
            deadline=deadline,
        )

    def concluded(self, event: dict[str, Any]) -> dict[str, Any]:
        self.hardware = event.get("hardware") or self.hardware
        return self._told(event.get("available_gpus"))

    def ids(self) -> dict[str, Any]:
        return {"hardware": self.hardware}

    def awaited(self) -> str:
        return f"{self.gpus} free GPUs of {self.hardware or 'any hardware'}"

    def _told(self, available: int | None) -> dict[str, Any]:
        if available is None:
            self.log.warning("the service tells nothing about capacity; going on without waiting for it")
        return {"hardware": self.hardware, "available_gpus": available}
