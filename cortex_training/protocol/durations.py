"""How long requests of one kind took on one job, and how likely the next one is to end at a moment.

Durations are compared as logarithms: a tenth more or less means the same for a step of a second and one of a minute.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Sequence
from math import exp
from typing import NamedTuple

_REMEMBERED = 12
_FADING = 0.5
"""How much less a request counts than the one after it: the first at a new pace weighs as much as all before it."""
_APART = 0.25
"""Durations closer than this, in log time, belong to one pace."""
_USUAL_SPREAD = 0.06
_USUAL_COUNT = 3
"""A pace is thought to vary as if so many more requests had been seen, with the usual spread."""
_SURPRISE = 0.02
_SURPRISE_SCALE = 0.5
"""The chance that a request takes as long as none before, and how far such a duration lies from the last one."""
_FAR = 30.0
"""In scales from the center of a pace: so far from it nothing changes any more."""
_EARLIEST = 1.0
"""In log time before the shortest pace: nothing is expected to end sooner."""


class Durations:
    """How long the last requests of one kind took on one job, in seconds. Safe to share between threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._recent: deque[float] = deque(maxlen=_REMEMBERED)

    def observe(self, pending_until_s: float, done_by_s: float) -> None:
        """A request was still in flight `pending_until_s` after its submission and seen finished at `done_by_s`."""
        if done_by_s <= 0:
            return
        with self._lock:
            if pending_until_s > 0:
                self._recent.append((pending_until_s + done_by_s) / 2)
            elif done_by_s < min(self._recent, default=math.inf):
                # Finished at the very first look: it may have been much faster, so the next wait shall look earlier.
                # A first look that came late for any reason says nothing.
                self._recent.append(0.75 * done_by_s)

    def recent(self) -> tuple[float, ...]:
        """The oldest first."""
        with self._lock:
            return tuple(self._recent)


class _Pace(NamedTuple):
    """One of the durations that such requests take: a logistic distribution in log time."""

    share: float
    center: float
    scale: float


class Outlook:
    """When the next request may end, from how long the last ones took (in seconds, the oldest first, at least one).

    A moment is the logarithm of seconds since the submission.
    """

    def __init__(self, durations: Sequence[float]) -> None:
        paces = _paces(durations)
        surprise = _Pace(_SURPRISE, math.log(durations[-1]), _SURPRISE_SCALE)
        self._paces = [*(_Pace(p.share * (1 - _SURPRISE), p.center, p.scale) for p in paces), surprise]
        self.begins = min(pace.center for pace in paces) - _EARLIEST
        """The moment before which no end is expected."""

    def hazard(self, moment: float) -> float:
        """How many of the requests that are still running at this moment end per unit of log time."""
        # Asked several times for each look of every wait: written out, without calls.
        running = ending = 0.0
        for share, center, scale in self._paces:
            distance = (moment - center) / scale
            if distance > _FAR:  # no overflow, and never all of them
                distance = _FAR
            elif distance < -_FAR:
                distance = -_FAR
            ended = 1.0 / (1.0 + exp(-distance))
            left = share * (1.0 - ended)
            running += left
            ending += left * ended / scale
        return ending / running


def _paces(durations: Sequence[float]) -> list[_Pace]:
    """The remembered durations in groups that lie apart: after a change of pace there are two, the newer one counts."""
    weights = [_FADING**age for age in reversed(range(len(durations)))]
    groups: list[list[tuple[float, float]]] = []
    for moment, weight in sorted((math.log(s), w) for s, w in zip(durations, weights, strict=True)):
        if groups and moment - groups[-1][-1][0] < _APART:
            groups[-1].append((moment, weight))
        else:
            groups.append([(moment, weight)])
    return [_pace(group, sum(weights)) for group in groups]


def _pace(group: Sequence[tuple[float, float]], all_weights: float) -> _Pace:
    count = len(group)
    center = sum(moment for moment, _ in group) / count
    squares = sum((moment - center) ** 2 for moment, _ in group) + _USUAL_COUNT * _USUAL_SPREAD**2
    # The mean of a few is itself uncertain; and a logistic distribution of scale 1 spreads about twice as far.
    deviation = math.sqrt(squares / (count - 1 + _USUAL_COUNT) * (1 + 1 / count))
    return _Pace(sum(weight for _, weight in group) / all_weights, center, deviation / 2)
