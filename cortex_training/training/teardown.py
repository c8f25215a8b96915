"""What is left to do for a run that nobody drives any more: cancel its jobs, say where it stands."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cortex_training.errors import ConflictError, NotFoundError
from cortex_training.publication.log import PublicationLog
from cortex_training.publication.store import PosixStore
from cortex_training.states import is_terminal_job
from cortex_training.training.journal import read_journal
from cortex_training.training.offload import offload
from cortex_training.training.root import read_identity
from cortex_training.training.state import RunState, replay

if TYPE_CHECKING:
    from cortex_training.aio import AsyncCortexTrainingClient


@dataclass(frozen=True)
class RunStatus:
    """A run as its root tells it; nothing remote is asked."""

    root: str
    identity: dict[str, Any]
    state: RunState
    epochs: int
    entry: str | None

    @property
    def what_happened(self) -> str:
        """One sentence: finished, diverged, lost, interrupted."""
        current = self.state.current
        if self.state.diverged:
            return f"diverged at step {self.state.diverged[0]}"
        if current is None:
            return "not begun"
        if self.state.finished_steps:
            return f"finished {self.state.finished_steps} steps"
        if current.ended:
            return f"lost its job: {current.ended}"
        return f"confirmed step {current.confirmed_step}, goes on with the next driver"


def status(root: str) -> RunStatus:
    """Read a run's root. Raises RootError when it does not exist, FileNotFoundError when no run was begun in it."""
    store = PosixStore(root)
    latest = PublicationLog(store).latest()
    state = replay(read_journal(store))
    return RunStatus(store.root, read_identity(store), state, state.epoch, latest.name if latest else None)


async def cancel_jobs(root: str, client: AsyncCortexTrainingClient) -> list[str]:
    """Cancel every job that the run in `root` created, replacements included; returns the ids that were still alive.

    For teardowns and kills: it claims nothing and writes nothing, so it works beside a driver, which then finds its
    job cancelled. Jobs that somebody else owns are left alone. A root without a run has no jobs.
    """
    try:
        state = replay(read_journal(await offload(PosixStore, root)))
    except FileNotFoundError:
        return []
    cancelled = []
    for job_id in state.job_ids:
        try:
            job = await client.get_job(job_id)
            if is_terminal_job(job.get("status")):
                continue
            await client.cancel_job(job_id)
        except (NotFoundError, ConflictError):
            continue
        cancelled.append(job_id)
    return cancelled
