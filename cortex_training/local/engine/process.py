"""torch's process-wide settings."""

from __future__ import annotations

import torch


def prepare_process(threads: int) -> None:
    """Called by each worker thread before it computes, because the number of threads is partly a thread's own."""
    torch.set_num_threads(threads)
    # Two runs with the same seeds give the same bits, or torch says which operation cannot.
    torch.use_deterministic_algorithms(True, warn_only=True)
