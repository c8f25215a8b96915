"""What a flow run shows while it trains."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from types import TracebackType
from typing import TYPE_CHECKING, Any

from prefect_cortex_training.artifacts import KeptArtifact
from prefect_cortex_training.labels import RunLabels, root_digest
from prefect_cortex_training.publication_events import tell_published

if TYPE_CHECKING:
    from cortex_training.training import Progress

UPDATE_EVERY_S = 2.0
LAST_SHOW_S = 5.0


class ProgressReport:
    """A progress artifact, log lines and an event for each publication, fed by calling it with a `Progress`.

    The call returns at once, because it is made between two steps of a GPU; a coroutine beside it shows the latest
    state every two seconds. Showing may fail; training goes on. It may be fed from outside of the flow run.
    """

    def __init__(self, labels: RunLabels, root: str, logger: logging.Logger | logging.LoggerAdapter[Any]) -> None:
        self._labels = labels
        self._root = root
        self._logger = logger
        self._artifact = KeptArtifact(labels, f"training-{root_digest(root)}", "progress")
        self._latest: Progress | None = None
        self._news = asyncio.Event()

    def __call__(self, progress: Progress) -> None:
        self._logger.info("%s", progress.line())
        if progress.entry is not None:
            tell_published(self._labels.flow_run_id, self._root, progress.entry, job_id=progress.job_id)
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
            await self._artifact.show(percent, progress.line())
        except Exception as error:
            self._logger.debug("progress could not be shown: %s", error)
