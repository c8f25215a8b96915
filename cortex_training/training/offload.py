"""Blocking work of a run, kept off the event loop that hosts it.

The loop may be the triggerer's, with a thousand other waits on it: files are synced, frames built and hashes taken in
one small pool for the whole process, and only so many runs may be under way at once.
"""

from __future__ import annotations

import asyncio
import functools
import weakref
from collections.abc import Callable, Coroutine
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


def run_slot() -> asyncio.Semaphore:
    """The semaphore that bounds the runs of this event loop."""
    loop = asyncio.get_running_loop()
    if loop not in _SLOTS:
        _SLOTS[loop] = asyncio.Semaphore(MAX_RUNS)
    return _SLOTS[loop]
