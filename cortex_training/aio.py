"""The client on aiohttp: one shared session, the flows of `cortex_training.protocol` driven by coroutines."""

from __future__ import annotations


class AsyncCortexTrainingClient:
    """Skeleton under construction: constructor and methods follow docs/architecture.md."""
