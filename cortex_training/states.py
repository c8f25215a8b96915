"""States of jobs and requests, read from whatever spelling the service uses.

The service answers ``running``, ``JOB_STATE_RUNNING`` or, for a value its gateway does not know, a number or null.
"""

from __future__ import annotations

from enum import StrEnum


class JobState(StrEnum):
    PENDING = "pending"
    PLACING = "placing"
    INITIALIZING = "initializing"
    RUNNING = "running"
    CANCELLING = "cancelling"
    CANCELLED = "cancelled"
    TERMINATED = "terminated"
    FAILED = "failed"
    DONE = "done"
    UNKNOWN = "unknown"


class RequestState(StrEnum):
    PENDING = "pending"
    RUNNING = "running"
    STREAMING = "streaming"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"
    UNKNOWN = "unknown"


TERMINAL_JOB_STATES: frozenset[str] = frozenset(
    {JobState.CANCELLED, JobState.TERMINATED, JobState.FAILED, JobState.DONE}
)
TERMINAL_REQUEST_STATES: frozenset[str] = frozenset({RequestState.DONE, RequestState.FAILED, RequestState.CANCELLED})

_SAME_JOB_STATE = {"canceled": "cancelled", "canceling": "cancelling", "completed": "done", "succeeded": "done"}
_SAME_REQUEST_STATE = {"completed": "done", "succeeded": "done", "canceled": "cancelled"}


def _normalise(raw: object, prefix: str, same: dict[str, str]) -> str:
    if not isinstance(raw, str) or not raw.strip():
        # A gateway that does not know an enum value sends its number, or null: it is some state, and not a terminal
        # one we know.
        return "unknown"
    text = raw.strip().lower().removeprefix(prefix)
    return same.get(text, text)


def job_state(raw: object) -> str:
    """The `JobState` value `raw` stands for; a spelling nobody knows is returned in lower case, anything else is
    ``unknown``.
    """
    return _normalise(raw, "job_state_", _SAME_JOB_STATE)


def request_state(raw: object) -> str:
    """The `RequestState` value `raw` stands for; a spelling nobody knows is returned in lower case, anything else is
    ``unknown``.
    """
    return _normalise(raw, "request_state_", _SAME_REQUEST_STATE)


def is_terminal_job(raw: object) -> bool:
    """True when a job in this state will never run (again)."""
    return job_state(raw) in TERMINAL_JOB_STATES


def is_terminal_request(raw: object) -> bool:
    """True when a request in this state has its final result or error."""
    return request_state(raw) in TERMINAL_REQUEST_STATES
