"""Frames built ahead, and what is known of a step whose frames were built."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

from cortex_training.training.frames import Frames


class Batches:
    """Micro-batches of two sequences; notes on which thread what was asked for."""

    largest_frame = 10

    def __init__(self) -> None:
        self.asked: list[tuple[str, int, int]] = []
        self.threads: set[int] = set()

    def frame(self, step: int, micro_batch: int) -> bytes:
        self._note("frame", step, micro_batch)
        return f"{step}.{micro_batch}".encode()

    def sequences(self, step: int, micro_batch: int) -> list[Any]:
        self._note("sequences", step, micro_batch)
        return [SimpleNamespace(tokens=range(step)), SimpleNamespace(tokens=range(10 * micro_batch))]

    def _note(self, what: str, step: int, micro_batch: int) -> None:
        self.asked.append((what, step, micro_batch))
        self.threads.add(threading.get_ident())


async def test_tokens_of_a_step_are_counted_with_its_frames() -> None:
    batches = Batches()
    frames = Frames(batches, 2)  # type: ignore[arg-type]
    for step in (1, 2, 3):
        assert [await frames.frame(step, m) for m in range(2)] == [f"{step}.{m}".encode() for m in range(2)]
        assert await frames.tokens(step) == 2 * step + 10
    await frames.drop()
    assert len(batches.asked) == len(set(batches.asked)), "nothing was built or counted twice"


async def test_tokens_of_a_step_that_another_driver_began_are_counted_too() -> None:
    batches = Batches()
    frames = Frames(batches, 2, lambda step: step + 4)  # type: ignore[arg-type]
    assert await frames.frame(3, 1) == b"7.1"
    assert await frames.tokens(3) == 2 * 7 + 10
    assert await frames.tokens(3) == 2 * 7 + 10
    await frames.drop()
    assert threading.get_ident() not in batches.threads
