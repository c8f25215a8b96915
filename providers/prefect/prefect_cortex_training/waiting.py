"""Waiting for the service without a process: a short look from here, then the flow run is suspended.

`prefect-cortex-training watch` resumes it. The flow then runs again from its top: durable tasks give their recorded
results, and the same wait looks once more, finds its job or request done, and returns.
"""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from prefect.context import FlowRunContext, TaskRunContext
from prefect.flow_runs import asuspend_flow_run
from prefect.logging import get_run_logger

from cortex_training.errors import (
    ConfigurationError,
    DeadlineExceeded,
    NotFoundError,
    RateLimitedError,
    ServiceError,
    TransportError,
)
from cortex_training.states import JobState, is_terminal_job, job_state
from prefect_cortex_training.credentials import connected
from prefect_cortex_training.dispatch import dual, run_to_end
from prefect_cortex_training.labels import RunLabels, is_finished
from prefect_cortex_training.presence import WATCHERS, somebody_is_there
from prefect_cortex_training.waits import REQUEST, RUNNING, Wait

if TYPE_CHECKING:
    from cortex_training.aio import AsyncCortexTrainingClient

DAY_S = 86_400.0
POLL_S = 10.0
"""A suspension costs some ten seconds until the flow is back; what takes less is waited for."""

NOT_YET_KNOWN_S = 60.0
"""How long after the wait began the service may not know its job or request yet."""

WATCHED_S = 60.0
"""How long before Prefect fails a suspended run whoever watches resumes it, so that the flow ends in its own way."""

_TRY_AGAIN_S = 0.5
_NOTED = 200
"""Longest text of a result that is noted in a label: ids and paths fit, completions don't belong there."""

R = TypeVar("R")


async def aawait_remote(
    credentials: str, job_id: str, request_id: str | None = None, *, timeout_s: float = DAY_S, poll_s: float = POLL_S
) -> dict[str, Any]:
    """Wait until a job runs, or until a request of it is done; returns the job, or the request's result.

    Call it in the body of a flow. It looks for `poll_s` seconds from this process, then suspends the flow run, whose
    process ends. In a task, in a subflow, or without a deployment nothing can be suspended, and without a
    ``prefect-cortex-training watch`` nobody would resume it: then it waits in this process.

    Args:
        credentials: name of a `CortexTrainingCredentials` block.
        job_id: the job, as `create_job` returned it.
        request_id: a request of the job, as the ``submit_`` tasks return it; None waits for the job to run.
        timeout_s: longest wait, from the flow run's first wait for it, whatever lies between.
        poll_s: how long to look before suspending.

    A rerun of a flow run whose work on the job is finished has nothing to wait for, and the job has ended: it gets the
    job as it is, or of the request's result the numbers and ids that were noted when it came. So does a flow run whose
    job ran when it was waited for, and has ended since: a training run may have gone on in another one.

    Raises JobFailed when the job ends, RequestFailed when the request does not succeed, DeadlineExceeded when
    `timeout_s` is over: in the flow, after it was resumed.
    """
    check_seconds(timeout_s=timeout_s, poll_s=poll_s)
    labels = RunLabels.of_current_run("await_remote")
    written = await labels.read()
    finished = is_finished(written, job_id)
    if request_id is None and (finished or written.get(_ran_key(job_id))):
        async with connected(credentials) as client:
            job = dict(await client.get_job(job_id))
        state = job_state(job.get("status"))
        if finished or is_terminal_job(state) or state == JobState.CANCELLING:
            return job
    noted = written.get(_awaited_key(job_id, request_id)) if request_id is not None and finished else None
    if noted is not None:
        return dict(json.loads(str(noted)))
    subject = (job_id,) if request_id is None else (job_id, request_id)
    wait = Wait(RUNNING if request_id is None else REQUEST, credentials, subject)
    since = float(await labels.remember(f"waiting_since.{subject[-1]}", time.time()))

    async def look(patience_s: float) -> dict[str, Any]:
        return await _look(wait, patience_s=patience_s, since=since)

    found = await look_or_suspend(
        wait, look, deadline=since + timeout_s, poll_s=poll_s, watched=can_suspend() and await is_watched()
    )
    if request_id is None:
        await labels.write({_ran_key(job_id): True})
    else:
        await labels.write({_awaited_key(job_id, request_id): json.dumps(_numbers_and_ids(found), sort_keys=True)})
    return found


