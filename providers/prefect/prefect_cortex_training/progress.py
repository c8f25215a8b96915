"""What a flow run shows while it trains."""

from __future__ import annotations

import asyncio
import contextlib
from types import TracebackType
from typing import TYPE_CHECKING
from uuid import UUID

from prefect.artifacts import acreate_progress_artifact, aupdate_progress_artifact
from prefect.logging import get_run_logger

from prefect_cortex_training.labels import RunLabels

if TYPE_CHECKING:
    from cortex_training.training import Progress

UPDATE_EVERY_S = 2.0


class ProgressReport:
    """A progress artifact and log lines, fed by calling it with a `Progress`.

    The call returns at once, because it is made between two steps of a GPU; a coroutine beside it shows the latest
    state every two seconds. Showing may fail; training goes on.
    """

    def __init__(self, labels: RunLabels, key: str) -> None:
        self._labels = labels
        self._key = key
        self._logger = get_run_logger()
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
            await self._show(self._latest)

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
            # Remembered in a label, so that a run that comes back after a crash goes on with the same artifact.
            known = (await self._labels.read()).get(f"artifact.{self._key}")
            if known is None:
                artifact = await acreate_progress_artifact(percent, key=self._key, description=progress.line())
                await self._labels.write({f"artifact.{self._key}": str(artifact)})
            else:
                await aupdate_progress_artifact(UUID(str(known)), percent, description=progress.line())
        except Exception as error:
            self._logger.debug("progress could not be shown: %s", error)
