"""Waiting until GPUs could be had, without a process where that can be."""

from __future__ import annotations

import asyncio
import time

from prefect.logging import get_run_logger

from cortex_training.errors import ConfigurationError, DeadlineExceeded
from prefect_cortex_training.capacity import free_gpus, tells_nothing
from prefect_cortex_training.credentials import connected
from prefect_cortex_training.dispatch import run_to_end
from prefect_cortex_training.durable import task_pair
from prefect_cortex_training.labels import RunLabels
from prefect_cortex_training.waiting import DAY_S, POLL_S, can_suspend, check_seconds, is_watched, look_or_suspend
from prefect_cortex_training.waits import CAPACITY, Wait

EVERY_S = 15.0


async def _wait_for_capacity(
    credentials: str, gpus: int, *, hardware: str | None = None, timeout_s: float = DAY_S, seq: int = 1
) -> int:
    """Wait in this process until `gpus` GPUs could be had; arguments and result are those of `wait_for_capacity`."""
    _check(gpus, timeout_s)
    deadline = await _since(gpus, hardware, seq) + timeout_s
    return await _look(credentials, gpus, hardware, max(deadline - time.time(), 0.0))


# What was free then says nothing about now: nothing is skipped on a rerun.
wait_for_capacity_here, await_for_capacity_here = task_pair("wait_for_capacity", retries=2, cached=False)(
    _wait_for_capacity
)
"""The task by itself: it waits in its own process. `wait_for_capacity` is what flows call."""


async def await_for_capacity(
    credentials: str,
    gpus: int,
    *,
    hardware: str | None = None,
    timeout_s: float = DAY_S,
    poll_s: float = POLL_S,
    seq: int = 1,
) -> int:
    """Wait until `gpus` GPUs could be had; returns how many are free, -1 for no limit.

    Args:
        credentials: name of a `CortexTrainingCredentials` block.
        gpus: how many are wanted.
        hardware: of which kind, as the service calls it; None for any.
        timeout_s: longest wait, from the flow run's first look, whatever lies between.
        poll_s: how long to look from this process before the flow run is suspended.
        seq: number of this wait among those of the flow run for as many.

    Where the flow run can be suspended and a ``prefect-cortex-training watch`` is up, its process ends while it waits
    and comes back when the GPUs are there. Otherwise the task ``wait_for_capacity`` waits in this process.

    Nothing is reserved: a job created next may still queue. Where the service tells nothing about capacity it warns and
    goes on: only asking for a job would find out. Raises ConfigurationError when the account may never use so many,
    DeadlineExceeded after `timeout_s`.
    """
    free = await _without_a_process(credentials, gpus, hardware, timeout_s, poll_s, seq)
    if free is not None:
        return free
    return await await_for_capacity_here(credentials, gpus, hardware=hardware, timeout_s=timeout_s, seq=seq)


def wait_for_capacity(
    credentials: str,
    gpus: int,
    *,
    hardware: str | None = None,
    timeout_s: float = DAY_S,
    poll_s: float = POLL_S,
    seq: int = 1,
) -> int:
    """As `await_for_capacity`, for flows that block."""
    free = run_to_end(_without_a_process(credentials, gpus, hardware, timeout_s, poll_s, seq))
    if free is not None:
        return free
    return wait_for_capacity_here(credentials, gpus, hardware=hardware, timeout_s=timeout_s, seq=seq)


async def _without_a_process(
    credentials: str, gpus: int, hardware: str | None, timeout_s: float, poll_s: float, seq: int
) -> int | None:
    """As the wait gives it; None where nothing can be suspended, or nobody would resume it."""
    _check(gpus, timeout_s)
    check_seconds(poll_s=poll_s)
    if not (can_suspend() and await is_watched()):
        return None

    async def look(patience_s: float) -> int:
        return await _look(credentials, gpus, hardware, patience_s)

    wait = Wait(CAPACITY, credentials, (hardware or "", str(gpus), str(seq)))
    deadline = await _since(gpus, hardware, seq) + timeout_s
    return await look_or_suspend(wait, look, deadline=deadline, poll_s=poll_s, watched=True)


def _check(gpus: int, timeout_s: float) -> None:
    if not gpus > 0:
        raise ConfigurationError.of("gpus", gpus, "give a number above 0")
    check_seconds(timeout_s=timeout_s)


async def _since(gpus: int, hardware: str | None, seq: int) -> float:
    """When the flow run's first wait of this kind began, UTC epoch seconds."""
    labels = RunLabels.of_current_run("wait_for_capacity")
    return float(await labels.remember(f"waiting_since.capacity-{hardware or 'any'}-{gpus}-{seq}", time.time()))


async def _look(credentials: str, gpus: int, hardware: str | None, patience_s: float) -> int:
    """How many GPUs are free, once there are enough; raises DeadlineExceeded when they don't come in `patience_s`."""
    logger = get_run_logger()
    until = time.monotonic() + patience_s
    async with connected(credentials) as client:
        while True:
            capacity = await client.get_capacity(hardware)
            free = free_gpus(capacity, gpus)
            if free is not None:
                if tells_nothing(capacity):
                    logger.warning("the service tells nothing about capacity; going on without knowing")
                return free
            left_s = until - time.monotonic()
            has = f"{capacity['available_gpus']} of {capacity['max_total_gpus']}"
            if left_s <= 0:
                raise DeadlineExceeded(f"{gpus} GPUs were not free in time; {has} are", timeout_s=patience_s)
            logger.info("%s GPUs are free, %d are wanted", has, gpus)
            await asyncio.sleep(min(EVERY_S, left_s))
