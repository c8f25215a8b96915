"""torch's process-wide settings."""

from __future__ import annotations

import os

import torch

# cuBLAS repeats its results bit for bit only with a workspace of its own; read when CUDA starts.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


def prepare_process(threads: int) -> None:
    """Called by each worker thread before it computes, because the number of threads is partly a thread's own."""
    torch.set_num_threads(threads)
    # Two runs with the same seeds give the same bits, or torch says which operation cannot.
    torch.use_deterministic_algorithms(True, warn_only=True)


def machine_device() -> torch.device:
    """Where models live: the first CUDA GPU if there is one, else the CPU."""
    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
