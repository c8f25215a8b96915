"""The thread of a sub-job, and in which order it does what it is asked."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


class ShuffledExecutor(Executor):
    """One thread that takes any of the waiting calls next, not the oldest. The same arrivals give the same picks."""

    def __init__(self, thread_name: str) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=thread_name)
        self._random = random.Random(0)
        self._lock = threading.Lock()
        self._waiting: list[tuple[Future[Any], Callable[[], Any]]] = []

    def submit(self, fn: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> Future[R]:
        future: Future[R] = Future()
        with self._lock:
            self._waiting.append((future, lambda: fn(*args, **kwargs)))
            # One turn for each call; which call gets it is decided when it comes.
            self._thread.submit(self._take_turn)
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        if cancel_futures:
            with self._lock:
                waiting, self._waiting = self._waiting, []
            for future, _ in waiting:
                future.cancel()
        self._thread.shutdown(wait, cancel_futures=cancel_futures)

    def _take_turn(self) -> None:
        with self._lock:
            if not self._waiting:
                return
            future, call = self._waiting.pop(self._random.randrange(len(self._waiting)))
        if not future.set_running_or_notify_cancel():
            return
        try:
            result = call()
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(result)


def new_worker(order: str, thread_name: str) -> Executor:
    """One thread for a sub-job; `order` is an answer to the question ``request-order``."""
    if order == "shuffled":
        return ShuffledExecutor(thread_name)
    return ThreadPoolExecutor(1, thread_name_prefix=thread_name)
