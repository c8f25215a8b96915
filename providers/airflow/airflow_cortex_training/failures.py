"""Failures that say what to do next: what a retry can't mend fails a task for good, and every message names its job,
its request, and the service's own request id, so that whoever is woken by it need not look for them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from airflow.sdk.exceptions import AirflowFailException

from cortex_training.errors import (
    ApiError,
    AuthError,
    ConfigurationError,
    CortexTrainingError,
    JobFailed,
    NotFoundError,
    RequestFailed,
)

if TYPE_CHECKING:
    from airflow.sdk import Context

    from cortex_training.client import CortexTrainingClient

PERMANENT = (ConfigurationError, AuthError, NotFoundError)
MALFORMED = (400, 422)
"""What the service answers to a call that it does not understand or that asks for what it does not have."""

MAX_MESSAGE_CHARS = 1000

Names = Callable[[], Mapping[str, str]]


def _nothing() -> Mapping[str, str]:
    return {}


@contextlib.contextmanager
def clear_failures(client: CortexTrainingClient | None = None, names: Names = _nothing) -> Iterator[None]:
    """Turn errors that a retry cannot mend into `AirflowFailException`; to the others add error lines of the job's log.

    `names` gives what a message must name, e.g. ``{"job": ..., "request": ...}``; what it does not name yet is added.
    The tail of the job's log is asked for only when the job or a request failed, once, and never hides the failure.
    """
    try:
        yield
    except PERMANENT as error:
        raise AirflowFailException(_naming(str(error), names())) from error
    except (JobFailed, RequestFailed) as error:
        words = _last_words(client, error.job_id) if client is not None else ""
        text = _naming(str(error), names())
        _reword(error, f"{text}\nLast error lines of the job's log:\n{words}" if words else text)
        raise
    except CortexTrainingError as error:
        text = _naming(str(error), names())
        if isinstance(error, ApiError) and error.status in MALFORMED:
            raise AirflowFailException(text) from error
        _reword(error, text)
        raise


def failure_message(context: Context) -> str:
    """What a notifier should say of a failed task: who failed, on which try, on what, and why. One short paragraph.

    For ``on_failure_callback`` and ``on_retry_callback``: ``lambda context: notify(failure_message(context))``. Names
    the job and the request that the task's state knows of, and the service's request id of a refused call. Holds no
    secret and no prompt.
    """
    ti, error = context["ti"], context.get("exception")
    who = f"{ti.dag_id}.{ti.task_id}"
    if ti.map_index is not None and ti.map_index >= 0:
        who += f"[{ti.map_index}]"
    why = str(error).strip() if error else "no reason was recorded"
    known = {**_recorded(context), **_attributes(error)}
    text = f"{who} failed on try {ti.try_number} of {ti.max_tries + 1} in {ti.run_id}: {_naming(why, known)}"
    return text if len(text) <= MAX_MESSAGE_CHARS else text[: MAX_MESSAGE_CHARS - 1] + "…"


def _recorded(context: Context) -> dict[str, str]:
    """What the task's record tells; it may be gone with the run, and a message must be sent all the same."""
    from airflow_cortex_training.durable import RECORD_KEY

    store = context.get("task_state_store")
    try:
        record = store.get(RECORD_KEY) if store is not None else None
    except Exception:
        return {}
    if not isinstance(record, dict):
        return {}
    told = {"job": record.get("job_id"), "request": record.get("request_id"), "root": record.get("root")}
    return {name: str(value) for name, value in told.items() if value}


def _attributes(error: Any) -> dict[str, str]:
    cause, told = error, {}
    while cause is not None:
        if isinstance(cause, ApiError) and cause.request_id:
            told["snowflake request id"] = cause.request_id
        elif isinstance(cause, (JobFailed, RequestFailed)):
            told["job"] = cause.job_id
        cause = cause.__cause__
    return told


def _naming(text: str, names: Mapping[str, str]) -> str:
    """`text`, with what it does not name yet at the end of its first line."""
    missing = [f"{what} {name}" for what, name in names.items() if name and name not in text]
    if not missing:
        return text
    first, newline, rest = text.partition("\n")
    return f"{first} ({', '.join(missing)}){newline}{rest}"


def _reword(error: CortexTrainingError, text: str) -> None:
    # In place, so that the type stays what retry policies match on.
    error.args = (text, *error.args[1:])


def _last_words(client: CortexTrainingClient, job_id: str) -> str:
    from cortex_training.training.last_words import error_lines

    try:
        return "\n".join(error_lines(client.tail_logs(job_id, max_lines=200)))
    except CortexTrainingError:
        return ""
