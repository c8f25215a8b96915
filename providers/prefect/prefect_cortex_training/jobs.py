"""A job of a flow run: its id is written down first, so that whoever comes next finds it, uses it, replaces it or ends
it.
"""

from __future__ import annotations

import contextlib
import logging
from typing import TYPE_CHECKING, Any

from cortex_training.errors import ConflictError, JobFailed, NotFoundError
from cortex_training.identity import new_job_id
from cortex_training.states import is_terminal_job, job_state
from prefect_cortex_training.labels import Label, RunLabels, job_key, jobs_in, owner_key

if TYPE_CHECKING:
    from cortex_training.aio import AsyncCortexTrainingClient

Logger = logging.Logger | logging.LoggerAdapter[Any]


async def find_or_create(
    client: AsyncCortexTrainingClient,
    labels: RunLabels,
    name: str,
    body: dict[str, Any],
    *,
    owner: str | None,
    logger: Logger,
) -> str:
    """The id of the flow run's job called `name`: the one that lives, or one created from `body` now.

    A job that ended before its work was finished is replaced under the next generation. One whose work is finished
    stays the flow run's job, although it is gone: a rerun has nothing left to do on it. `owner` is the name of the
    credentials block that can cancel the job.
    """
    job_id, generation = new_job_id(), 0
    known = [job for job in jobs_in(await labels.read()) if job.name == name]
    if known:
        last = known[-1]
        if last.finished:
            return last.job_id
        job = await _look(client, last.job_id)
        if job is None:
            # Written down, and then the crash came before the create.
            job_id, generation = last.job_id, last.generation
        elif is_terminal_job(job.get("status")):
            generation = last.generation + 1
            logger.warning(
                "job %s is %s (%s); it is replaced: generation %d",
                last.job_id,
                job_state(job.get("status")),
                job.get("reason") or "no reason given",
                generation,
            )
        else:
            logger.info("job %s of this flow run is used again", last.job_id)
            return last.job_id
    key = job_key(name, generation)
    await labels.write(_names(key, job_id, owner))
    created = await _create_or_adopt(client, body, job_id)
    if created != job_id:
        # The service chose another id: from now on only that one can find the job.
        await labels.write(_names(key, created, owner))
    logger.info("job %s is created", created)
    return await _settle_rivals(client, labels, key, created)


async def cancel_if_alive(client: AsyncCortexTrainingClient, job_id: str) -> None:
    """Cancel a job; one that has ended or was never created needs nothing."""
    with contextlib.suppress(ConflictError, NotFoundError):
        await client.cancel_job(job_id)


def _names(key: str, job_id: str, owner: str | None) -> dict[str, Label]:
    return {key: job_id} if owner is None else {key: job_id, owner_key(job_id): owner}


async def _look(client: AsyncCortexTrainingClient, job_id: str) -> dict[str, Any] | None:
    try:
        return await client.get_job(job_id)
    except NotFoundError:
        return None


async def _create_or_adopt(client: AsyncCortexTrainingClient, body: dict[str, Any], job_id: str) -> str:
    try:
        answer = await client.create_job_from_body({**body, "job_id": job_id})
    except ConflictError:
        # An earlier create of ours arrived after all. The id is a random one of this flow run: nobody else can have
        # used it.
        job = await client.get_job(job_id)
        if is_terminal_job(job.get("status")):
            raise JobFailed(
                job_id=job_id, state=job_state(job.get("status")), reason=str(job.get("reason") or "")
            ) from None
        return job_id
    return str(answer.get("job_id") or job_id)


async def _settle_rivals(client: AsyncCortexTrainingClient, labels: RunLabels, key: str, job_id: str) -> str:
    """Two processes that execute one flow run at once write one label: the job that it names in the end is the job of
    both.
    """
    winner = str((await labels.read()).get(key, job_id))
    if winner != job_id:
        await cancel_if_alive(client, job_id)
    return winner
