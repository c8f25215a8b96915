"""Frames of a run, the next one built while the service computes the last."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from cortex_training.datasets import Batches
from cortex_training.training.offload import offload

Place = tuple[int, int]
"""A step of an undisturbed run, and a micro-batch of it."""


class Frames:
    """Frames by (step, micro-batch), with one frame built ahead in the pool.

    At most two frames are in memory: the one that is being sent and the next one. `position` says which step's batches
    a step trains on, which is its own unless some were left out after a divergence.
    """

    def __init__(
        self, batches: Batches, micro_batches_per_step: int, position: Callable[[int], int] = lambda step: step
    ) -> None:
        self._batches = batches
        self._per_step = micro_batches_per_step
        self._position = position
        self._ahead: tuple[Place, asyncio.Task[tuple[bytes, int]]] | None = None
        self._tokens: dict[Place, int] = {}

    async def frame(self, step: int, micro_batch: int) -> bytes:
        """The frame of a micro-batch; the one after it is begun before this returns."""
        wanted = (self._position(step), micro_batch)
        if self._ahead is not None and self._ahead[0] == wanted:
            built, tokens = await self._ahead[1]
        else:
            # A recovery jumps back; what was built for another position is of no use.
            await self.drop()
            built, tokens = await offload(self._build, wanted)
        self._tokens[wanted] = tokens
        more = micro_batch + 1 < self._per_step
        following = (wanted[0], micro_batch + 1) if more else (self._position(step + 1), 0)
        self._ahead = (following, asyncio.create_task(offload(self._build, following)))
        return built

    async def tokens(self, step: int) -> int:
        """Tokens of a step, padding left out. Counted with its frames, while the service computed, if they were built
        here.
        """
        place = self._position(step)
        counts = [
            self._tokens[place, m] if (place, m) in self._tokens else await offload(self._count, (place, m))
            for m in range(self._per_step)
        ]
        self._tokens = {built: count for built, count in self._tokens.items() if built[0] > place}
        return sum(counts)

    def _build(self, place: Place) -> tuple[bytes, int]:
        return self._batches.frame(*place), self._count(place)

    def _count(self, place: Place) -> int:
        return sum(len(sequence.tokens) for sequence in self._batches.sequences(*place))

    async def drop(self) -> None:
        """Let go of the frame that was built ahead, and of the error that building it may have raised."""
        if self._ahead is not None:
            await asyncio.wait({self._ahead[1]})
            if not self._ahead[1].cancelled():
                self._ahead[1].exception()
            self._ahead = None
