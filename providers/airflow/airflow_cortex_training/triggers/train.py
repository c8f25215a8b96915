"""Driving a training run from the triggerer, so that no worker is held while GPUs work."""

from __future__ import annotations

import asyncio
import contextvars
import time
from collections.abc import AsyncIterator
from typing import Any

from airflow.triggers.base import BaseTrigger, TriggerEvent

from airflow_cortex_training.connection import ConnectionSettings, Target
from airflow_cortex_training.hooks.cortex_training import CortexTrainingHook
from airflow_cortex_training.links import JobLinkOfRun
from airflow_cortex_training.run_folder import DrivenByAnother, PlanReplaced, end_run, is_let_go, read_plan, was_ended
from airflow_cortex_training.triggers import kill
from airflow_cortex_training.triggers.engine import STOP_S, EngineRun
from airflow_cortex_training.triggers.events import Status, event
from airflow_cortex_training.triggers.stored import StoredArguments
from airflow_cortex_training.triggers.waiting import sleep_until
from cortex_training.errors import AuthError, ConfigurationError, CortexTrainingError
from cortex_training.training import TrainingPlan

SUPERSEDED_LOOK_S = 15.0
_TELL_EVERY_S = 2.0


class CortexTrainingTrainTrigger(StoredArguments, BaseTrigger):
    """Drives the run in `root` to its end and fires once.

    It may start again at any moment and on any triggerer: the run's root says what was done, and the journal covers
    every POST. When the triggerer shuts down it stops sending, waits up to 8 s for what is in flight, and releases
    the root.

    Args:
        target: `Target.to_kwargs`.
        root, attempt, nonce: where the worker left the plan and how to recognise it.
        credentials: where those of a bucket are found, as in the plan; no secrets.
        not_before, deadline: UTC epoch seconds.
        generation: of the task instance, see `durable`.
        cancel_on_kill: whether the jobs of the run are cancelled when a user ends the task.
        v: version of these arguments.
    """

    def __init__(
        self,
        *,
        target: dict[str, str],
        root: str,
        attempt: str,
        nonce: str,
        not_before: float,
        deadline: float,
        generation: list[int],
        cancel_on_kill: bool = True,
        credentials: str | None = None,
        v: int = 2,
        **unknown: Any,
    ) -> None:
        super().__init__()
        self.target = target
        self.root = root
        self.attempt = attempt
        self.nonce = nonce
        self.not_before = not_before
        self.deadline = deadline
        self.generation = generation
        self.cancel_on_kill = cancel_on_kill
        self.credentials = credentials
        self.v = v
        self.unknown = unknown
        self._run: EngineRun | None = None
        self._told_at, self._told = 0.0, ""

    async def run(self) -> AsyncIterator[TriggerEvent]:
        self.check_version()
        payload = await self._payload()
        await sleep_until(self.not_before)
        yield TriggerEvent(payload)
        return

    async def _payload(self) -> dict[str, Any]:
        """Drive the run until there is something to tell."""
        from cortex_training.training import RunFailed, RunInterrupted, Superseded

        hook = CortexTrainingHook.for_target(Target(**self.target))
        while True:
            try:
                plan = await asyncio.to_thread(read_plan, self.root, self.attempt, self.nonce, self.credentials)
                settings = await hook.asettings()
                try:
                    result = await self._drive(plan, settings)
                except AuthError as error:
                    if await hook.asettings() == settings:
                        return self._failed(Status.DENIED, error, permanent=True)
                    self.log.info("connection %s has another credential now; going on with it", hook.conn_id)
                    continue
            except (PlanReplaced, Superseded) as error:
                # Another driver is at work, on another triggerer or in another try of the task. It sends the event;
                # this one stands by, in case that one dies.
                self.log.info("standing by: %s", error)
                if await self._stand_by():
                    return self._ended()
                if time.time() >= self.deadline:
                    return event(Status.TIMEOUT, root=self.root, attempt=self.attempt)
            except RunInterrupted:
                return event(Status.TIMEOUT, root=self.root, attempt=self.attempt)
            except ConfigurationError as error:
                return self._failed(Status.FAILED, error, permanent=True, configuration=True)
            except RunFailed as error:
                return self._failed(Status.FAILED, error, permanent=True)
            except CortexTrainingError as error:
                return self._failed(Status.FAILED, error, permanent=False)
            else:
                trained = {**result.to_dict(), "root": self.root}
                return event(Status.TRAINED, root=self.root, attempt=self.attempt, result=trained)

    async def _drive(self, plan: TrainingPlan, settings: ConnectionSettings) -> Any:
        from cortex_training.training import RunInterrupted

        loop, context = asyncio.get_running_loop(), contextvars.copy_context()
        job_link = JobLinkOfRun(settings, self.task_instance)

        def tell(moment: Any) -> None:
            job_link.show(moment.job_id)
            self._tell(moment)

        def progress(moment: Any) -> None:
            if not loop.is_closed():
                # In the trigger's own context: it is how Airflow knows whose log a line belongs to.
                loop.call_soon_threadsafe(tell, moment, context=context)

        async def start(stop: asyncio.Event) -> Any:
            from cortex_training.aio import AsyncCortexTrainingClient
            from cortex_training.training import run

            arguments = await asyncio.to_thread(settings.client_arguments)
            async with AsyncCortexTrainingClient(**arguments) as client:
                return await run(plan, client, progress, attempt=self.attempt, stop=stop)

        engine = self._run = EngineRun(start)
        try:
            return await asyncio.wait_for(engine.result(), timeout=max(0.0, self.deadline - time.time()))
        except TimeoutError:
            engine.ask_to_stop()
            if await engine.ended(STOP_S):
                return await engine.result()
            # It waits for a service that does not answer. The worker leg takes the run from it before it cancels.
            raise RunInterrupted(f"{self.root}: not ended at its deadline") from None
        except asyncio.CancelledError:
            # Shutdown or kill. A second cancellation ends this wait; the run stops by itself all the same.
            engine.ask_to_stop()
            await engine.ended(STOP_S)
            raise

    def _tell(self, moment: Any) -> None:
        now, line = time.monotonic(), moment.line()
        too_soon = moment.stage == "train" and now - self._told_at < _TELL_EVERY_S and moment.step < moment.steps
        if too_soon or line == self._told:
            return
        self._told_at, self._told = now, line
        self.log.info("%s", line)

    async def _stand_by(self) -> bool:
        """Until the run was let go by its present driver, or is over, or the deadline. Returns whether it was ended.

        A task that is cleared ends its run, and then goes on with it under another plan: only an end that lasts from
        one look to the next is one.
        """
        ended = False
        while time.time() < self.deadline:
            await asyncio.sleep(SUPERSEDED_LOOK_S)
            if await asyncio.to_thread(is_let_go, self.root, self.attempt, self.credentials):
                return False
            ended_before, ended = ended, await asyncio.to_thread(self._was_ended)
            if ended_before and ended:
                return True
        return False

    def _was_ended(self) -> bool:
        if not was_ended(self.root, self.credentials):
            return False
        try:
            read_plan(self.root, self.attempt, self.nonce, self.credentials)
        except (PlanReplaced, CortexTrainingError):
            return False
        return True

    def _ended(self) -> dict[str, Any]:
        error = "it was ended by a teardown, a kill or a person, who cancelled its jobs"
        return event(Status.FAILED, root=self.root, attempt=self.attempt, permanent=True, error=error)

    def _failed(self, status: Status, error: Exception, *, permanent: bool, **more: Any) -> dict[str, Any]:
        return event(status, root=self.root, attempt=self.attempt, permanent=permanent, error=str(error), **more)

    async def on_kill(self) -> None:
        await kill.unbroken(self._cancel())

    async def _cancel(self) -> None:
        if self._run is not None:
            # Its last act may be to create a replacement; cancelling before that would miss it.
            self._run.ask_to_stop()
            await self._run.ended(STOP_S)
        if not self.cancel_on_kill or not await kill.may_cancel(self.task_instance, self.root, self.generation):
            return
        settings = await CortexTrainingHook.for_target(Target(**self.target)).asettings()
        try:
            cancelled = await asyncio.to_thread(end_run, settings, self.root, self.credentials, self.attempt)
        except DrivenByAnother as error:
            self.log.info("the task was ended by a user; no job is cancelled: %s", error)
            return
        self.log.info("cancelled %s: the task was ended by a user", ", ".join(cancelled) or "nothing, no job was left")
