"""When to look: late by little, for few looks, whatever the durations are like."""

from __future__ import annotations

import math
import random

import pytest

from cortex_training.protocol.durations import Durations
from cortex_training.protocol.pace import Bounds, Pace

RTT_S = 0.01


def wait_for(duration_s: float, durations: Durations, chance: random.Random) -> tuple[float, int]:
    """How late a request of this duration is noticed, and after how many looks."""
    pace = Pace(Bounds(), chance, durations.recent())
    now = pending_until = 0.0
    looks = 0
    if pace.is_too_early(now):
        now += pace.delay_s(now)
    while True:
        asked = now
        now += RTT_S
        looks += 1
        if asked >= duration_s:
            durations.observe(pending_until, now)
            return now - duration_s, looks
        pending_until = asked
        now += pace.delay_s(now)


def wait_for_all(seconds: list[float], durations: Durations | None = None) -> list[tuple[float, int]]:
    """For each request, one after the other: late by which share of its duration, after how many looks."""
    chance, durations = random.Random(3), durations if durations is not None else Durations()
    noticed = []
    for duration in seconds:
        late_s, looks = wait_for(duration, durations, chance)
        noticed.append((late_s / duration, looks))
    return noticed


def varying(scale_s: float, sigma: float, count: int, seed: int = 11) -> list[float]:
    chance = random.Random(seed)
    return [scale_s * math.exp(sigma * chance.gauss(0, 1)) for _ in range(count)]


STEADY = [10.0] * 100
BY_A_TENTH = varying(10, 0.1, 400)
BY_A_THIRD = varying(10, 0.3, 400)
DOUBLED = varying(10, 0.1, 50) + varying(20, 0.1, 50)
HALVED = varying(10, 0.1, 50) + varying(5, 0.1, 50)
EVERY_EIGHTH_LONGER = [seconds * (1.6 if n % 8 == 0 else 1.0) for n, seconds in enumerate(varying(10, 0.1, 400))]
ONE_OUTLIER = [seconds * (5.0 if n == 30 else 1.0) for n, seconds in enumerate(varying(10, 0.1, 60))]


@pytest.mark.parametrize("scale", [0.3, 1.0])
@pytest.mark.parametrize(
    ("seconds", "late", "looks"),
    [
        pytest.param(STEADY, 0.014, 6.0, id="steady"),
        pytest.param(BY_A_TENTH, 0.022, 8.5, id="by-a-tenth"),
        pytest.param(BY_A_THIRD, 0.045, 11.5, id="by-a-third"),
        pytest.param(DOUBLED, 0.026, 10.0, id="doubled"),
        pytest.param(HALVED, 0.036, 8.5, id="halved"),
        pytest.param(EVERY_EIGHTH_LONGER, 0.03, 10.0, id="every-eighth-longer"),
        pytest.param(ONE_OUTLIER, 0.028, 10.0, id="one-outlier"),
    ],
)
def test_ends_are_noticed_soon_for_few_looks(scale: float, seconds: list[float], late: float, looks: float) -> None:
    # The service's answers take their time, which is a larger share of a short request.
    scaled = [one * scale for one in seconds]
    noticed = wait_for_all(scaled)
    answering = RTT_S / (sum(scaled) / len(scaled))
    assert sum(share for share, _ in noticed) / len(noticed) <= late + answering
    assert sum(count for _, count in noticed) / len(noticed) <= looks


def test_a_steady_request_is_noticed_within_a_twentieth() -> None:
    for seconds in (1.0, 10.0, 60.0, 600.0):
        noticed = wait_for_all([seconds] * 20)[4:]
        assert max(share for share, _ in noticed) <= 0.05


def test_a_new_pace_is_known_after_two_requests() -> None:
    for factor in (0.5, 2.0, 5.0):
        durations = Durations()
        wait_for_all([10.0] * 12, durations)
        noticed = wait_for_all([10.0 * factor] * 12, durations)
        assert max(share for share, _ in noticed[3:]) <= 0.05
        assert max(looks for _, looks in noticed[3:]) <= 16


def test_one_outlier_does_not_spoil_the_next_waits() -> None:
    durations = Durations()
    wait_for_all([10.0] * 12, durations)
    ((late, looks),) = wait_for_all([50.0], durations)
    assert late <= 0.1
    assert looks <= 40
    assert max(late for late, _ in wait_for_all([10.0] * 12, durations)) <= 0.05


@pytest.mark.parametrize("seconds", [0.2, 1.0, 5.0, 20.0, 100.0])
def test_a_request_of_which_nothing_is_known_is_noticed_in_time(seconds: float) -> None:
    ((late, looks),) = wait_for_all([seconds])
    assert late <= 0.3
    assert looks <= 8 + 20 * max(0.0, math.log10(seconds / 0.2))


def test_every_delay_is_within_the_bounds_whatever_was_seen() -> None:
    chance = random.Random(3)
    for remembered in ((), (1e-9,), (1e9,), (0.1, 5.0, 4000.0), (4000.0, 0.1)):
        for bounds in (Bounds(), Bounds(2.0), Bounds(None, 3.0), Bounds(1.0, 1.0), Bounds(0.5, 6.0, 1.25)):
            pace = Pace(bounds, chance, remembered)
            for elapsed in (0.0, 1e-6, 0.3, 7.0, 5000.0, 1e9):
                assert bounds.floor_s - 1e-9 <= pace.delay_s(elapsed) <= bounds.ceiling_s or bounds.multiplier


def test_a_request_done_at_the_first_look_makes_the_next_look_earlier() -> None:
    durations = Durations()
    durations.observe(0.0, 10.0)
    assert durations.recent() == (7.5,)


def test_a_first_look_that_came_late_teaches_nothing() -> None:
    """Such as one at a request that nobody waited for at first."""
    durations = Durations()
    durations.observe(9.5, 10.5)
    durations.observe(0.0, 3600.0)
    assert durations.recent() == (10.0,)


def test_a_long_fixed_schedule_does_not_overflow() -> None:
    pace = Pace(Bounds(0.5, 6.0, 1e300), random.Random(1))
    assert [pace.delay_s(0.0) for _ in range(3)] == [0.5, 6.0, 6.0]
