"""What a flow run shows while it trains."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from types import TracebackType
from typing import TYPE_CHECKING, Any
from uuid import UUID

from prefect.artifacts import aupdate_progress_artifact
from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import ArtifactCreate
from prefect.context import TaskRunContext

from prefect_cortex_training.labels import RunLabels

if TYPE_CHECKING:
    from cortex_training.training import Progress

UPDATE_EVERY_S = 2.0
LAST_SHOW_S = 5.0


class ProgressReport:
    """A progress artifact and log lines, fed by calling it with a `Progress`.

    The call returns at once, because it is made between two steps of a GPU; a coroutine beside it shows the latest
    state every two seconds. Showing may fail; training goes on. It may be fed from outside of the flow run.
    """

    def __init__(self, labels: RunLabels, key: str, logger: logging.Logger | logging.LoggerAdapter[Any]) -> None:
        self._labels = labels
        self._key = key
        self._logger = logger
        self._artifact: UUID | None = None
        self._latest: Progress | None = None
        self._news = asyncio.Event()

    def __call__(self, progress: Progress) -> None:
        self._logger.info("%s", progress.line())
        self._latest = progress
        self._news.set()

    async def __aenter__(self) -> ProgressReport:
        self._shower = asyncio.create_task(self._show_until_cancelled())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._shower.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._shower
        if self._latest is not None:
            # The result waits behind this, and a busy server may take long.
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._show(self._latest), LAST_SHOW_S)

    async def _show_until_cancelled(self) -> None:
        while True:
            await self._news.wait()
            self._news.clear()
            if self._latest is not None:
                await self._show(self._latest)
            await asyncio.sleep(UPDATE_EVERY_S)

    async def _show(self, progress: Progress) -> None:
        percent = 100.0 if progress.stage == "done" else min(100.0 * progress.step / max(progress.steps, 1), 99.0)
        try:
            if self._artifact is None:
                self._artifact = await self._find_or_create(percent, progress.line())
            else:
                await aupdate_progress_artifact(self._artifact, percent, description=progress.line())
        except Exception as error:
            self._logger.debug("progress could not be shown: %s", error)

    async def _find_or_create(self, percent: float, line: str) -> UUID:
        # Remembered in a label, so that a run that comes back after a crash goes on with the same artifact.
        known = (await self._labels.read()).get(f"artifact.{self._key}")
        if known is not None:
            await aupdate_progress_artifact(UUID(str(known)), percent, description=line)
            return UUID(str(known))
        artifact = await self._create(percent, line)
        await self._labels.write({f"artifact.{self._key}": str(artifact)})
        return artifact

    async def _create(self, percent: float, line: str) -> UUID:
        task = TaskRunContext.get()
        wanted = ArtifactCreate(
            key=self._key,
            type="progress",
            description=line,
            data=percent,
            flow_run_id=self._labels.flow_run_id,
            task_run_id=task.task_run.id if task is not None else None,
        )
        async with get_client() as client:
            return (await client.create_artifact(wanted)).id
