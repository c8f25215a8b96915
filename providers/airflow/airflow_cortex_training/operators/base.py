"""What every operator of this provider has: a connection, a durable record, and failures that say what to do next."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from airflow.sdk import BaseOperator
from airflow.sdk.configuration import conf

from airflow_cortex_training.connection import Target
from airflow_cortex_training.hooks.cortex_training import CortexTrainingHook
from cortex_training.errors import ConfigurationError

DEFER_GRACE_S = 10.0
"""A trigger emits nothing earlier than this after the deferral: Airflow 3.3 may take an event that overtakes the end of
the first leg for a lost task and fail it."""

INLINE_S = 12.0
"""How long a worker looks by itself before it defers."""

BACKSTOP_S = 900.0
"""Airflow's own limit of a deferral is so much later than the trigger's deadline; it is for the night no triggerer
runs."""


def default_deferrable() -> bool:
    """Airflow's own setting, ``[operators] default_deferrable``."""
    return bool(conf.getboolean("operators", "default_deferrable", fallback=False))


class CortexTrainingOperator(BaseOperator):
    """An operator that calls Cortex Training.

    Args:
        conn_id: connection of type ``cortex_training``.
        database, schema, endpoint: used instead of the connection's own.
    """

    template_fields: Sequence[str] = ("conn_id", "database", "schema", "endpoint")
    ui_color = "#dff3fb"
    ui_fgcolor = "#0b3d4f"

    def __init__(
        self,
        *,
        conn_id: str = CortexTrainingHook.default_conn_name,
        database: str | None = None,
        schema: str | None = None,
        endpoint: str | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.conn_id = conn_id
        self.database = database
        self.schema = schema
        self.endpoint = endpoint

    @property
    def target(self) -> Target:
        return Target(self.conn_id, self.database, self.schema, self.endpoint)

    @property
    def hook(self) -> CortexTrainingHook:
        return CortexTrainingHook.for_target(self.target)

    def time_limit_s(self, timeout_s: float) -> float:
        """`timeout_s`, or less when ``execution_timeout`` is shorter: Airflow itself does not enforce that one over a
        deferral."""
        limit = self.execution_timeout
        return min(timeout_s, limit.total_seconds()) if isinstance(limit, timedelta) else timeout_s


def with_fields(arguments: dict[str, Any]) -> dict[str, Any]:
    """Arguments of an operator whose result is a dict: each of its fields becomes an XCom of its own, so that other
    tasks can refer to ``task.output["field"]``."""
    return {"multiple_outputs": True, **arguments}


def require_text(owner: BaseOperator, name: str, value: object) -> str:
    """`value` as non-empty text, or a `ConfigurationError` naming the task, the argument and the usual cause."""
    if isinstance(value, str) and value.strip():
        return value.strip()
    raise ConfigurationError.of(
        f"task {owner.task_id}: {name}",
        value,
        "give an id; an empty one usually is the XCom of a task that did not run",
    )
