"""Flow runs as `watch` and `drive` find them, and how they are resumed."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from uuid import UUID

from prefect.client.orchestration import PrefectClient
from prefect.client.schemas.filters import (
    FlowRunFilter,
    FlowRunFilterEndTime,
    FlowRunFilterState,
    FlowRunFilterStateName,
    FlowRunFilterStateType,
    FlowRunFilterTags,
)
from prefect.client.schemas.objects import FlowRun, StateType
from prefect.client.schemas.sorting import FlowRunSort
from prefect.exceptions import FlowPauseTimeout, NotPausedError
from prefect.flow_runs import aresume_flow_run

from prefect_cortex_training.labels import TAG

_PAGE = 200

_OURS = FlowRunFilterTags(all_=[TAG])


async def suspended_runs(prefect: PrefectClient) -> list[FlowRun]:
    """Every suspended flow run that has something to do with the service."""
    suspended = FlowRunFilterState(name=FlowRunFilterStateName(any_=["Suspended"]))
    return [run async for run in _pages(prefect, FlowRunFilter(tags=_OURS, state=suspended))]


async def runs_to_come(prefect: PrefectClient) -> list[FlowRun]:
    """Every flow run of ours that waits for a process: it was resumed, or is tried again."""
    states = FlowRunFilterState(type=FlowRunFilterStateType(any_=[StateType.SCHEDULED, StateType.PENDING]))
    return [run async for run in _pages(prefect, FlowRunFilter(tags=_OURS, state=states))]


async def runs_with_a_process(prefect: PrefectClient) -> list[FlowRun]:
    """Every flow run of ours that says that it runs, or that its process is about to."""
    states = FlowRunFilterState(type=FlowRunFilterStateType(any_=[StateType.RUNNING, StateType.PENDING]))
    return [run async for run in _pages(prefect, FlowRunFilter(tags=_OURS, state=states))]


async def ended_runs(prefect: PrefectClient, states: list[StateType], since_s: float) -> list[FlowRun]:
    """Every flow run of ours that has ended in one of `states` less than `since_s` seconds ago."""
    ended = FlowRunFilterState(type=FlowRunFilterStateType(any_=states))
    since = (datetime.now(UTC) - timedelta(seconds=since_s)).isoformat()
    # Validated, because the field's own type is a library's and differs between releases.
    end_time = FlowRunFilterEndTime.model_validate({"after_": since})
    wanted = FlowRunFilter(tags=_OURS, state=ended, end_time=end_time)
    return [run async for run in _pages(prefect, wanted)]


async def _pages(prefect: PrefectClient, wanted: FlowRunFilter) -> AsyncIterator[FlowRun]:
    """What changes its state between two pages may be missed; the next look finds it."""
    offset = 0
    while True:
        page = await prefect.read_flow_runs(
            flow_run_filter=wanted, sort=FlowRunSort.ID_DESC, limit=_PAGE, offset=offset
        )
        for run in page:
            yield run
        if len(page) < _PAGE:
            return
        offset += _PAGE


async def resume(flow_run_id: UUID, logger: logging.Logger, why: str) -> bool:
    """Resume a flow run; False when it is not suspended any more, because somebody else was faster or it has ended."""
    try:
        await aresume_flow_run(flow_run_id)
    except (NotPausedError, FlowPauseTimeout, RuntimeError) as problem:
        logger.info("flow run %s was not resumed: %s", flow_run_id, problem)
        return False
    logger.info("flow run %s is resumed: %s", flow_run_id, why)
    return True
