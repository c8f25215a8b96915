"""What the service's own log says about a failure; a person should not have to go and look."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping
from typing import TYPE_CHECKING, Any

from cortex_training.errors import CortexTrainingError

if TYPE_CHECKING:
    from cortex_training.aio import AsyncCortexTrainingClient
    from cortex_training.training.driver import Driver

_LINES = 5
_LINE_CHARACTERS = 300
_PATIENCE_S = 10.0
_LOOK_S = 0.1
"""Between two looks at the driver's own state, which cost nothing: a short run is over within a second."""


async def last_error_lines(client: AsyncCortexTrainingClient, job_id: str) -> list[str]:
    """The last error lines of the training sub-job's log; empty when the log can't be read any more.

    Best effort: a failure that is being reported must not turn into another one, nor wait for one.
    """
    try:
        async with asyncio.timeout(_PATIENCE_S):
            page = await client.tail_logs(job_id, sub_job_id=f"{job_id}:training:0", max_lines=200)
    except (CortexTrainingError, TimeoutError):
        return []
    return error_lines(page)


def error_lines(page: Mapping[str, Any]) -> list[str]:
    """The last error lines of a page of a log as ``tail_logs`` gives it, at most 5 of at most 300 characters each."""
    entries = [entry for entry in page.get("entries") or [] if _is_error(entry)]
    return [_text(entry)[:_LINE_CHARACTERS] for entry in entries[-_LINES:]]


def _is_error(entry: Any) -> bool:
    if isinstance(entry, Mapping):
        return str(entry.get("level", "")).upper() in ("ERROR", "CRITICAL", "FATAL") or (
            "_raw" in entry and ("Error" in str(entry["_raw"]))
        )
    return "Error" in str(entry)


def _text(entry: Any) -> str:
    if isinstance(entry, Mapping):
        return str(entry.get("msg") or entry.get("message") or entry.get("_raw") or entry)
    return str(entry)


@contextlib.asynccontextmanager
async def service_log(driver: Driver) -> AsyncIterator[None]:
    """Hand every new line of the training sub-job's log to the progress callback, stage ``log``, while a run goes on.

    Best effort: what can't be read is left out.
    """
    task = asyncio.create_task(_follow(driver))
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait({task})


async def _follow(driver: Driver) -> None:
    job_id = ""
    while True:
        current = driver.state.current
        if current is not None and current.job_id != job_id and driver.state.has_run(current.job_id):
            job_id = current.job_id
            with contextlib.suppress(CortexTrainingError):
                async for entry in driver.client.stream_logs(job_id, sub_job_id=f"{job_id}:training:0"):
                    driver.tell("log", message=_text(entry)[:_LINE_CHARACTERS])
        await asyncio.sleep(_LOOK_S)
