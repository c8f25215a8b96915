"""What a trigger tells the worker leg that follows it: ids, a reason code, a few words. No result, no secret."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Any

EVENT_VERSION = 1
MAX_ERROR_CHARS = 400


class Status(StrEnum):
    SETTLED = "settled"
    """The request has its result or its error; the worker fetches it."""
    RUNNING = "running"
    """The job runs."""
    ENDED = "ended"
    """The job ended, so what was waited for will not come."""
    TIMEOUT = "timeout"
    """The absolute deadline passed."""
    DENIED = "denied"
    """The service refused the credential, also after the connection was read again."""
    LOST = "lost"
    """The service does not know the id (any more)."""
    REFUSED = "refused"
    """What was asked for can't be waited for in this way."""
    AVAILABLE = "available"
    """There are enough GPUs, or the service does not tell."""
    PUBLISHED = "published"
    """What was waited for is the latest publication."""
    TRAINED = "trained"
    """A training run reached its end."""
    FAILED = "failed"
    """A training run can't go on by itself."""


def event(status: Status, *, error: str = "", **fields: Any) -> dict[str, Any]:
    """The payload of a trigger's one event. It is stored in plain text and logged, so it stays small."""
    payload = {"v": EVENT_VERSION, "status": status.value, **fields}
    if error:
        payload["error"] = error if len(error) <= MAX_ERROR_CHARS else error[: MAX_ERROR_CHARS - 1] + "…"
    return payload


def is_of_another_wait(told: Mapping[str, Any], **awaited: Any) -> bool:
    """Whether an event names other ids than the ones its receiver waits for.

    Airflow delivers an event by the id of the trigger's row. SQLite gives the id of a deleted row to the next one: when
    a deferred task is cleared and defers again at once, the triggerer takes the new trigger for the old one, which
    still runs there, and the old one's event resumes the new try. No event at all is of no other wait.
    """
    return bool(told) and any(value and told.get(name) != value for name, value in awaited.items())
