"""What a failed command says, on standard error, and its exit code."""

from __future__ import annotations

import sys
import traceback

from cortex_training.errors import ApiError, CortexTrainingError

_MAX_BODY = 4000


class NoConnection(CortexTrainingError):
    """Nothing says which service to talk to."""


def explain(error: Exception) -> int:
    """Print what went wrong and return the exit code."""
    if isinstance(error, CortexTrainingError | OSError | ValueError | RuntimeError):
        print(f"error: {error}", file=sys.stderr)
    elif isinstance(error, ModuleNotFoundError):
        print(f"error: this command needs the Python module {error.name}, which is not installed", file=sys.stderr)
    else:
        # A defect of ours: the trace is what a report needs, and it must not pass for an answer of the service.
        traceback.print_exc()
        print(f"error: {type(error).__name__}: {error}", file=sys.stderr)
    if isinstance(error, ApiError):
        if error.request_id:
            print(f"snowflake request id: {error.request_id}", file=sys.stderr)
        body = error.response.text if error.response is not None else ""
        if body.strip():
            print(f"response body: {body.strip()[:_MAX_BODY]}", file=sys.stderr)
    return 2 if isinstance(error, NoConnection) else 1
