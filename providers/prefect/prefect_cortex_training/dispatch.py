"""One coroutine for both worlds: how blocking callers run it, and which of two methods a caller meant.

Everything remote in this package is written once, as a coroutine. Prefect has a decorator for the second half of this
module, in a private module that may move any day; the rule it follows is small enough to be kept here.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from functools import wraps
from typing import Any, ParamSpec, TypeVar

from prefect.context import get_run_context
from prefect.exceptions import MissingContextError

P = ParamSpec("P")
R = TypeVar("R")

UNWIND_S = 20.0
"""How long a coroutine may take to put its affairs in order after its caller was told to stop."""


def run_to_end(coroutine: Coroutine[Any, Any, R]) -> R:
    """Run `coroutine` on an event loop of its own, in a thread of its own, with the caller's context; returns its
    result.

    The thread keeps the caller free: a caller that is inside an event loop could not run a second one, and in a caller
    that is the main thread Prefect raises its termination signal wherever the code happens to be, which inside a loop
    could be a callback that swallows it. Here it arrives at the wait below, the coroutine is cancelled, and the signal
    goes on its way once that is done.
    """
    done: Future[R] = Future()
    started: Future[Callable[[], None]] = Future()
    context = contextvars.copy_context()

    async def supervised() -> R:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None
        started.set_result(lambda: _cancel(loop, task))
        return await coroutine

    def body() -> None:
        try:
            done.set_result(context.run(asyncio.run, supervised()))
        except BaseException as error:
            done.set_exception(error)

    thread = threading.Thread(target=body, name="cortex-training", daemon=True)
    try:
        # Started in here: a signal between the start and the wait must cancel the coroutine too.
        thread.start()
        return done.result()
    except BaseException:
        if thread.ident is not None and not done.done():
            started.result(UNWIND_S)()
            thread.join(UNWIND_S)
        raise


def _cancel(loop: asyncio.AbstractEventLoop, task: asyncio.Task[Any]) -> None:
    # The loop may be closed by now, which is what was wanted.
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(task.cancel)


def caller_is_async() -> bool:
    """Whether the surrounding flow or task is a coroutine; outside any run, whether an event loop is running."""
    try:
        context = get_run_context()
    except MissingContextError:
        with contextlib.suppress(RuntimeError):
            asyncio.get_running_loop()
            return True
        return False
    runnable = getattr(context, "task", None) or getattr(context, "flow", None)
    return bool(getattr(runnable, "isasync", True))


def dual(asynchronous: Callable[P, Coroutine[Any, Any, R]]) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Give a blocking method its asynchronous counterpart: callers in async flows, tasks and loops get a coroutine.

    ``_sync=True`` or ``_sync=False`` decides by hand; ``method.aio`` is the asynchronous one.
    """

    def decorate(blocking: Callable[P, R]) -> Callable[P, R]:
        @wraps(blocking)
        def method(*args: P.args, **kwargs: P.kwargs) -> R:
            by_hand = kwargs.pop("_sync", None)
            use_async = caller_is_async() if by_hand is None else not by_hand
            return asynchronous(*args, **kwargs) if use_async else blocking(*args, **kwargs)  # type: ignore[return-value]

        method.aio = asynchronous  # type: ignore[attr-defined]
        return method

    return decorate
