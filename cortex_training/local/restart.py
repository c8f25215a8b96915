"""What becomes of a job that a killed service left behind."""

from __future__ import annotations

from dataclasses import dataclass

from cortex_training.local.checkpoints import Checkpoint, CheckpointStore
from cortex_training.local.job_store import StoredJob
from cortex_training.local.jobs import Job
from cortex_training.local.request_store import CHANGES, RequestStore
from cortex_training.states import JobState, is_terminal_job


@dataclass(frozen=True)
class Comeback:
    """How a job goes on after a restart."""

    training_from: Checkpoint | None
    """None: from where the job was created."""
    lost_after: float
    """Epoch seconds: what its training sub-job did after this moment is not in `training_from`."""
    note: str
    """What the job says of it, in `reason`."""


def ended_by_restart(stored: StoredJob) -> tuple[JobState, str]:
    """State and reason of a job that does not go on."""
    if is_terminal_job(stored.state):
        return stored.state, stored.reason
    if stored.state == JobState.CANCELLING:
        # Nothing of it computes any more, which is what its owner waits for.
        return JobState.CANCELLED, stored.reason
    return JobState.FAILED, f"the service was restarted while the job was {stored.state}"


def comeback_of(job: Job, checkpoints: CheckpointStore, requests: RequestStore) -> Comeback | str:
    """Whether a job whose memory is gone can go on from what is on disk; a text says why it can't.

    Training goes on from the job's newest resumable checkpoint, or anew if it had not begun to learn. Weights that
    sampling sub-jobs had been given by a sync are on no disk.
    """
    executed = requests.executed(job.job_id)
    notes = ["the service was restarted"]
    training = job.first_of("training")
    source, lost_after = None, 0.0
    if training is not None:
        own = [(operation, ended) for operation, name, ended in executed if name == training.sub_job_id]
        saved = [
            one
            for one in checkpoints.of_job(job.job_id)
            if one.checkpoint_type == "resumable" and one.sub_job_id == training.sub_job_id
        ]
        if saved:
            source = saved[-1]
            # A checkpoint holds no accumulated gradients: what was not stepped before it is lost like what came after.
            lost_after = max(
                (ended for name, ended in own if name in ("step", "load") and ended <= source.created_at), default=0.0
            )
            notes.append(
                f"training goes on from checkpoint {source.checkpoint_id} at step {source.global_steps}, and what it "
                "did after that is lost"
            )
        elif any(operation in CHANGES for operation, _ in own):
            return "the service was restarted, and the job had saved nothing that its training could go on from"
    if any(operation == "weight-sync" for operation, _, _ in executed):
        notes.append("sampling has the weights it was created with until the next weight-sync")
    return Comeback(source, lost_after, "; ".join(notes))
