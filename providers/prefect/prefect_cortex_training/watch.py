"""One process that watches over every suspended flow run: it resumes those whose wait is over.

It keeps nothing. Each pass reads from the Prefect server who is suspended for what, and asks the service; whatever a
watcher that died had in mind, the next one sees again. Several may run: the second resumption of a run is refused.
"""

from __future__ import annotations

import asyncio
import logging
import time
from datetime import UTC, datetime, timedelta
from types import TracebackType
from typing import TYPE_CHECKING

from prefect.client.orchestration import PrefectClient, get_client
from prefect.client.schemas.objects import FlowRun
from prefect.logging import get_logger

from cortex_training.errors import (
    ApiError,
    AuthError,
    ConfigurationError,
    NotFoundError,
    RateLimitedError,
    ServiceError,
)
from cortex_training.states import JobState, is_terminal_job, is_terminal_request, job_state
from prefect_cortex_training.capacity import free_gpus
from prefect_cortex_training.credentials import load_credentials
from prefect_cortex_training.gpu_lease import LeaseRenewer
from prefect_cortex_training.handover import find_outcome
from prefect_cortex_training.labels import labels_of
from prefect_cortex_training.presence import DRIVERS, WATCHERS, Presence, somebody_is_there
from prefect_cortex_training.reconcile import Reconciler, Rules
from prefect_cortex_training.scan import resume, runs_to_come, suspended_runs
from prefect_cortex_training.waiting import NOT_YET_KNOWN_S, WATCHED_S
from prefect_cortex_training.waits import CAPACITY, REQUEST, RUNNING, TRAINING, Wait, wait_of

if TYPE_CHECKING:
    from cortex_training.aio import AsyncCortexTrainingClient

_LOOK_S = 20.0
"""Longest look at one wait: one that hangs must not keep the others from being seen."""

_AT_ONCE = 16
_LOOKS_PER_S = 2.0
"""What the service is asked for all waits together. A few waits are looked at in each pass, so that a run is not kept
waiting for its watcher; hundreds take turns.
"""

_SELDOM_S = 60.0
"""Longest time between two looks at one wait, however many there are."""

_DRIVER_GONE_S = 300.0
"""How long a run that waits for a driver is left to the next one; then it trains by itself."""


