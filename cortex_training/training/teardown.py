"""What is left to do for a run that nobody drives any more: cancel its jobs, say where it stands."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cortex_training.errors import ConflictError, CortexTrainingError, NotFoundError
from cortex_training.publication.errors import RootError
from cortex_training.publication.log import PublicationLog
from cortex_training.states import is_terminal_job
from cortex_training.training.journal import JournalWriter, Superseded, last_number, read_journal
from cortex_training.training.offload import offload
from cortex_training.training.root import open_existing_root, read_identity
from cortex_training.training.state import RunState, Segment, replay

if TYPE_CHECKING:
    from cortex_training.aio import AsyncCortexTrainingClient

ENDED = {"ended": "by its owner"}
"""What the journal says when a run was taken from its driver for good."""

_CREATE_LANDS_S = 5.0
_SILENT_S = 3600.0
"""A driver that wrote nothing for so long is not told of as one that lives: it waits for one request half as long."""


@dataclass(frozen=True)
class RunStatus:
    """A run as its root tells it; the service is not asked."""

    root: str
    identity: dict[str, Any]
    state: RunState
    epochs: int
    entry: str | None

    @property
    def what_happened(self) -> str:
        """One sentence: finished, diverged, stopped, lost, or who drives it."""
        current = self.state.current
        if self.state.diverged:
            return f"diverged at step {self.state.diverged[0]}"
        if current is None:
            return "not begun"
        if current.complete and self.state.finished_steps >= current.confirmed_step > 0:
            return f"finished {self.state.finished_steps} steps"
        if self.state.driver == ENDED:
            return f"ended by its owner after step {current.confirmed_step}"
        if self.state.paused:
            return f"paused after step {current.confirmed_step}: {self.state.paused}"
        if self.state.stopped:
            return f"stopped after step {current.confirmed_step}: {self.state.stopped}"
        if current.ended:
            return f"lost its job: {current.ended}"
        seen = self.driven()
        if seen["released"] or seen["process_is_gone"] or seen["host"] is None or seen["silent_s"] > _SILENT_S:
            return f"confirmed step {current.confirmed_step}, goes on with the next driver"
        return (
            f"confirmed step {current.confirmed_step}, driven by process {seen['pid']} on {seen['host']}, which was "
            f"last heard of {seen['silent_s']} s ago"
        )

    def driven(self) -> dict[str, Any]:
        """The driver that has the run: its epoch, what it said of itself, seconds since its last record, whether it let
        the run go, and whether its process is gone, which can only be told on its own host (else None).
        """
        state = self.state
        return {
            "epoch": state.epoch,
            **{name: state.driver.get(name) for name in ("host", "pid", "attempt")},
            "silent_s": max(0, round(time.time() - state.last_at)),
            "released": state.released,
            "process_is_gone": _process_is_gone(state.driver),
            "ended_by_owner": state.driver == ENDED,
        }


def _process_is_gone(driver: Mapping[str, Any]) -> bool | None:
    pid = driver.get("pid")
    if driver.get("host") != socket.gethostname() or not isinstance(pid, int):
        return None
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except OSError:
        pass  # somebody else's process
    return False


def status(root: str, credentials: str | None = None) -> RunStatus:
    """Read a run's root. Raises RootError when it does not exist, FileNotFoundError when no run was begun in it.

    `credentials`, here and below, is the plan's, for roots in a bucket.
    """
    store = open_existing_root(root, credentials)
    latest = PublicationLog(store).latest()
    state = replay(read_journal(store))
    return RunStatus(store.root, read_identity(store), state, state.epoch, latest.name if latest else None)


def take_away(root: str, credentials: str | None = None) -> None:
    """Take the run from whoever drives it, and drive it no further: the next journal record of a living driver fails.

    Blocks on the store. The next driver may still go on with the run.
    """
    store = open_existing_root(root, credentials)
    while True:
        epoch = PublicationLog(store).claim_epoch(ENDED)
        try:
            JournalWriter.take_over(store, epoch.number, epoch.token, {"info": ENDED})
        except Superseded:
            continue  # somebody took it over in the same moment; once more, behind them
        return


def other_driver(root: str, attempt: str, credentials: str | None = None) -> str | None:
    """Who has taken the run in `root` over from the driver that calls itself `attempt`; None when nobody has.

    A root is a run's identity, and whoever goes on with a run ends its jobs: one that only shares the root, by mistake
    or because it drove the run earlier, must not. Raises RootError when the root can't be read. Blocks on the store.
    """
    taken = [
        record.body.get("info", {})
        for record in read_journal(open_existing_root(root, credentials))
        if record.type == "takeover"
    ]
    drivers = [info for info in taken if "attempt" in info]
    if not drivers or drivers[-1]["attempt"] == attempt:
        return None
    return f"driver {drivers[-1]['attempt'] or 'without a name'} on {drivers[-1].get('host', 'an unknown host')}"


async def end_run(root: str, client: AsyncCortexTrainingClient, credentials: str | None = None) -> list[str]:
    """Cancel every job of the run in `root`, and see to it that nobody creates another one; returns those alive.

    For teardowns and kills. A driver that is still alive somewhere would take the cancellation of its job for a loss
    and replace it, so the run is taken from it first. A root without a run has no jobs.
    """
    if not await offload(_has_journal, root, credentials):
        return []
    await offload(take_away, root, credentials)
    return await cancel_jobs(root, client, credentials)


async def cancel_jobs(root: str, client: AsyncCortexTrainingClient, credentials: str | None = None) -> list[str]:
    """Cancel every job that the run in `root` created, replacements included; returns the ids that were still alive.

    It writes nothing and leaves the run with its driver, who may replace a job that it finds cancelled: `end_run` is
    for runs that shall end. Jobs that somebody else owns are left alone. The newest job goes first, and one that can't
    be cancelled keeps none of the others alive: the first such error is raised in the end.
    """
    if not await offload(_has_journal, root, credentials):
        return []
    state = await offload(lambda: replay(read_journal(open_existing_root(root, credentials))))
    cancelled: list[str] = []
    problems: list[CortexTrainingError] = []
    for segment in reversed([s for s in state.segments if s.owned]):
        try:
            if await _cancel_if_alive(client, segment):
                cancelled.append(segment.job_id)
        except CortexTrainingError as problem:
            problems.append(problem)
    if problems:
        raise problems[0]
    return cancelled


async def _cancel_if_alive(client: AsyncCortexTrainingClient, segment: Segment) -> bool:
    """Cancel a segment's job; False when it has ended or never existed."""
    # A job whose creation is not on record may be on its way: it is looked for until a lost create would have landed.
    give_up = time.monotonic() + (0.0 if segment.created or segment.operations else _CREATE_LANDS_S)
    while True:
        try:
            job = await client.get_job(segment.job_id)
            if is_terminal_job(job.get("status")):
                return False
            await client.cancel_job(segment.job_id)
            return True
        except ConflictError:
            return False
        except NotFoundError:
            if time.monotonic() >= give_up:
                return False
            await asyncio.sleep(0.5)


def _has_journal(root: str, credentials: str | None) -> bool:
    try:
        return bool(last_number(open_existing_root(root, credentials)))
    except RootError:
        return False
