"""Flow runs that ended while their jobs live: nobody runs the hooks of a run that was suspended, or whose runner died.

What is cancelled for which end is the deployer's choice. A run that was cancelled wants its jobs gone. One that failed
or crashed may be about to be retried, which would go on with the job that is there.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from prefect.client.orchestration import PrefectClient
from prefect.client.schemas.objects import FlowRun, State, StateType
from prefect.events.filters import EventFilter, EventNameFilter, EventOccurredFilter, EventResourceFilter
from prefect.states import Crashed

from cortex_training.errors import ConfigurationError
from prefect_cortex_training.cleanup import cancel_jobs_of_run
from prefect_cortex_training.labels import Label, RunLabels, jobs_in, labels_of, roots_in, subflows_in
from prefect_cortex_training.scan import ended_runs, runs_with_a_process

ENDS = {
    "cancelled": StateType.CANCELLED,
    "failed": StateType.FAILED,
    "crashed": StateType.CRASHED,
    "completed": StateType.COMPLETED,
}
HEARTBEAT = "prefect.flow-run.heartbeat"
_LOOK_AT_HEARTBEATS_EVERY_S = 10.0


@dataclass(frozen=True)
class Rules:
    """What the reconciler may do.

    Args:
        cancel_on: ends of flow runs that cancel their jobs: ``cancelled``, ``failed``, ``crashed``, ``completed``.
            A suspension that timed out has failed.
        look_back_s: runs that ended longer ago are left alone.
        crashed_after_s: a run that says it runs and has sent no heartbeat for so long is marked as crashed, by a
            watcher that has seen the server for as long. So is one with jobs that came back and has been Pending for so
            long: no other worker takes it up when its own dies before the process starts. Give three times Prefect's
            ``PREFECT_FLOWS_HEARTBEAT_FREQUENCY``, or longer where machines have to be started. None leaves such runs
            alone.
    """

    cancel_on: frozenset[str] = frozenset({"cancelled"})
    look_back_s: float = 86_400.0
    crashed_after_s: float | None = None

    def __post_init__(self) -> None:
        unknown = sorted(self.cancel_on - ENDS.keys())
        if unknown:
            raise ConfigurationError.of("cancel_on", unknown[0], f"use {', '.join(ENDS)}")
        for name in ("look_back_s", "crashed_after_s"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ConfigurationError.of(name, value, "give seconds above 0")


class Reconciler:
    """Cancels the jobs of flow runs that have ended, as its rules say; a run is done with once."""

    def __init__(self, rules: Rules, logger: logging.Logger) -> None:
        self._rules = rules
        self._logger = logger
        self._heartbeats_at = 0.0
        self._in_sight_since: float | None = None

    def lose_sight(self) -> None:
        """The server was out of reach: it took no heartbeats either, and silence means nothing for a while."""
        self._in_sight_since = None

    async def look(self, prefect: PrefectClient) -> None:
        """One pass."""
        now = time.monotonic()
        if self._in_sight_since is None:
            self._in_sight_since = now
        silence_s = self._rules.crashed_after_s
        if silence_s is not None and now > self._heartbeats_at and now - self._in_sight_since >= silence_s:
            self._heartbeats_at = now + _LOOK_AT_HEARTBEATS_EVERY_S
            await self._mark_silent_runs(prefect, timedelta(seconds=silence_s))
        states = [ENDS[end] for end in sorted(self._rules.cancel_on)]
        for run in await ended_runs(prefect, states, self._rules.look_back_s) if states else []:
            if _is_open(run):
                try:
                    await self._end(run)
                except Exception as error:
                    # One run that can't be read must not keep the jobs of the others alive.
                    self._logger.warning("flow run %s: %s: %s", run.id, type(error).__name__, error)

    async def _end(self, run: FlowRun) -> None:
        self._logger.info("flow run %s is %s: its jobs are cancelled", run.id, run.state_name)
        labels = RunLabels(run.id)
        if await cancel_jobs_of_run(labels, self._logger):
            await labels.write({_done_key(run): True})

    async def _mark_silent_runs(self, prefect: PrefectClient, silence: timedelta) -> None:
        """A runner that dies with its flow leaves a run that runs, or begins, for ever."""
        for run in await runs_with_a_process(prefect):
            assert run.state is not None
            if not _has_remote_work(labels_of(run)) or datetime.now(UTC) - run.state.timestamp < silence:
                continue
            if not await _was_heard(prefect, run, datetime.now(UTC) - silence):
                self._logger.warning("flow run %s has sent no heartbeat for %s: it has crashed", run.id, silence)
                crashed: State[None] = Crashed(message=f"No heartbeat came for {silence}")
                await prefect.set_flow_run_state(run.id, crashed, force=True)


async def _was_heard(prefect: PrefectClient, run: FlowRun, since: datetime) -> bool:
    page = await prefect.read_events(
        EventFilter(
            event=EventNameFilter(name=[HEARTBEAT]),
            occurred=EventOccurredFilter.model_validate({"since": since, "until": datetime.now(UTC)}),
            resource=EventResourceFilter(id=[f"prefect.flow-run.{run.id}"]),
        ),
        limit=1,
    )
    return bool(page.events)


def _is_open(run: FlowRun) -> bool:
    labels = labels_of(run)
    return _has_remote_work(labels) and _done_key(run) not in labels


def _has_remote_work(labels: dict[str, Label]) -> bool:
    return bool(jobs_in(labels) or roots_in(labels) or subflows_in(labels))


def _done_key(run: FlowRun) -> str:
    """Of this try: a retry of the run may create other jobs."""
    return f"reconciled.{run.run_count}"
