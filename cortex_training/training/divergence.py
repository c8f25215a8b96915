"""What counts as a divergence, and what a run does about it, as plain data that a plan can carry."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from cortex_training.errors import ConfigurationError


@dataclass(frozen=True)
class Divergence:
    """A loss that is not finite is always a divergence; with `loss_factor` so is one above that many times the median
    of the last `median_of` steps.

    ``stop`` ends the run. ``rollback`` goes back to the last publication, at most `max_rollbacks` times, and changes
    something, because the same batches would diverge again: it leaves out the batches of the last `skip_batches` steps
    up to the one where it showed, multiplies the learning rate from there on with `lr_factor`, or both.
    """

    action: str = "stop"
    max_rollbacks: int = 1
    skip_batches: int = 0
    lr_factor: float = 1.0
    loss_factor: float | None = None
    median_of: int = 20

    @classmethod
    def from_dict(cls, value: Mapping[str, Any]) -> Divergence:
        unknown = sorted(set(value) - set(cls.__dataclass_fields__))
        if unknown:
            raise ConfigurationError.of(
                f"plan.divergence.{unknown[0]}",
                value[unknown[0]],
                f"known keys: {', '.join(cls.__dataclass_fields__)}",
            )
        return cls(**value)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def validate(self) -> None:
        if self.action not in ("stop", "rollback"):
            raise ConfigurationError.of("plan.divergence.action", self.action, "use stop or rollback")
        for name, least in (("max_rollbacks", 0), ("skip_batches", 0), ("median_of", 1)):
            count = getattr(self, name)
            if isinstance(count, bool) or not isinstance(count, int) or count < least:
                raise ConfigurationError.of(
                    f"plan.divergence.{name}", count, f"give a whole number of at least {least}"
                )
        if not _is_number(self.lr_factor) or not 0 < self.lr_factor <= 1:
            raise ConfigurationError.of("plan.divergence.lr_factor", self.lr_factor, "give a number above 0, at most 1")
        if self.loss_factor is not None and (not _is_number(self.loss_factor) or self.loss_factor <= 1):
            raise ConfigurationError.of("plan.divergence.loss_factor", self.loss_factor, "give a number above 1")
        if self.action == "rollback" and not self.skip_batches and self.lr_factor == 1:
            raise ConfigurationError.of(
                "plan.divergence.action",
                self.action,
                "the same batches at the same rate would diverge again: give skip_batches, or lr_factor below 1",
            )

    def found_in(self, loss: float, before: Sequence[float]) -> str | None:
        """How a loss shows a divergence, or None. `before` are the losses of earlier steps, in order."""
        if not math.isfinite(loss):
            return str(loss)
        if self.loss_factor is None or len(before) < self.median_of:
            return None
        median = statistics.median(before[-self.median_of :])
        if loss <= self.loss_factor * median:
            return None
        return f"{loss:.4g}, more than {self.loss_factor:g} times the median {median:.4g} of {self.median_of} steps"


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
