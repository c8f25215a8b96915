"""When to ask again.

Requests of one kind on one job tend to take what the last ones took. So a wait looks often where such requests ended
lately and rarely elsewhere: a steady request is noticed within a twentieth of its duration for a handful of polls, and
a change of pace costs one late notice before it is learned.
"""

from __future__ import annotations

import math
import random
import threading
from collections import deque
from dataclasses import dataclass, field

_REMEMBERED = 12
_ZONE = 0.06
"""Half-width, in log time, of the zone around a remembered duration in which requests are expected to end."""
_DENSE_STEP = 0.05
_BEFORE_STEP = 0.3
_AFTER_STEP = 0.15
_FIRST_LOOK = 0.65
"""Fraction of the shortest remembered duration at which a wait looks for the first time, in case things got faster."""
_UNKNOWN_STEP = 0.25
_SHORTEST_S = 0.02
_FIRST_UNKNOWN_S = 0.05
_JITTER = 0.05
_LAST_LOOK = 0.9
_TOO_LITTLE_S = 0.2


class Durations:
    """How long the last requests of one kind took on one job, in seconds. Safe to share between threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._recent: deque[float] = deque(maxlen=_REMEMBERED)

    def observe(self, pending_until_s: float, done_by_s: float) -> None:
        """A request was still in flight `pending_until_s` after its submission and seen finished at `done_by_s`."""
        # Finished at the very first look: it may have been much faster, so the next wait shall look earlier.
        seconds = (pending_until_s + done_by_s) / 2 if pending_until_s > 0 else 0.75 * done_by_s
        if seconds > 0:
            with self._lock:
                self._recent.append(seconds)

    def recent(self) -> tuple[float, ...]:
        with self._lock:
            return tuple(self._recent)


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

    def is_too_early(self, elapsed_s: float) -> bool:
        """Whether looking now would be before the first look that the remembered durations suggest."""
        if self.bounds.multiplier is not None or not self.durations:
            return False
        return elapsed_s < _FIRST_LOOK * min(self.durations)

    def delay_s(self, elapsed_s: float) -> float:
        """Seconds until the next look, `elapsed_s` after the request was submitted (or the wait began)."""
        if self.bounds.multiplier is not None:
            return self._fixed_delay_s(self.bounds.multiplier)
        wanted = self._learned_delay_s(elapsed_s) if self.durations else self._growing_delay_s(elapsed_s)
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

    def _growing_delay_s(self, elapsed_s: float) -> float:
        return max(_FIRST_UNKNOWN_S, _UNKNOWN_STEP * elapsed_s)

    def _learned_delay_s(self, elapsed_s: float) -> float:
        first_look = _FIRST_LOOK * min(self.durations)
        if elapsed_s < first_look:
            return first_look - elapsed_s
        now = math.log(max(elapsed_s, _SHORTEST_S))
        starts = [math.log(seconds) - _ZONE for seconds in self.durations]
        if any(start <= now <= start + 2 * _ZONE for start in starts):
            return _DENSE_STEP * elapsed_s
        upcoming = [math.exp(start) - elapsed_s for start in starts if start > now]
        step = _BEFORE_STEP if upcoming else _AFTER_STEP
        return min([step * elapsed_s, *upcoming])
