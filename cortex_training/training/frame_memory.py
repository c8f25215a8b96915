"""Memory for frames: so many bytes for all runs of a process, in however many event loops they are."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from concurrent.futures import Future


class FrameMemory:
    """Room for frames of `limit` bytes altogether, taken before a frame is built and given back when it is dropped.

    What is built ahead leaves a quarter free, so a frame that is needed now waits for those that are being sent, not
    for a service that computes. Whoever waits holds nothing himself, so nobody waits for ever.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.taken = 0
        self._line: deque[tuple[int, Future[None]]] = deque()
        self._lock = threading.Lock()

    async def take(self, size: int) -> None:
        """Wait, in turn, until `size` bytes are free; until nothing is taken, for a frame that is larger than all."""
        turn: Future[None] = Future()
        with self._lock:
            self._line.append((size, turn))
            self._serve()
        try:
            await asyncio.wrap_future(turn)
        except asyncio.CancelledError:
            if not turn.cancel():
                self.give_back(size)  # the room came in the moment of the cancellation
            else:
                with self._lock:
                    self._serve()
            raise

    def take_ahead(self, size: int) -> bool:
        """Take `size` bytes for a frame that can be built later too; False when there is no room for it now."""
        with self._lock:
            if self._line or self.taken + size > self.limit * 3 // 4:
                return False
            self.taken += size
            return True

    def give_back(self, size: int) -> None:
        with self._lock:
            self.taken -= size
            self._serve()

    def _serve(self) -> None:
        """Let in who is first in line, as long as there is room. With the lock held."""
        while self._line:
            size, turn = self._line[0]
            if self.taken and self.taken + size > self.limit and not turn.cancelled():
                return
            self._line.popleft()
            if turn.set_running_or_notify_cancel():
                self.taken += size
                turn.set_result(None)


FRAMES = FrameMemory(256 * 2**20)
"""Of this process. The arrays that a frame is made from come on top, for as long as it is being built."""
