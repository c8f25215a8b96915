"""What a suspended flow run waits for, as its pause key says it.

The key is all that `watch` and `drive` know of a wait, and everybody who may look at the flow run can read it: it names
a credentials block, a job and a request. No secret is in it, and no address that a watcher would follow.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from urllib.parse import quote, unquote

from prefect.client.schemas.objects import FlowRun

PREFIX = "cortex_training.1"
"""The version rises when keys get another meaning; keys of other versions are nobody's here."""

RUNNING = "running"
REQUEST = "request"
TRAINING = "training"
CAPACITY = "capacity"

_SUBJECTS = {RUNNING: 1, REQUEST: 2, TRAINING: 3, CAPACITY: 3}


@dataclass(frozen=True)
class Wait:
    """A wait of a flow run.

    Args:
        kind: ``running``: until a job runs. ``request``: until a request is done. ``training``: until a driver trained.
            ``capacity``: until GPUs are free.
        credentials: name of the block that can reach the service.
        subject: (job id), (job id, request id), (digest of the root, training id, try of the flow run), or (kind of
            hardware or "", GPUs, number of the wait).
    """

    kind: str
    credentials: str
    subject: tuple[str, ...]

    def key(self, turn: int) -> str:
        """The pause key. Prefect never suspends a run twice under one key, so each suspension has its `turn`."""
        parts = (PREFIX, self.kind, self.credentials, *self.subject, str(turn))
        return "/".join(quote(part, safe="") for part in parts)

    def keys(self) -> Iterator[str]:
        """The key of every turn, from the first."""
        turn = 0
        while True:
            turn += 1
            yield self.key(turn)

    @property
    def name(self) -> str:
        """Short text for logs and labels."""
        return " ".join((self.kind, *self.subject))

    @classmethod
    def parse(cls, key: str | None) -> Wait | None:
        """The wait that a pause key tells of; None for any other key."""
        prefix, *parts = [unquote(part) for part in (key or "").split("/")]
        if prefix != PREFIX or len(parts) < 3:
            return None
        kind, credentials, *subject = parts[:-1]
        if _SUBJECTS.get(kind) != len(subject):
            return None
        return cls(kind, credentials, tuple(subject))


def wait_of(run: FlowRun) -> Wait | None:
    """What a suspended flow run waits for here; None when it runs, or waits for something else."""
    state = run.state
    return Wait.parse(state.state_details.pause_key) if state is not None and state.is_paused() else None
