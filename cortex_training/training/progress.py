"""What a host is told while a run goes on, and what it gets in the end."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from cortex_training.errors import CortexTrainingError


@dataclass(frozen=True)
class Progress:
    """One moment of a run. `stage` is ``job``, ``recover``, ``train``, ``save``, ``publish`` or ``done``."""

    stage: str
    step: int
    steps: int
    job_id: str | None = None
    loss: float | None = None
    learning_rate: float | None = None
    tokens_per_s: float | None = None
    step_s: float | None = None
    remaining_s: float | None = None
    message: str = ""

    def line(self) -> str:
        """One line for a log."""
        parts = [f"{self.stage} {self.step}/{self.steps}"]
        if self.loss is not None:
            parts.append(f"loss {self.loss:.4f}")
        if self.learning_rate is not None:
            parts.append(f"lr {self.learning_rate:.3g}")
        if self.tokens_per_s is not None:
            parts.append(f"{self.tokens_per_s:,.0f} tokens/s")
        if self.remaining_s is not None:
            parts.append(f"{self.remaining_s:.0f} s left")
        if self.message:
            parts.append(self.message)
        return " · ".join(parts)


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
    """The host asked the run to stop. It is released: the same plan on the same root goes on where it stopped."""


class RunFailed(CortexTrainingError, RuntimeError):
    """The run cannot go on by itself; the message says why and what to do."""


@dataclass
class MetricsFile:
    """``metrics.jsonl`` of one attempt: one row per optimizer step."""

    path: str
    _opened: bool = field(default=False, repr=False)

    def append(self, row: dict[str, Any]) -> None:
        if not self._opened:
            os.makedirs(os.path.dirname(self.path), exist_ok=True)
            self._opened = True
        # One write of one line: a reader that follows the file never sees half a row.
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(json.dumps(row, sort_keys=True) + "\n")
