"""Learning rate of a step, as plain data that a plan can carry."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from cortex_training.errors import ConfigurationError

_KINDS = ("job", "constant", "linear", "cosine")


@dataclass(frozen=True)
class LearningRate:
    """How the learning rate moves over a run.

    ``job`` sends no rate, so the job's own optimizer setting holds. ``constant``, ``linear`` and ``cosine`` start at
    `peak` after `warmup_steps` of linear warm-up; the last two fall to ``floor`` at the run's last step.
    """

    schedule: str = "job"
    peak: float = 0.0
    warmup_steps: int = 0
    floor: float = 0.0

    @classmethod
    def from_dict(cls, value: Mapping[str, Any]) -> LearningRate:
        unknown = sorted(set(value) - set(cls.__dataclass_fields__))
        if unknown:
            raise ConfigurationError.of(
                f"learning_rate.{unknown[0]}", value[unknown[0]], f"known keys: {', '.join(cls.__dataclass_fields__)}"
            )
        return cls(**value)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def validate(self, steps: int | None) -> None:
        """Raises `ConfigurationError` naming the field; `steps` is None while the run's length is not known yet."""
        for name in ("peak", "warmup_steps", "floor"):
            value = getattr(self, name)
            whole = isinstance(value, int) or (name != "warmup_steps" and isinstance(value, float))
            if isinstance(value, bool) or not whole or not math.isfinite(value):
                raise ConfigurationError.of(f"learning_rate.{name}", value, "give a finite number")
        if self.schedule not in _KINDS:
            raise ConfigurationError.of("learning_rate.schedule", self.schedule, f"use one of {', '.join(_KINDS)}")
        if self.schedule == "job":
            if self.peak or self.warmup_steps or self.floor:
                raise ConfigurationError.of(
                    "learning_rate.schedule", "job", "peak, warmup_steps and floor need constant, linear or cosine"
                )
            return
        if self.peak <= 0:
            raise ConfigurationError.of("learning_rate.peak", self.peak, "give a finite rate above 0, e.g. 1e-4")
        if not 0 <= self.floor <= self.peak:
            raise ConfigurationError.of("learning_rate.floor", self.floor, "give a rate between 0 and peak")
        if self.warmup_steps < 0 or (steps is not None and self.warmup_steps > steps):
            raise ConfigurationError.of(
                "learning_rate.warmup_steps", self.warmup_steps, f"give 0 to steps ({steps or 'of the run'})"
            )

    def at(self, step: int, steps: int) -> float | None:
        """The rate of step `step` (from 1) of `steps`, or None when the job's own setting holds."""
        if self.schedule == "job":
            return None
        if step <= self.warmup_steps:
            return self.peak * step / self.warmup_steps
        if self.schedule == "constant":
            return self.peak
        span = max(1, steps - self.warmup_steps)
        left = 1.0 - (step - 1 - self.warmup_steps) / span
        if self.schedule == "cosine":
            left = 0.5 * (1.0 - math.cos(math.pi * left))
        return self.floor + (self.peak - self.floor) * left
