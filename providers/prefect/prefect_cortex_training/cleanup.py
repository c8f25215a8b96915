"""Ending what a flow run began: no job outlives it.

Everything here starts from the flow run's labels, because it mostly runs where the flow did not: in the runner after a
crash, in another process after a cancellation.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any
from uuid import UUID

from prefect import Flow
from prefect.client.schemas.objects import FlowRun, State
from prefect.exceptions import ObjectNotFound, Pause
from prefect.logging import get_logger
from prefect.logging.loggers import flow_run_logger

from prefect_cortex_training.credentials import connected
from prefect_cortex_training.dispatch import dual, run_to_end
from prefect_cortex_training.gpu_lease import release_gpus
from prefect_cortex_training.handover import attempt_of
from prefect_cortex_training.jobs import cancel_if_alive
from prefect_cortex_training.labels import RootLabel, RunLabels, finished_key, jobs_in, roots_in, subflows_in

if TYPE_CHECKING:
    from cortex_training.aio import AsyncCortexTrainingClient

Logger = logging.Logger | logging.LoggerAdapter[Any]


async def cancel_remote_jobs(flow: Flow[..., Any], flow_run: FlowRun, state: State[Any]) -> None:
    """Hook: end the flow run's training runs and cancel every job that their journals or the flow run's labels name.

        @flow(on_cancellation=[cancel_remote_jobs], on_crashed=[cancel_remote_jobs])

    A rerun of the same flow run makes a new job and goes on from the last publication. Leave the hook out of
    `on_crashed` to let a rerun go on with the job itself; its idle timeout then ends it when no rerun comes.
    """
    await cancel_jobs_of_run(RunLabels(flow_run.id), flow_run_logger(flow_run, flow))


async def acancel_jobs_of_flow_run(flow_run_id: UUID | str) -> None:
    """Do for any flow run what the hook does; for cleanups that run elsewhere, e.g. started by an automation.

    Raises RuntimeError when something could not be cancelled; it is in the log.
    """
    if not await cancel_jobs_of_run(RunLabels(flow_run_id), get_logger("prefect_cortex_training")):
        raise RuntimeError(f"not every job of flow run {flow_run_id} could be cancelled; the log says which and why")


@dual(acancel_jobs_of_flow_run)
def cancel_jobs_of_flow_run(flow_run_id: UUID | str) -> None:
    """As `acancel_jobs_of_flow_run`, which is what it returns in flows that await."""
    run_to_end(acancel_jobs_of_flow_run(flow_run_id))


class jobs_cancelled_at_end:
    """``with jobs_cancelled_at_end():`` cancels the flow run's jobs when the block ends, however it ends.

    A suspended flow run has not ended: its jobs go on working, and the run comes back to them. When the block is left
    without an error the jobs are also marked as finished, so that a rerun does not create new ones for work that is
    done. Works as ``async with`` too.
    """

    def __enter__(self) -> None:
        self._labels = RunLabels.of_current_run("jobs_cancelled_at_end")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        run_to_end(self._end(error))

    async def __aenter__(self) -> None:
        self.__enter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # Shielded: a task that is cancelled once more while it cleans up would leave its GPUs behind.
        await asyncio.shield(self._end(error))

    async def _end(self, error: BaseException | None) -> None:
        if isinstance(error, Pause):
            return
        if error is None:
            await _mark_finished(self._labels)
        await cancel_jobs_of_run(self._labels, get_logger("prefect_cortex_training"))


async def _mark_finished(labels: RunLabels) -> None:
    known = await labels.read()
    jobs = jobs_in(known)
    if jobs:
        await labels.write({finished_key(job.job_id): True for job in jobs})
    for subflow in subflows_in(known):
        with contextlib.suppress(ObjectNotFound):
            await _mark_finished(RunLabels(subflow))


async def cancel_jobs_of_run(labels: RunLabels, logger: Logger) -> bool:
    """End the training runs of a flow run and of its subflows, and cancel every job; returns whether all of it worked.
    What can't be cancelled is logged and does not keep the next from being cancelled.
    """
    known = await labels.read()
    done = []
    for subflow in subflows_in(known):
        # One that was deleted has taken its labels with it.
        with contextlib.suppress(ObjectNotFound):
            done.append(await cancel_jobs_of_run(RunLabels(subflow), logger))
    # Runs first: they are taken from a driver that is still alive before it can miss its job and create another.
    for root in roots_in(known):
        what = f"jobs that the training run in {root.root} created"
        attempt = attempt_of(labels.flow_run_id, root.root)
        end = partial(_end_training_run, root=root, attempt=attempt, logger=logger)
        done.append(await _try_to_cancel(logger, what, root.credentials, end))
    for job in jobs_in(known):
        cancel = partial(_cancel_one, job_id=job.job_id)
        done.append(await _try_to_cancel(logger, f"job {job.job_id}", job.credentials, cancel))
    if all(done):
        # What could not be cancelled may still use its GPUs: its lease runs out by itself.
        await release_gpus(labels)
    return all(done)


async def _cancel_one(client: AsyncCortexTrainingClient, job_id: str) -> list[str]:
    await cancel_if_alive(client, job_id)
    return [job_id]


async def _end_training_run(
    client: AsyncCortexTrainingClient, root: RootLabel, attempt: str, logger: Logger
) -> list[str]:
    """End the run in `root`, if this flow run was the last to drive it."""
    from cortex_training.publication import RootError
    from cortex_training.training import end_run, other_driver

    try:
        other = await asyncio.to_thread(other_driver, root.root, attempt, root.root_credentials)
    except RootError:
        other = None
    if other is not None:
        # A root is a run's identity: who goes on with it must not lose it to a flow run that began it and crashed.
        logger.info("the training run in %s has been taken over by %s, which ends its jobs", root.root, other)
        return []
    return await end_run(root.root, client, root.root_credentials)


async def _try_to_cancel(
    logger: Logger,
    what: str,
    credentials: str | None,
    cancel: Callable[[AsyncCortexTrainingClient], Awaitable[list[str]]],
) -> bool:
    if credentials is None:
        logger.error("%s: the labels name no credentials block; cancel with `cortex-training cancel`", what)
        return False
    try:
        async with connected(credentials) as client:
            cancelled = await cancel(client)
    except Exception as error:
        logger.error("%s could not be cancelled through credentials block %r: %s", what, credentials, error)
        return False
    for job_id in cancelled:
        logger.info("job %s is cancelled", job_id)
    return True