class Watcher:
    """Passes over all suspended flow runs. Use as an async context manager; call `look` again and again."""

    def __init__(self, *, every_s: float, rules: Rules, logger: logging.Logger | None = None) -> None:
        self._every_s = every_s
        self._logger = logger or get_logger("prefect_cortex_training.watch")
        self._clients: dict[str, AsyncCortexTrainingClient] = {}
        self._next_look: dict[str, float] = {}
        self._at_once = asyncio.Semaphore(_AT_ONCE)
        self._driver_seen = time.monotonic()
        self._presence = Presence(WATCHERS, every_s=every_s)
        self._reconciler = Reconciler(rules, self._logger)
        self._leases = LeaseRenewer(self._logger)

    async def __aenter__(self) -> Watcher:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for name in list(self._clients):
            await self._forget(name)

    async def watch(self, stop: asyncio.Event) -> None:
        """Look every few seconds until `stop` is set. A Prefect server that is out of reach is waited for."""
        while not stop.is_set():
            try:
                await self.look()
            except Exception as error:
                self._reconciler.lose_sight()
                self._logger.warning("this pass failed (%s: %s); the next one begins anew", type(error).__name__, error)
            try:
                await asyncio.wait_for(stop.wait(), self._every_s)
            except TimeoutError:
                continue

    async def look(self) -> None:
        """One pass: resume whom nothing keeps any more, then reconcile ended runs with their jobs."""
        await self._presence.tell()
        async with get_client() as prefect:
            await self._resume_ready(prefect)
            await self._reconciler.look(prefect)

    async def _resume_ready(self, prefect: PrefectClient) -> None:
        suspended = await suspended_runs(prefect)
        await self._leases.look_after(prefect, [*suspended, *await runs_to_come(prefect)])
        waiting = [(run, wait) for run in suspended if (wait := wait_of(run)) is not None]
        if any(wait.kind == TRAINING for _, wait in waiting) and await somebody_is_there(DRIVERS):
            self._driver_seen = time.monotonic()
        keys = {_place(run) for run, _ in waiting}
        self._next_look = {key: due for key, due in self._next_look.items() if key in keys}
        pause_s = self._pause_s(sum(wait.kind != TRAINING for _, wait in waiting))
        await asyncio.gather(*(self._resume_if_ready(run, wait, pause_s) for run, wait in waiting))

    def _pause_s(self, waits: int) -> float:
        """Seconds until a wait is looked at again, of so many that the service is asked for; 0 for the next pass."""
        pause_s = min(waits / _LOOKS_PER_S, _SELDOM_S)
        return pause_s if pause_s > self._every_s else 0.0

    async def _resume_if_ready(self, run: FlowRun, wait: Wait, pause_s: float) -> None:
        if time.monotonic() < self._next_look.get(_place(run), 0.0):
            return
        try:
            async with self._at_once, asyncio.timeout(_LOOK_S):
                why = _over_time(run) or await self._why_ready(run, wait)
                if why:
                    await resume(run.id, self._logger, why)
                    return
        except AuthError as error:
            # The block may hold another token by now.
            await self._forget(wait.credentials)
            self._logger.warning("%s: %s", wait.name, error)
        except Exception as error:
            self._logger.warning("%s could not be looked at (%s: %s)", wait.name, type(error).__name__, error)
        # Of a training the labels tell, which are here.
        self._next_look[_place(run)] = time.monotonic() + (0.0 if wait.kind == TRAINING else pause_s)

    async def _why_ready(self, run: FlowRun, wait: Wait) -> str:
        """Why the run's wait is over; empty while it is not. The flow itself says what that means for it."""
        if wait.kind == TRAINING:
            return self._why_trained(run, wait)
        try:
            client = await self._client(wait.credentials)
            if wait.kind == CAPACITY:
                return await _why_free(client, wait)
            if wait.kind == RUNNING:
                state = job_state((await client.get_job(wait.subject[0])).get("status"))
                over = state == JobState.RUNNING or is_terminal_job(state)
            else:
                assert wait.kind == REQUEST
                job_id, request_id = wait.subject
                state = str((await client.get_request_status(job_id, request_id, max_events=1)).get("status"))
                over = is_terminal_request(state)
        except NotFoundError as error:
            return str(error) if _age_s(run) > NOT_YET_KNOWN_S else ""
        except (AuthError, RateLimitedError, ServiceError):
            raise
        except ApiError as error:
            # A job that ended refuses to be asked for its requests.
            return str(error)
        return f"{wait.name} is {state}" if over else ""

    def _why_trained(self, run: FlowRun, wait: Wait) -> str:
        _, training, run_count = wait.subject
        if find_outcome(labels_of(run), training, int(run_count)) is not None:
            return f"{wait.name} has ended"
        if time.monotonic() - self._driver_seen > _DRIVER_GONE_S and _age_s(run) > _DRIVER_GONE_S:
            return "no driver is up"
        return ""

    async def _client(self, credentials: str) -> AsyncCortexTrainingClient:
        if credentials not in self._clients:
            block = await load_credentials(credentials)
            # The next pass is the retry.
            client = await block.aget_client(retry_budget_s=5.0)
            if self._clients.setdefault(credentials, client) is not client:
                await client.aclose()
        return self._clients[credentials]

    async def _forget(self, credentials: str) -> None:
        client = self._clients.pop(credentials, None)
        if client is not None:
            await client.aclose()


async def _why_free(client: AsyncCortexTrainingClient, wait: Wait) -> str:
    hardware, gpus, _ = wait.subject
    try:
        free = free_gpus(await client.get_capacity(hardware or None), int(gpus))
    except ConfigurationError as error:
        return str(error)
    return "" if free is None else f"{gpus} GPUs could be had"


def _place(run: FlowRun) -> str:
    assert run.state is not None
    return f"{run.id} {run.state.state_details.pause_key}"


def _age_s(run: FlowRun) -> float:
    assert run.state is not None
    return (datetime.now(UTC) - run.state.timestamp).total_seconds()


def _over_time(run: FlowRun) -> str:
    """Why a run whose own deadline has come is resumed: so that it fails in its own way, and cleans up."""
    assert run.state is not None
    until = run.state.state_details.pause_timeout
    if until is None or datetime.now(UTC) + timedelta(seconds=WATCHED_S) < until:
        return ""
    return "its time is over"
