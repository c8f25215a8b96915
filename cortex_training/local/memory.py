"""How much memory this process holds, in bytes."""

from __future__ import annotations

import resource
import sys
import time
from dataclasses import dataclass
from pathlib import Path

_PAGES = Path("/proc/self/statm")


def memory() -> dict[str, int]:
    """Now (`cpu_peak`, as the service calls it) and at most so far, which stands for a GPU's (`gpu_peak`)."""
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # Linux counts in KiB, macOS in bytes.
    most = most if sys.platform == "darwin" else most * 1024
    now = int(_PAGES.read_text().split()[1]) * resource.getpagesize() if _PAGES.exists() else most
    return {"gpu_peak": most, "cpu_peak": now}


@dataclass(frozen=True)
class Moment:
    """An allocator event: what `memory` said when something began or ended, in Unix seconds."""

    event: str
    at: float
    memory: dict[str, int]


def moment(event: str) -> Moment:
    return Moment(event, time.time(), memory())
