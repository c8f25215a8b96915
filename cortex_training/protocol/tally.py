"""How many requests a call made, and how often they had to be sent. Counted where they are sent, read by telemetry."""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass


@dataclass(slots=True)
class Tally:
    """`attempts` less `requests` is the number of times that something was sent again."""

    requests: int = 0
    attempts: int = 0


current: ContextVar[Tally | None] = ContextVar("cortex_training_tally", default=None)
"""The tally of the outermost call of this thread or asyncio task, None if nobody counts."""


def count(*, requests: int = 0, attempts: int = 0) -> None:
    tally = current.get()
    if tally is not None:
        tally.requests += requests
        tally.attempts += attempts
