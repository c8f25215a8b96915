"""When to look: late by little, for few looks."""

from __future__ import annotations

import math
import random

from cortex_training.protocol.pace import Bounds, Durations, Pace


def wait_for(duration_s: float, durations: Durations, chance: random.Random, rtt_s: float = 0.01) -> tuple[float, int]:
    """How late a request of this duration is noticed, and after how many looks."""
    pace = Pace(Bounds(), chance, durations.recent())
    now = pending_until = 0.0
    looks = 0
    if pace.is_too_early(now):
        now += pace.delay_s(now)
    while True:
        asked = now
        now += rtt_s
        looks += 1
        if asked >= duration_s:
            durations.observe(pending_until, now)
            return now - duration_s, looks
        pending_until = asked
        now += pace.delay_s(now)


def test_lognormal_durations_that_double_halfway_are_followed_cheaply() -> None:
    chance = random.Random(11)
    durations = Durations()
    late, looks = [], []
    for index in range(400):
        scale = 10.0 if index < 200 else 20.0
        duration = scale * math.exp(0.1 * chance.gauss(0, 1))
        delay, count = wait_for(duration, durations, chance)
        late.append(delay / duration)
        looks.append(count)
    settled = sorted(late[20:200] + late[220:])
    assert sum(settled) / len(settled) <= 0.05
    assert settled[int(0.99 * len(settled))] <= 0.16
    assert sum(looks) / len(looks) <= 12


def test_every_delay_is_within_the_bounds_whatever_was_seen() -> None:
    chance = random.Random(3)
    for remembered in ((), (1e-9,), (1e9,), (0.1, 5.0, 4000.0)):
        for bounds in (Bounds(), Bounds(2.0), Bounds(None, 3.0), Bounds(1.0, 1.0), Bounds(0.5, 6.0, 1.25)):
            pace = Pace(bounds, chance, remembered)
            for elapsed in (0.0, 1e-6, 0.3, 7.0, 5000.0, 1e9):
                assert bounds.floor_s - 1e-9 <= pace.delay_s(elapsed) <= bounds.ceiling_s or bounds.multiplier


def test_a_request_done_at_the_first_look_makes_the_next_look_earlier() -> None:
    durations = Durations()
    durations.observe(0.0, 10.0)
    assert durations.recent() == (7.5,)


def test_a_long_fixed_schedule_does_not_overflow() -> None:
    pace = Pace(Bounds(0.5, 6.0, 1e300), random.Random(1))
    assert [pace.delay_s(0.0) for _ in range(3)] == [0.5, 6.0, 6.0]
