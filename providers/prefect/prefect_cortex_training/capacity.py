"""Whether there are enough GPUs, of what the service tells about an account's capacity."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cortex_training.errors import ConfigurationError

_COUNTS = ("max_total_gpus", "reserved_gpus", "in_use_gpus", "pending_gpus", "available_gpus")


def free_gpus(capacity: Mapping[str, Any], gpus: int) -> int | None:
    """How many GPUs are free once `gpus` could be had, -1 for no limit; None while they could not.

    An answer of nothing but zeros means that nothing is known, and waiting for it would have no end: then it is 0.
    Raises ConfigurationError when the account may never use so many.
    """
    limit, free = int(capacity["max_total_gpus"]), int(capacity["available_gpus"])
    if limit < 0:
        return -1
    if free >= gpus or tells_nothing(capacity):
        return free
    if 0 < limit < gpus:
        raise ConfigurationError.of("gpus", gpus, f"the account may use {limit} at most")
    return None


def tells_nothing(capacity: Mapping[str, Any]) -> bool:
    """Whether the answer holds nothing but zeros: only asking for a job would find out."""
    return not capacity["has_reservation"] and not any(capacity[count] for count in _COUNTS)