async def look_or_suspend(
    wait: Wait, look: Callable[[float], Awaitable[R]], *, deadline: float, poll_s: float, watched: bool
) -> R:
    """What `look` finds within the seconds it is given; until then the flow run is suspended, if somebody watches.

    `look` raises DeadlineExceeded where it finds nothing. `deadline` is in UTC epoch seconds.
    """
    keys, patience_s = wait.keys(), poll_s
    while True:
        left_s = max(deadline - time.time(), 1.0)
        try:
            return await look(min(patience_s, left_s) if watched else left_s)
        except (DeadlineExceeded, RateLimitedError, ServiceError, TransportError):
            # A service that is out of reach may be back before the time is over: whoever watches is patient.
            if time.time() >= deadline or not watched:
                raise
        await suspend(keys, timeout_s=deadline - time.time())
        # Back without having been gone: this key had its suspension. The next one may still be to come.
        patience_s = _TRY_AGAIN_S


@dual(aawait_remote)
def await_remote(
    credentials: str, job_id: str, request_id: str | None = None, *, timeout_s: float = DAY_S, poll_s: float = POLL_S
) -> dict[str, Any]:
    """As `aawait_remote`, which is what it returns in flows that await."""
    return run_to_end(aawait_remote(credentials, job_id, request_id, timeout_s=timeout_s, poll_s=poll_s))


def can_suspend() -> bool:
    """Whether the flow run may be suspended where this is called: in the body of a deployed flow that is no subflow."""
    context = FlowRunContext.get()
    if context is None or context.flow_run is None or TaskRunContext.get() is not None:
        return False
    return context.flow_run.deployment_id is not None and context.flow_run.parent_task_run_id is None


def check_seconds(**times: float) -> None:
    """Raise ConfigurationError naming the first of `times` that is no number of seconds above 0."""
    for name, value in times.items():
        if not 0 < value < math.inf:
            raise ConfigurationError.of(name, value, "give seconds above 0")


def _awaited_key(job_id: str, request_id: str) -> str:
    return f"awaited.{job_id}.{request_id}"


def _ran_key(job_id: str) -> str:
    return f"ran.{job_id}"


def _numbers_and_ids(result: Mapping[str, Any]) -> dict[str, Any]:
    """What a label may hold of a result: no completions, and nothing long."""
    return {
        name: value
        for name, value in result.items()
        if isinstance(value, int | float) or (isinstance(value, str) and len(value) <= _NOTED)
    }


async def is_watched() -> bool:
    """Whether somebody would resume the flow run; says in its log when nobody would."""
    if await somebody_is_there(WATCHERS):
        return True
    get_run_logger().info("no `prefect-cortex-training watch` is up: this process waits, and stays for as long")
    return False


async def suspend(keys: Iterator[str], *, timeout_s: float | None) -> None:
    """Suspend the flow run under the next key: raises Prefect's Pause, which ends the process, unless that key has had
    its suspension. Prefect fails the run a minute after `timeout_s`, if nobody watches.
    """
    key = next(keys)
    get_run_logger().info("suspended until %s", key)
    await asuspend_flow_run(key=key, timeout=None if timeout_s is None else math.ceil(timeout_s + WATCHED_S))


async def _look(wait: Wait, *, patience_s: float, since: float) -> dict[str, Any]:
    """The job or the result, if it comes within `patience_s`."""
    until = time.monotonic() + patience_s
    async with connected(wait.credentials) as client:
        while True:
            left_s = max(until - time.monotonic(), _TRY_AGAIN_S)
            try:
                return await _wait_here(client, wait, left_s)
            except NotFoundError as error:
                # Just created: not every part of the service knows it yet.
                if time.time() > since + NOT_YET_KNOWN_S:
                    raise
                if time.monotonic() > until:
                    raise DeadlineExceeded(f"{wait.name} is not known yet: {error}", timeout_s=patience_s) from error
            await asyncio.sleep(_TRY_AGAIN_S)


async def _wait_here(client: AsyncCortexTrainingClient, wait: Wait, timeout_s: float) -> dict[str, Any]:
    if wait.kind == RUNNING:
        return dict(await client.wait_for_job(wait.subject[0], timeout_s=timeout_s))
    return dict(await client.poll_request(*wait.subject, timeout_s=timeout_s))
