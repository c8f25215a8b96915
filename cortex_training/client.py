"""The client on `requests`: one thread-safe session, the flows of `cortex_training.protocol` driven by blocking
calls.
"""

from __future__ import annotations


class CortexTrainingClient:
    """Skeleton under construction: constructor and methods follow docs/architecture.md."""
