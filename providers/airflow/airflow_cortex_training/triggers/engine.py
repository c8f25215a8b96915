"""The thread that training runs live in, next to the triggerer's own event loop.

A run must survive what the triggerer does to its tasks. At shutdown Airflow cancels *every* task of its loop, also
one that is shielded because it stands between a POST and the journal record of its answer; and a user's kill is
repeated once a second. In a loop of its own a run is stopped by being asked, ends what it has in flight, and releases
the root for its successor. The other way round, hashing a frame in here does not hold up a thousand waits out there.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import threading
from collections.abc import Awaitable, Callable

from cortex_training.training.progress import TrainingResult

STOP_S = 8.0
"""How long a run that was asked to stop is waited for; Airflow ends the process 10 s after it asked."""

RunCoroutine = Callable[[asyncio.Event], Awaitable[TrainingResult]]


class EngineRun:
    """One run in the engine's loop, seen from another thread or loop."""

    def __init__(self, start: RunCoroutine) -> None:
        self._loop = _engine_loop()
        self._stop = asyncio.Event()
        self.future: concurrent.futures.Future[TrainingResult] = asyncio.run_coroutine_threadsafe(
            _awaited(start, self._stop), self._loop
        )

    def ask_to_stop(self) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)

    async def result(self) -> TrainingResult:
        """The run's result, or what it raised. Cancelling this wait does not touch the run."""
        return await asyncio.shield(self._local())

    async def ended(self, timeout_s: float = STOP_S) -> bool:
        """Wait until the run has ended, however it did; False when it has not within `timeout_s` seconds."""
        done, _ = await asyncio.wait({self._local()}, timeout=timeout_s)
        return bool(done)

    def _local(self) -> asyncio.Future[TrainingResult]:
        # Never awaited bare: cancelling a wrapped future cancels what it wraps.
        local = asyncio.wrap_future(self.future)
        # Nobody may ask it for the outcome; without a look asyncio would report an exception as lost.
        local.add_done_callback(lambda done: done.cancelled() or done.exception())
        return local


async def _awaited(start: RunCoroutine, stop: asyncio.Event) -> TrainingResult:
    return await start(stop)


_lock = threading.Lock()
_loop: asyncio.AbstractEventLoop | None = None
_owner = 0


def _engine_loop() -> asyncio.AbstractEventLoop:
    """This process's engine loop, started at its first use. A forked child gets its own: threads survive no fork."""
    global _loop, _owner
    with _lock:
        if _loop is None or _owner != os.getpid():
            _loop = asyncio.new_event_loop()
            _owner = os.getpid()
            threading.Thread(target=_loop.run_forever, name="cortex-training-engine", daemon=True).start()
        return _loop
