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
_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 0.2, 10.0
"""Between two looks at a log that had nothing new, or could not be read."""


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

    Best effort: a log that can't be read is tried again, and harms nothing.
    """
    task = asyncio.create_task(_follow(driver))
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait({task})


async def _follow(driver: Driver) -> None:
    job_id, cursor, pause = "", None, _SHORTEST_PAUSE_S
    while True:
        current = driver.state.current
        if current is None or (current.owned and not driver.state.has_run(current.job_id)):
            await asyncio.sleep(_LOOK_S)
            continue
        if current.job_id != job_id:
            job_id, cursor, pause = current.job_id, None, _SHORTEST_PAUSE_S
        entries, cursor = await _next_lines(driver.client, job_id, cursor)
        for entry in entries:
            driver.tell("log", message=_text(entry)[:_LINE_CHARACTERS])
        pause = _SHORTEST_PAUSE_S if entries else min(pause * 1.5, _LONGEST_PAUSE_S)
        await asyncio.sleep(pause)


async def _next_lines(
    client: AsyncCortexTrainingClient, job_id: str, cursor: str | None
) -> tuple[list[Any], str | None]:
    """The lines behind `cursor`, none when they can't be read now, and the cursor behind them.

    None is the beginning; an empty cursor stands for a log that was read and gave none.
    """
    try:
        page = await client.tail_logs(job_id, sub_job_id=f"{job_id}:training:0", cursor=cursor or None)
    except CortexTrainingError:
        return [], cursor
    following = page.get("next_cursor")
    entries = page.get("entries") or []
    if isinstance(following, str) and following and following != cursor:
        return entries, following
    # The cursor has not moved, so this is the page that was read before, unless it is the first one.
    return (entries, "") if cursor is None else ([], cursor)
