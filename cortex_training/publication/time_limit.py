"""Stop work at its time limit wherever it is: in a name lookup, a login, a reply that comes a byte at a time.

Limits of single reads and of retries don't add up to a limit of the work. Only a signal reaches all of it.
"""

from __future__ import annotations

import contextlib
import math
import signal
import threading
from collections.abc import Iterator

# An exception may get lost where Python ignores them (a finalizer). It is raised again, after time to tidy up.
_AGAIN_S = 10.0


class OutOfTime(BaseException):
    """The time limit has passed. Libraries that take every Exception for a fault of the network don't catch it."""


@contextlib.contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise OutOfTime in the block once it took so many seconds (``inf``: never). For the main thread of a process.

    Uses SIGALRM; a timer that was set before goes on afterwards.
    """
    if math.isinf(seconds) or threading.current_thread() is not threading.main_thread():
        # Another thread can't be interrupted; the store's own limit, kept between requests, is what remains.
        yield
        return

    def ring(number: int, frame: object) -> None:
        raise OutOfTime

    handler = signal.signal(signal.SIGALRM, ring)
    timer = signal.setitimer(signal.ITIMER_REAL, seconds, _AGAIN_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, *timer)
        signal.signal(signal.SIGALRM, handler)
