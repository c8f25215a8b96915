"""Blocking work of a run, kept off the event loop that hosts it.

The loop may be the triggerer's, with a thousand other waits on it: files are synced, frames built and hashes taken in
one small pool for the whole process, and only so many runs may be under way at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import weakref
from collections.abc import AsyncIterator, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ParamSpec, TypeVar

MAX_RUNS = 16
SHIELD_S = 8.0

P = ParamSpec("P")
T = TypeVar("T")

_POOL = ThreadPoolExecutor(max_workers=4, thread_name_prefix="cortex-training-run")
_SLOTS: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = weakref.WeakKeyDictionary()


async def offload(fn: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Run `fn` in the pool. A write that has begun is never abandoned halfway: cancellation waits for it."""
    return await unbroken(asyncio.wrap_future(_POOL.submit(functools.partial(fn, *args, **kwargs))))


async def unbroken(work: Coroutine[Any, Any, T] | asyncio.Future[T]) -> T:
    """Await `work` as one unit: a cancellation is passed on after it ended, or after `SHIELD_S` seconds.

    Protects a POST and the journal record of its answer: cut in between, the next driver could not tell whether it
    was sent.
    """
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        if not task.done():
            await asyncio.wait({task}, timeout=SHIELD_S)
        if task.done() and not task.cancelled():
            task.exception()  # retrieved, so that asyncio does not report it as lost: the cancellation is what counts
        raise


@contextlib.asynccontextmanager
async def run_slot(stop: asyncio.Event | None = None) -> AsyncIterator[bool]:
    """A place among the `MAX_RUNS` runs of this event loop, waited for in turn; False when `stop` was set first.

    A run that was told to stop while it waited must not get the place later: by then its successor drives. One whose
    job waits for GPUs keeps its place: it might get the GPUs and leave them idle, waiting for a place again.
    """
    slots = _SLOTS.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(MAX_RUNS))
    got = asyncio.ensure_future(slots.acquire())
    told = asyncio.ensure_future(stop.wait()) if stop is not None else None
    try:
        await asyncio.wait({got, told} if told else {got}, return_when=asyncio.FIRST_COMPLETED)
        yield got.done() and not (stop is not None and stop.is_set())
    finally:
        if told is not None:
            told.cancel()
        if got.done() and not got.cancelled():
            slots.release()
        else:
            # What is cancelled in the moment it gets a place gives it back by itself.
            got.cancel()
