"""Frames of a run, the next one built while the service computes the last."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from cortex_training.datasets import Batches
from cortex_training.training.frame_memory import FRAMES, FrameMemory
from cortex_training.training.offload import offload

Place = tuple[int, int]
"""A step of an undisturbed run, and a micro-batch of it."""


class Frames:
    """Frames by (step, micro-batch), with one frame built ahead in the pool where `memory` has room for it.

    At most two frames are in memory: the one that is being sent and the next one. `position` says which step's batches
    a step trains on, which is its own unless some were left out after a divergence. `wait` waits for room in `memory`,
    and may raise to give up.
    """

    def __init__(
        self,
        batches: Batches,
        micro_batches_per_step: int,
        position: Callable[[int], int] = lambda step: step,
        *,
        wait: Callable[[Awaitable[None]], Awaitable[Any]] = lambda room: room,
        memory: FrameMemory = FRAMES,
    ) -> None:
        self._batches = batches
        self._per_step = micro_batches_per_step
        self._position = position
        self._wait = wait
        self._memory = memory
        self._size = batches.largest_frame
        self._sending = False
        self._ahead: tuple[Place, asyncio.Task[tuple[bytes, int]]] | None = None
        self._tokens: dict[Place, int] = {}

    @contextlib.asynccontextmanager
    async def sending(self, step: int, micro_batch: int) -> AsyncIterator[bytes]:
        """The frame of a micro-batch, to be sent in the block."""
        try:
            yield await self.frame(step, micro_batch)
        finally:
            self.sent()

    async def frame(self, step: int, micro_batch: int) -> bytes:
        """The frame of a micro-batch, in memory until it is `sent`; the one after it is begun before this returns."""
        self.sent()
        wanted = (self._position(step), micro_batch)
        if self._ahead is not None and self._ahead[0] == wanted:
            building, self._ahead, self._sending = self._ahead[1], None, True
            built, tokens = await building
        else:
            # A recovery jumps back; what was built for another position is of no use.
            await self.drop()
            await self._wait(self._take())
            built, tokens = await offload(self._build, wanted)
        self._tokens[wanted] = tokens
        more = micro_batch + 1 < self._per_step
        following = (wanted[0], micro_batch + 1) if more else (self._position(step + 1), 0)
        if self._memory.take_ahead(self._size):
            self._ahead = (following, asyncio.create_task(offload(self._build, following)))
        return built

    async def _take(self) -> None:
        await self._memory.take(self._size)
        # In the same task: whoever waits for it may be cancelled in this very moment, and then drops it.
        self._sending = True

    def sent(self) -> None:
        """The last frame is not needed any more."""
        if self._sending:
            self._sending = False
            self._memory.give_back(self._size)

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
        """Let go of all frames, and of the error that building one ahead may have raised."""
        self.sent()
        if self._ahead is None:
            return
        (_, building), self._ahead = self._ahead, None
        try:
            await asyncio.wait({building})
        finally:
            self._memory.give_back(self._size)
        if not building.cancelled():
            building.exception()
