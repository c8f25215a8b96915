"""Whether a trigger that is told "the user killed your task" may cancel what it waits for.

Airflow says so in three cases and only one of them is a kill. The task was marked failed or skipped: cancel. The task
was cleared: the new try cancels the old job itself, and may have adopted nothing yet. The triggerer stood still and
another one took the trigger over: the job is alive and wanted. The state of the task instance and the token that its
operator left in an XCom tell them apart; when they cannot be read, nothing is cancelled, because a leaked job ends at
its idle timeout and a wrongly cancelled one is lost work.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any

from airflow_cortex_training.durable import TOKEN_KEY, is_same_generation

_log = logging.getLogger(__name__)

_ENDED_BY_USER = frozenset({"failed", "skipped", "removed", "upstream_failed"})
_UNDER_WAY: set[asyncio.Task[None]] = set()


async def unbroken(work: Coroutine[Any, Any, None]) -> None:
    """Run `work` to its end even though the triggerer cancels ``on_kill`` again about once a second."""
    task = asyncio.create_task(work)
    # The loop keeps weak references only: without this one a cancelled caller would leave the task to the collector.
    _UNDER_WAY.add(task)
    task.add_done_callback(_UNDER_WAY.discard)
    await asyncio.shield(task)


async def may_cancel(task_instance: Any, remote_id: str, generation: list[int]) -> bool:
    """True when the user ended this task instance, or gave it another remote id under another generation."""
    if task_instance is None:
        return False
    try:
        state, known = await asyncio.to_thread(_state, task_instance)
        if not known or state in _ENDED_BY_USER:
            return True
        if state != "deferred":
            return False
        token = await asyncio.to_thread(_token, task_instance)
    except Exception as error:
        _log.warning(
            "could not find out why the trigger of %s was cancelled; nothing is cancelled: %s", remote_id, error
        )
        return False
    if not isinstance(token, dict):
        return False
    return token.get("id") != remote_id and not is_same_generation(token.get("generation"), generation)


def _state(ti: Any) -> tuple[str | None, bool]:
    """The state of the task instance, and whether it exists at all (a deleted run takes its task instances along)."""
    from airflow.sdk.execution_time.task_runner import RuntimeTaskInstance

    states = RuntimeTaskInstance.get_task_states(
        dag_id=ti.dag_id, task_ids=[ti.task_id], run_ids=[ti.run_id], map_index=ti.map_index
    ).get(ti.run_id, {})
    name = ti.task_id if ti.map_index is None or ti.map_index < 0 else f"{ti.task_id}_{ti.map_index}"
    return states.get(name), name in states


def _token(ti: Any) -> Any:
    from airflow.sdk.execution_time.xcom import XCom

    return XCom.get_one(key=TOKEN_KEY, dag_id=ti.dag_id, task_id=ti.task_id, run_id=ti.run_id, map_index=ti.map_index)
