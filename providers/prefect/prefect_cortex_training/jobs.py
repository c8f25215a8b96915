"""A job of a flow run: its id is written down first, so that whoever comes next finds it, uses it, replaces it or ends
it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from cortex_training.answers import Job
from cortex_training.errors import ConfigurationError, ConflictError, JobFailed, NotFoundError
from cortex_training.identity import new_job_id
from cortex_training.states import is_terminal_job, job_state
from prefect_cortex_training.labels import Label, RunLabels, job_key, jobs_in
from prefect_cortex_training.waiting import NOT_YET_KNOWN_S

if TYPE_CHECKING:
    from cortex_training.aio import AsyncCortexTrainingClient

Logger = logging.Logger | logging.LoggerAdapter[Any]

_TRY_AGAIN_S = 1.0

R = TypeVar("R")

_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}", re.ASCII)


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

    A job that ended before its work was finished is replaced under the next generation, unless the flow run only came
    back from a suspension: then it is given back, for the wait to fail with the service's reason as it would have in a
    process that stayed, and the next try of the flow run replaces it. One whose work is finished stays the flow run's
    job, although it is gone: a rerun has nothing left to do on it. `owner` is the name of the credentials block that
    can cancel the job. When two processes execute the flow run at once, both get the same job.
    """
    if not _NAME.fullmatch(name):
        raise ConfigurationError.of("name", name, "give a job at most 64 letters, digits, _ and - as its name")
    written = await labels.read()
    finished = [job.job_id for job in jobs_in(written) if job.name == name and job.finished]
    if finished:
        return finished[-1]
    generation = max((job.generation for job in jobs_in(written) if job.name == name), default=0)
    existing = await _existing(client, _ids(written, name, generation))
    if existing and not _alive(existing):
        back = await labels.back_from_suspension()
        outcome = "the next try of the flow run replaces it" if back else "it is replaced"
        for job_id, job in existing.items():
            logger.warning("job %s is %s (%s); %s", job_id, *_end_of(job), outcome)
        if back:
            # The smallest is the one that both of two processes went on with.
            return min(existing)
        generation, existing = generation + 1, {}
    if not _ids(written, name, generation):
        written = await labels.write({job_key(name, generation, new_job_id()): owner or ""})
        existing = await _existing(client, _ids(written, name, generation))
    alive = _alive(existing)
    if alive:
        logger.info("job %s of this flow run is used again", alive[0])
    else:
        # One of several ids, if another process claimed one at the same moment: the same one for both.
        job_id = await _create(client, body, min(_ids(written, name, generation)))
        logger.info("job %s is created", job_id)
        written = await labels.write({job_key(name, generation, job_id): owner or ""})
        others = [other for other in _ids(written, name, generation) if other != job_id]
        alive = sorted([job_id, *_alive(await _existing(client, others))])
    for surplus in alive[1:]:
        await cancel_if_alive(client, surplus)
    return alive[0]


async def once_known(look: Callable[[], Awaitable[R]], since: float) -> R:
    """What `look` gives. A job that was just created is not known to every part of the service yet: a 404 within a
    minute of `since`, UTC epoch seconds, is no answer.
    """
    while True:
        try:
            return await look()
        except NotFoundError:
            if time.time() > since + NOT_YET_KNOWN_S:
                raise
        await asyncio.sleep(_TRY_AGAIN_S)


async def cancel_if_alive(client: AsyncCortexTrainingClient, job_id: str) -> None:
    """Cancel a job; one that has ended or was never created needs nothing."""
    with contextlib.suppress(ConflictError, NotFoundError):
        await client.cancel_job(job_id)


async def _create(client: AsyncCortexTrainingClient, body: dict[str, Any], job_id: str) -> str:
    """Create the job; returns the id that the service gave it, which may be another."""
    try:
        answer = await client.create_job_from_body({**body, "job_id": job_id})
    except ConflictError:
        # A create of ours arrived after all: the id is a random one of this flow run, nobody else can have used it.
        job = await client.get_job(job_id)
        if is_terminal_job(job.get("status")):
            state, reason = _end_of(job)
            raise JobFailed(job_id=job_id, state=state, reason=reason) from None
        return job_id
    return str(answer.get("job_id") or job_id)


def _ids(written: Mapping[str, Label], name: str, generation: int) -> list[str]:
    return [job.job_id for job in jobs_in(written) if (job.name, job.generation) == (name, generation)]


async def _existing(client: AsyncCortexTrainingClient, job_ids: Iterable[str]) -> dict[str, Job]:
    """Those of the jobs that the service knows. An id may have been written down by a process that died before it
    created the job.
    """
    found = {}
    for job_id in job_ids:
        with contextlib.suppress(NotFoundError):
            found[job_id] = await client.get_job(job_id)
    return found


def _alive(jobs: Mapping[str, Job]) -> list[str]:
    return sorted(job_id for job_id, job in jobs.items() if not is_terminal_job(job.get("status")))


def _end_of(job: Job) -> tuple[str, str]:
    return job_state(job.get("status")), str(job.get("reason") or "no reason given")
