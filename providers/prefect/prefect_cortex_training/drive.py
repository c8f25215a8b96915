"""One process that trains for every flow run suspended in `train`: many runs on one event loop.

It owns nothing that is lost with it. The plan is in the run's root, what was sent is in its journal, the answer goes
into the flow run's labels; a driver that is killed is followed by the next one, under the same rules as any other.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
from collections.abc import Coroutine
from typing import Any
from uuid import UUID

from prefect import Flow
from prefect.client.orchestration import PrefectClient, get_client
from prefect.client.schemas.objects import FlowRun, StateType
from prefect.exceptions import ObjectNotFound
from prefect.logging import get_logger
from prefect.logging.loggers import flow_run_logger

from cortex_training.errors import (
    CortexTrainingError,
    DeadlineExceeded,
    RateLimitedError,
    ServiceError,
    TransportError,
)
from cortex_training.identity import new_token
from cortex_training.training import RunInterrupted, Superseded, TrainingPlan
from prefect_cortex_training.cleanup import cancel_jobs_of_run
from prefect_cortex_training.credentials import connected
from prefect_cortex_training.gpu_lease import LeaseRenewer
from prefect_cortex_training.handover import (
    DONE,
    FAILED,
    LEFT,
    Outcome,
    attempt_of,
    find_outcome,
    find_plan,
    nonces_in,
    outcome_key,
)
from prefect_cortex_training.labels import Label, RunLabels, labels_of, root_digest, roots_in
from prefect_cortex_training.presence import DRIVERS, Presence
from prefect_cortex_training.progress import ProgressReport
from prefect_cortex_training.scan import resume, suspended_runs
from prefect_cortex_training.waits import TRAINING, Wait, wait_of

MAX_RUNS = 16
"""Runs of one process. The engine bounds an event loop to as many; what is above is left to other drivers."""

CLAIM_S = 60.0
"""How long a driver that says nothing keeps others from a run."""

_CLAIM_EVERY_S = 20.0
_RIVALS_S = 1.0
"""How long another driver may take from its look at a run to its claim."""

_STOP_S = 15.0
_TRIES = 3
_TRY_AGAIN_S = 30.0


class Drive:
    """Drives the training of suspended flow runs until it is told to stop."""

    def __init__(self, *, every_s: float, max_runs: int = MAX_RUNS, logger: logging.Logger | None = None) -> None:
        self.name = f"{socket.gethostname()}/{os.getpid()}/{new_token()[:6]}"
        self._every_s = every_s
        self._max_runs = max_runs
        self._logger = logger or get_logger("prefect_cortex_training.drive")
        self._presence = Presence(DRIVERS, every_s=every_s)
        self._driven: dict[UUID, _Driven] = {}
        self._leases = LeaseRenewer(self._logger)

    async def drive(self, stop: asyncio.Event) -> None:
        """Look for runs every few seconds until `stop` is set; then end each between two units of work.

        A Prefect server that is out of reach is waited for, while the training goes on.
        """
        try:
            while not stop.is_set():
                try:
                    await self.look()
                except Exception as error:
                    self._logger.warning("this pass failed (%s: %s)", type(error).__name__, error)
                try:
                    await asyncio.wait_for(stop.wait(), self._every_s)
                except TimeoutError:
                    continue
        finally:
            await self._let_go()

    async def look(self) -> None:
        """One pass: take up runs that nobody drives, and let go of those whose flow run has ended."""
        async with get_client() as prefect:
            await self._presence.tell()
            self._driven = {run_id: driven for run_id, driven in self._driven.items() if not driven.task.done()}
            for driven in list(self._driven.values()):
                await self._apart(driven.flow_run_id, self._look_after(prefect, driven))
            suspended = await suspended_runs(prefect)
            await self._leases.look_after(prefect, [run for run in suspended if run.id in self._driven])
            for run in suspended:
                wait = wait_of(run)
                if wait is not None and wait.kind == TRAINING and run.id not in self._driven:
                    await self._apart(run.id, self._take_up(run, wait))

    async def _apart(self, flow_run_id: UUID, work: Coroutine[Any, Any, None]) -> None:
        """Do `work` for one flow run; what goes wrong with it must not keep the others waiting."""
        try:
            await work
        except Exception as error:
            self._logger.warning(
                "flow run %s: %s: %s; the next pass tries again", flow_run_id, type(error).__name__, error
            )

    async def _look_after(self, prefect: PrefectClient, driven: _Driven) -> None:
        try:
            state = (await prefect.read_flow_run(driven.flow_run_id)).state
        except ObjectNotFound:
            driven.stop.set()
            return
        if not await driven.keep(self.name):
            self._logger.info("flow run %s has another driver", driven.flow_run_id)
            driven.stop.set()
        if state is not None and state.is_final() and not driven.stop.is_set():
            self._logger.info("flow run %s is %s: its training stops", driven.flow_run_id, state.name)
            driven.stop.set()
            await asyncio.wait({driven.task}, timeout=_STOP_S)
            if state.type == StateType.CANCELLED:
                # A suspended run that is cancelled runs no hook.
                await cancel_jobs_of_run(RunLabels(driven.flow_run_id), self._logger)

    async def _take_up(self, run: FlowRun, wait: Wait) -> None:
        known = labels_of(run)
        _, training, run_count = wait.subject
        if find_outcome(known, training, int(run_count)) is not None:
            # Its driver died after the last word.
            await resume(run.id, self._logger, f"{wait.name} has ended")
            return
        if len(self._driven) >= self._max_runs or not _is_free(known, training, self.name):
            return
        driven = _Driven(run, wait, self._logger)
        if not await driven.claim(self.name):
            return
        self._logger.info("flow run %s: %s begins", run.id, wait.name)
        driven.task = asyncio.create_task(driven.train(known))
        self._driven[run.id] = driven

    async def _let_go(self) -> None:
        for driven in self._driven.values():
            driven.stop.set()
        tasks = {driven.task for driven in self._driven.values()}
        if tasks:
            _, late = await asyncio.wait(tasks, timeout=_STOP_S)
            for task in late:
                task.cancel()


class _Driven:
    """One training run of a suspended flow run."""

    task: asyncio.Task[None]

    def __init__(self, run: FlowRun, wait: Wait, logger: logging.Logger) -> None:
        self.flow_run_id = run.id
        self.stop = asyncio.Event()
        self._run = run
        self._wait = wait
        self._labels = RunLabels(run.id)
        self._logger = logger
        self._digest, self._training, self._run_count = wait.subject
        self._key = f"driver.{self._training}"
        self._said = 0.0

    async def claim(self, name: str) -> bool:
        """Take the run up, unless another driver has it. Of two that claim at the same moment the last one gets it.

        Should both go on nevertheless, the journal lets only one of them append.
        """
        if not _is_free(await self._labels.read(), self._training, name):
            return False
        await self._say(name)
        await asyncio.sleep(_RIVALS_S)
        return str((await self._labels.read()).get(self._key, "")).startswith(f"{name} ")

    async def keep(self, name: str) -> bool:
        """Say that the run is still driven here, every 20 seconds at most; False when it is another driver's.

        Two that claimed at the same moment both began. The one that the label does not name goes, or they would take
        the run from each other without end.
        """
        if not _is_free(await self._labels.read(), self._training, name):
            return False
        if time.monotonic() - self._said > _CLAIM_EVERY_S:
            await self._say(name)
        return True

    async def _say(self, name: str) -> None:
        await self._labels.write({self._key: f"{name} {time.time():.0f}"})
        self._said = time.monotonic()

    async def train(self, known: dict[str, Label]) -> None:
        """Train to an outcome, leave it in the labels, resume the flow run."""
        try:
            outcome = await self._outcome(known)
        except RunInterrupted:
            return  # released: the next driver goes on
        except Exception as error:
            self._logger.exception("the training of flow run %s broke off", self.flow_run_id)
            outcome = Outcome(FAILED, error=type(error).__name__, message=str(error))
        if outcome is None:
            return
        self._logger.info("flow run %s: %s: %s", self.flow_run_id, outcome.status, outcome.message or outcome.result)
        try:
            await self._labels.write({outcome_key(self._training, int(self._run_count)): outcome.to_label()})
            await resume(self.flow_run_id, self._logger, f"{self._wait.name} has ended")
        except Exception as error:
            # The journal knows how it ended: whoever takes the run up again finds out without training.
            self._logger.warning("flow run %s could not be told: %s: %s", self.flow_run_id, type(error).__name__, error)

    async def _outcome(self, known: dict[str, Label]) -> Outcome | None:
        """How the training ended; None when another driver has it."""
        try:
            root = next(root for root in roots_in(known) if root_digest(root.root) == self._digest)
            nonces = nonces_in(known, self._training, int(self._run_count))
            attempt = attempt_of(self.flow_run_id, root.root)
            plan = await asyncio.to_thread(find_plan, root.root, attempt, nonces, root.root_credentials)
        except (CortexTrainingError, StopIteration) as error:
            return Outcome(LEFT, message=str(error) or "the flow run's labels name no such root")
        for tried in range(_TRIES):
            try:
                return Outcome(DONE, await self._train(plan, attempt))
            except Superseded as error:
                if not _is_free(await self._labels.read(), self._training, ""):
                    return None
                return Outcome(FAILED, error="Superseded", message=str(error))
            except (TransportError, RateLimitedError, ServiceError, DeadlineExceeded) as error:
                if tried + 1 == _TRIES:
                    return Outcome(FAILED, error=type(error).__name__, message=str(error))
                self._logger.warning("flow run %s: %s; once more in %g s", self.flow_run_id, error, _TRY_AGAIN_S)
                await self._pause(_TRY_AGAIN_S)
            except RunInterrupted:
                raise
            except CortexTrainingError as error:
                return Outcome(FAILED, error=type(error).__name__, message=str(error))
        return None

    async def _train(self, plan: TrainingPlan, attempt: str) -> dict[str, object]:
        from cortex_training.training import run

        logger = flow_run_logger(self._run, Flow(fn=_named, name="train"))
        report = ProgressReport(self._labels, plan.root, logger)
        async with report, connected(self._wait.credentials) as client:
            return (await run(plan, client, report, attempt=attempt, stop=self.stop)).to_dict()

    async def _pause(self, seconds: float) -> None:
        try:
            await asyncio.wait_for(self.stop.wait(), seconds)
        except TimeoutError:
            return
        raise RunInterrupted(f"the driver of flow run {self.flow_run_id} stops")


def _is_free(known: dict[str, Label], training: str, name: str) -> bool:
    """Whether no other driver that is alive has claimed the run lately."""
    driver, _, said = str(known.get(f"driver.{training}", " 0")).rpartition(" ")
    return driver == name or time.time() - float(said) > CLAIM_S or _has_died(driver)


def _has_died(driver: str) -> bool:
    """Whether a driver was a process of this host, and is none any more. Of other hosts nothing is known."""
    host, _, rest = driver.partition("/")
    pid = rest.partition("/")[0]
    if host != socket.gethostname() or not pid.isdigit():
        return False
    if int(pid) == os.getpid():
        # A container that was started again has the number of the one before.
        return True
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return True
    except OSError:
        return False
    return False


def _named() -> None:
    """Prefect's logger of a flow run wants a flow, for its name."""
