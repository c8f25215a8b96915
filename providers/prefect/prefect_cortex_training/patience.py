"""A Prefect server that restarts is no reason for a flow to fail: its GPUs work on meanwhile."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import httpx
from prefect.logging import get_logger

P = ParamSpec("P")
R = TypeVar("R")

SERVER_AWAY_S = 180.0
"""How long a server may take to restart."""

_TRY_AGAIN_S = 2.0


def waits_for_server(
    call: Callable[P, Coroutine[Any, Any, R]],
) -> Callable[P, Coroutine[Any, Any, R]]:
    """Make a coroutine function that asks the Prefect server, and may ask twice, wait while nobody listens there.

    Prefect's own client asks again where an answer is late, and gives up at once where a connection is refused.
    """

    @wraps(call)
    async def patient(*args: P.args, **kwargs: P.kwargs) -> R:
        until = time.monotonic() + SERVER_AWAY_S
        told = False
        while True:
            try:
                return await call(*args, **kwargs)
            except httpx.ConnectError as error:
                if time.monotonic() > until:
                    raise
                if not told:
                    get_logger("prefect_cortex_training").warning("the Prefect server is away (%s); waiting", error)
                    told = True
            await asyncio.sleep(_TRY_AGAIN_S)

    return patient
