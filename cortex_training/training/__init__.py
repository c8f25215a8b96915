"""The durable training run: one engine for a worker, the triggerer, a flow and the command line."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cortex_training.training.divergence import Divergence
    from cortex_training.training.journal import Superseded
    from cortex_training.training.loop import run
    from cortex_training.training.plan import TrainingPlan
    from cortex_training.training.progress import Progress, RunFailed, RunInterrupted, TrainingResult
    from cortex_training.training.schedule import LearningRate
    from cortex_training.training.teardown import RunStatus, cancel_jobs, end_run, other_driver, status

_HOMES = {
    "Divergence": "divergence",
    "LearningRate": "schedule",
    "Progress": "progress",
    "RunFailed": "progress",
    "RunInterrupted": "progress",
    "RunStatus": "teardown",
    "Superseded": "journal",
    "TrainingPlan": "plan",
    "TrainingResult": "progress",
    "cancel_jobs": "teardown",
    "end_run": "teardown",
    "other_driver": "teardown",
    "run": "loop",
    "status": "teardown",
}

__all__ = [
    "Divergence",
    "LearningRate",
    "Progress",
    "RunFailed",
    "RunInterrupted",
    "RunStatus",
    "Superseded",
    "TrainingPlan",
    "TrainingResult",
    "cancel_jobs",
    "end_run",
    "other_driver",
    "run",
    "status",
]


def __getattr__(name: str) -> Any:
    # Operators import plans when a DAG file is parsed; the engine's imports (numpy, the dataset reader) wait until a
    # run starts.
    if name in _HOMES:
        return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
