from __future__ import annotations

import asyncio
import contextvars
import os
import signal
import threading

import pytest
from prefect import flow

from demo.prefect_server import PrefectServer
from prefect_cortex_training.dispatch import caller_is_async, dual, run_to_end

NAME: contextvars.ContextVar[str] = contextvars.ContextVar("NAME", default="nobody")


async def who() -> str:
    await asyncio.sleep(0)
    return NAME.get()


def test_a_coroutine_sees_the_callers_context() -> None:
    NAME.set("somebody")
    assert run_to_end(who()) == "somebody"


async def test_a_coroutine_runs_to_its_end_inside_a_running_loop() -> None:
    NAME.set("in a loop")
    assert run_to_end(who()) == "in a loop"


def test_errors_arrive_as_they_were_raised() -> None:
    async def fails() -> None:
        raise LookupError("not there")

    with pytest.raises(LookupError, match="not there"):
        run_to_end(fails())


def test_a_signal_in_the_caller_cancels_the_coroutine_and_waits_for_its_end() -> None:
    """As when a worker ends a flow run: what the signal handler raises must not leave a coroutine running behind it."""

    class Signalled(BaseException):
        pass

    def raise_it(number: int, frame: object) -> None:
        raise Signalled

    ended = threading.Event()

    async def works() -> None:
        try:
            os.kill(os.getpid(), signal.SIGUSR1)
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            await asyncio.sleep(0.05)
            ended.set()
            raise

    before = signal.signal(signal.SIGUSR1, raise_it)
    try:
        with pytest.raises(Signalled):
            run_to_end(works())
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert ended.is_set()


class Waiter:
    async def await_it(self) -> str:
        return "async"

    @dual(await_it)
    def wait_it(self) -> str:
        return "sync"


def test_a_dual_method_blocks_outside_a_loop() -> None:
    assert not caller_is_async()
    assert Waiter().wait_it() == "sync"


async def test_a_dual_method_is_awaited_inside_a_loop() -> None:
    assert caller_is_async()
    assert await Waiter().wait_it() == "async"  # type: ignore[misc]
    assert Waiter().wait_it(_sync=True) == "sync"  # type: ignore[call-arg]


async def test_a_dual_method_follows_the_flow_and_not_the_loop_around_it(on_server: PrefectServer) -> None:
    @flow
    def blocking() -> str:
        return Waiter().wait_it()

    @flow
    async def awaiting() -> str:
        return await Waiter().wait_it()  # type: ignore[misc, no-any-return]

    assert await asyncio.to_thread(blocking) == "sync"
    assert await awaiting() == "async"
