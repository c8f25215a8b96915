"""When to ask again.

Requests of one kind on one job tend to take what the last ones took, so a wait looks often when they may end and rarely
otherwise. How often follows from one trade: looks that are `d` apart notice an end `d / 2` late on average, and each
look has a price. Late seconds and looks together cost least when `d` is the root of twice the price over the hazard,
that is over how likely a request that still runs is to end. A steady request is noticed soon for a handful of looks,
one that varies gets more of them, and a change of pace is learned from the first request that shows it.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field

from cortex_training.protocol.durations import Outlook

_PRICE = 0.003
"""What one look is worth, as a share of the time that the request has taken so far."""
_UNKNOWN_STEP = 0.25
"""Without any duration to go by: the time to the next look as a share of the time so far."""
_SHORTEST_S = 0.02
_FIRST_UNKNOWN_S = 0.05
_JITTER = 0.05
_LAST_LOOK = 0.9
_TOO_LITTLE_S = 0.2
_STRIDE = 0.05
"""In log time: how far apart the hazard is asked for on the way to the next look."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """Seconds between two looks. `multiplier`, if given, replaces learning by the fixed schedule of that growth."""

    shortest_s: float | None = None
    longest_s: float | None = None
    multiplier: float | None = None

    @property
    def floor_s(self) -> float:
        return self.shortest_s if self.shortest_s is not None else _SHORTEST_S

    @property
    def ceiling_s(self) -> float:
        return self.longest_s if self.longest_s is not None else max(6.0, self.floor_s)


@dataclass
class Pace:
    """The looks of one wait. `durations` is empty when nothing is known of such requests."""

    bounds: Bounds
    random: random.Random
    durations: tuple[float, ...] = ()
    _last_fixed_s: float = field(default=0.0, init=False)

    def __post_init__(self) -> None:
        learns = self.bounds.multiplier is None and self.durations
        self._outlook = Outlook(self.durations) if learns else None

    def is_too_early(self, elapsed_s: float) -> bool:
        """Whether looking now would be before the first look that the remembered durations suggest."""
        return self._outlook is not None and elapsed_s < self._expected_look_s(self._outlook, 0.0)

    def delay_s(self, elapsed_s: float) -> float:
        """Seconds until the next look, `elapsed_s` after the request was submitted (or the wait began)."""
        if self.bounds.multiplier is not None:
            return self._fixed_delay_s(self.bounds.multiplier)
        if self._outlook is not None:
            wanted = self._expected_look_s(self._outlook, elapsed_s) - elapsed_s
        else:
            wanted = max(_FIRST_UNKNOWN_S, _UNKNOWN_STEP * elapsed_s)
        wanted *= 1.0 + _JITTER * (2.0 * self.random.random() - 1.0)
        return min(max(wanted, self.bounds.floor_s), self.bounds.ceiling_s)

    def delay_within_s(self, elapsed_s: float, remaining_s: float) -> float:
        """As `delay_s`, in a wait that ends in `remaining_s`: the last look comes shortly before the end, not never."""
        wanted = self.delay_s(elapsed_s)
        if wanted < remaining_s or self.bounds.multiplier is not None:
            return min(wanted, remaining_s)
        return _LAST_LOOK * remaining_s if remaining_s > _TOO_LITTLE_S else remaining_s

    def _fixed_delay_s(self, multiplier: float) -> float:
        first_s = self.bounds.shortest_s if self.bounds.shortest_s is not None else 0.5
        wanted = self._last_fixed_s * multiplier if self._last_fixed_s else first_s
        self._last_fixed_s = min(wanted, self.bounds.ceiling_s)
        return self._last_fixed_s

    def _expected_look_s(self, outlook: Outlook, elapsed_s: float) -> float:
        """When the looks that are due from `elapsed_s` on, each a part of one, add up to a whole one."""
        latest_s = elapsed_s + self.bounds.ceiling_s
        moment, latest = max(math.log(max(elapsed_s, _SHORTEST_S)), outlook.begins), math.log(latest_s)
        due = 0.0
        while moment < latest:
            looks = _STRIDE * math.sqrt(outlook.hazard(moment + _STRIDE / 2) / (2 * _PRICE))
            if due + looks >= 1.0:
                return min(math.exp(moment + _STRIDE * (1.0 - due) / looks), latest_s)
            due += looks
            moment += _STRIDE
        return latest_s
