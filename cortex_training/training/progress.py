"""What a host is told while a run goes on, and what it gets in the end."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from cortex_training.errors import CortexTrainingError


@dataclass(frozen=True)
class Progress:
    """One moment of a run. `stage` is ``plan`` (what the plan means), ``job``, ``recover``, ``train``, ``save``,
    ``publish``, ``log`` (a line of the service's log) or ``done``.

    Of the `step_s` seconds of a step, `remote_s` were spent on requests that the service had, and `waiting_s` before
    something was tried again; the rest is the driver's own and the network's. `remaining_s` goes by the last steps,
    saves included. `entry` names a publication that was made at this moment.
    """

    stage: str
    step: int
    steps: int
    job_id: str | None = None
    loss: float | None = None
    learning_rate: float | None = None
    tokens_per_s: float | None = None
    step_s: float | None = None
    remote_s: float | None = None
    waiting_s: float | None = None
    remaining_s: float | None = None
    message: str = ""
    entry: str | None = None

    def line(self) -> str:
        """One line for a log."""
        left = [] if self.remaining_s is None else [f"{self.remaining_s:.0f} s left"]
        return " · ".join([f"{self.stage} {self.step}/{self.steps}", *self.facts(), *left])

    def facts(self) -> list[str]:
        """What is known of this moment beside how far the run is, a few words each."""
        parts = []
        if self.loss is not None:
            parts.append(f"loss {self.loss:.4f}")
        if self.learning_rate is not None:
            parts.append(f"lr {self.learning_rate:.3g}")
        if self.tokens_per_s is not None:
            parts.append(f"{self.tokens_per_s:,.0f} tokens/s")
        if self.remote_s is not None and self.step_s:
            parts.append(f"{100 * min(self.remote_s / self.step_s, 1.0):.0f} % remote")
        if self.waiting_s is not None and self.waiting_s >= 0.1:
            parts.append(f"waited {self.waiting_s:.1f} s")
        if self.message:
            parts.append(self.message)
        return parts


ProgressCallback = Callable[[Progress], None]


@dataclass(frozen=True)
class TrainingResult:
    """The end of a run: numbers and ids only, small enough for an XCom."""

    root: str
    job_id: str
    steps: int
    global_steps: int
    first_loss: float | None
    last_loss: float | None
    checkpoint_id: str | None
    entry: str | None
    segments: int
    epoch: int
    v: int = 1

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, value: dict[str, Any]) -> TrainingResult:
        return cls(**value)


class RunInterrupted(CortexTrainingError):
    """The host asked the run to stop. The same plan on the same root goes on where it stopped."""


class RunFailed(CortexTrainingError, RuntimeError):
    """The run cannot go on by itself; the message says why and what to do."""


class Pace:
    """How fast a run goes, from the moments at which its last steps were confirmed."""

    _STEPS = 20

    def __init__(self) -> None:
        self._moments: deque[tuple[int, float]] = deque(maxlen=self._STEPS)

    def remaining_s(self, step: int, steps: int) -> float | None:
        """Seconds until step `steps`, now that `step` is confirmed; None for the first step that this driver makes."""
        # A replay jumps back, and what was before it says nothing about what comes.
        if self._moments and step <= self._moments[-1][0]:
            self._moments.clear()
        self._moments.append((step, time.monotonic()))
        (first, began), (last, now) = self._moments[0], self._moments[-1]
        return (now - began) / (last - first) * (steps - step) if last > first else None
