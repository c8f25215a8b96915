"""Client, durable training runs and a local service for Snowflake Cortex Training.

Names are imported on first use (PEP 562): `import cortex_training` costs next to nothing, because pipeline files that
an orchestrator parses every few seconds import it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOME = {
    "CortexTrainingClient": "client",
    "AsyncCortexTrainingClient": "aio",
    "CheckpointType": "config",
    "Hardware": "config",
    "InferenceConfig": "config",
    "JobType": "config",
    "SubJobConfig": "config",
    "TrainingConfig": "config",
    "JobState": "states",
    "RequestState": "states",
    "ApiError": "errors",
    "AuthError": "errors",
    "ChunkGroupConflictError": "errors",
    "ChunkGroupError": "errors",
    "ChunkGroupRestartError": "errors",
    "ConfigurationError": "errors",
    "ConflictError": "errors",
    "CortexTrainingError": "errors",
    "DatabaseNotCreated": "errors",
    "DeadlineExceeded": "errors",
    "JobFailed": "errors",
    "NotFoundError": "errors",
    "OutcomeUnknown": "errors",
    "ProtocolError": "errors",
    "RateLimitedError": "errors",
    "RequestFailed": "errors",
    "SendRefused": "errors",
    "ServiceError": "errors",
    "TransportError": "errors",
    "build_forward_backward_kwargs": "payloads",
    "build_forward_backward_payload": "payloads",
    "serialize_forward_backward_args": "payloads",
    "TrainingPlan": "training",
}
_SUBMODULES = frozenset({"wire", "payloads", "peft", "identity", "errors", "states", "config"})

__all__ = [*_HOME, "wire", "__version__"]

if TYPE_CHECKING:
    from cortex_training.aio import AsyncCortexTrainingClient as AsyncCortexTrainingClient
    from cortex_training.client import CortexTrainingClient as CortexTrainingClient
    from cortex_training.config import CheckpointType as CheckpointType
    from cortex_training.config import Hardware as Hardware
    from cortex_training.config import InferenceConfig as InferenceConfig
    from cortex_training.config import JobType as JobType
    from cortex_training.config import SubJobConfig as SubJobConfig
    from cortex_training.config import TrainingConfig as TrainingConfig


def __getattr__(name: str) -> Any:
    if name in _HOME:
        value = getattr(importlib.import_module(f"cortex_training.{_HOME[name]}"), name)
        globals()[name] = value
        return value
    if name in _SUBMODULES:
        return importlib.import_module(f"cortex_training.{name}")
    raise AttributeError(f"module 'cortex_training' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME, *_SUBMODULES})
