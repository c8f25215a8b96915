"""Whether there are enough GPUs, of what the service tells about an account's capacity."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Any


class Enough(StrEnum):
    YES = "yes"
    NOT_NOW = "not now"
    NEVER = "never"
    """More than the account may ever have."""
    UNKNOWN = "unknown"
    """The service tells nothing; the only way to find out is to ask for a job."""


def enough(capacity: Mapping[str, Any], gpus: int) -> Enough:
    """Whether `gpus` GPUs could be had now. An answer of nothing but zeros means that nothing is known."""
    limit = int(capacity.get("max_total_gpus") or 0)
    available = int(capacity.get("available_gpus") or 0)
    if limit < 0:
        return Enough.YES
    counts = ("max_total_gpus", "reserved_gpus", "in_use_gpus", "pending_gpus", "available_gpus")
    if not capacity.get("has_reservation") and not any(capacity.get(name) for name in counts):
        return Enough.UNKNOWN
    if available >= gpus:
        return Enough.YES
    return Enough.NEVER if 0 < limit < gpus else Enough.NOT_NOW
