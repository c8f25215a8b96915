"""Airflow's own deferral with nothing around it: what every deferrable operator pays. Found by the triggerer's path."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

from airflow.sdk import BaseOperator
from airflow.triggers.base import BaseTrigger, TriggerEvent


class BareTrigger(BaseTrigger):
    """Fires at `moment`, in UTC epoch seconds."""

    def __init__(self, moment: float) -> None:
        super().__init__()
        self.moment = moment

    def serialize(self) -> tuple[str, dict[str, Any]]:
        return "airflow_bare.BareTrigger", {"moment": self.moment}

    async def run(self) -> AsyncIterator[TriggerEvent]:
        await asyncio.sleep(max(0.0, self.moment - time.time()))
        yield TriggerEvent({})
        return


class BareOperator(BaseOperator):
    """Defers for `wait_s` seconds and ends."""

    def __init__(self, *, wait_s: float, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.wait_s = wait_s

    def execute(self, context: Any) -> None:
        self.defer(trigger=BareTrigger(time.time() + self.wait_s), method_name="resume")

    def resume(self, context: Any, event: Any = None) -> None:
        return None
