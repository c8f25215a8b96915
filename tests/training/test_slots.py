"""Only so many runs are under way in one event loop; the others wait in turn, and can be told to stop there."""

from __future__ import annotations

import asyncio

import pytest

from cortex_training.training import RunInterrupted, run
from cortex_training.training import offload as slots


@pytest.fixture
def one_slot(monkeypatch):
    monkeypatch.setattr(slots, "MAX_RUNS", 1)


async def test_the_next_run_begins_when_the_first_has_ended(runs, one_slot, tmp_path):
    began = []

    async def train(name, client):
        await run(runs.plan(root=str(tmp_path / name), steps=2), client, lambda moment: began.append(name))

    async with runs.client() as client:
        await asyncio.gather(train("a", client), train("b", client))
    assert set(began) == {"a", "b"}
    assert began == sorted(began)


async def test_one_that_is_told_to_stop_while_it_waits_claims_nothing_and_takes_no_place(runs, one_slot, tmp_path):
    stop = asyncio.Event()
    async with runs.client() as client:
        async with slots.run_slot() as free:
            assert free
            waiting = asyncio.ensure_future(run(runs.plan(), client, stop=stop))
            await asyncio.sleep(0.05)
            stop.set()
            with pytest.raises(RunInterrupted, match="before it began"):
                await asyncio.wait_for(waiting, 30)
            cancelled = asyncio.ensure_future(run(runs.plan(), client))
            await asyncio.sleep(0.05)
            cancelled.cancel()
            await asyncio.wait({cancelled})
        assert not (tmp_path / "run").exists()
        async with asyncio.timeout(30):
            async with slots.run_slot() as free:
                assert free


async def test_a_place_that_comes_in_the_moment_of_a_cancellation_is_not_lost(one_slot):
    first = slots.run_slot()
    await first.__aenter__()

    async def wait():
        async with slots.run_slot():
            await asyncio.sleep(60)

    waiting = asyncio.ensure_future(wait())
    await asyncio.sleep(0.05)
    await first.__aexit__(None, None, None)
    waiting.cancel()
    await asyncio.wait({waiting})
    async with asyncio.timeout(30):
        async with slots.run_slot() as free:
            assert free
