"""Child processes that end when the demo ends, whatever way it ends."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess


def clean_environment() -> dict[str, str]:
    """This process's environment without what would slow a child down or send it elsewhere.

    A switched-off bytecode cache costs every child that imports transformers ten seconds.
    """
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONDONTWRITEBYTECODE", "OPENBLAS_NUM_THREADS")}
    return environment | {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}


def stop_group(process: subprocess.Popen[str], *, patience_s: float = 10.0) -> None:
    """End a process that leads a session, and everything it started: TERM to the group, then KILL."""
    for sign in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, sign)
        try:
            process.wait(patience_s)
        except subprocess.TimeoutExpired:
            continue
        break
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
