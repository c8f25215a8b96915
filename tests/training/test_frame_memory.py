"""Frames of all runs of a process stay within so many bytes, in however many event loops the runs are."""

import asyncio
from concurrent.futures import ThreadPoolExecutor

import pytest

from cortex_training.datasets import Dataset
from cortex_training.training import RunFailed, RunInterrupted, run, status
from cortex_training.training import frame_memory as memory
from cortex_training.training.frame_memory import FrameMemory
from cortex_training.training.frames import Frames


async def soon(awaitable):
    async with asyncio.timeout(10):
        return await awaitable


async def waits(task):
    await asyncio.sleep(0.05)
    return not task.done()


async def test_who_finds_no_room_waits_in_turn():
    shared = FrameMemory(100)
    await soon(shared.take(60))
    large = asyncio.create_task(shared.take(90))
    assert await waits(large)
    small = asyncio.create_task(shared.take(10))
    assert await waits(small), "it would fit, and the large one would never have its turn"
    shared.give_back(60)
    await soon(asyncio.gather(large, small))
    shared.give_back(100)
    assert shared.taken == 0


async def test_one_that_is_larger_than_everything_goes_alone():
    shared = FrameMemory(100)
    await soon(shared.take(1))
    large = asyncio.create_task(shared.take(1000))
    assert await waits(large)
    shared.give_back(1)
    await soon(large)
    small = asyncio.create_task(shared.take(1))
    assert await waits(small)
    shared.give_back(1000)
    await soon(small)


async def test_frames_that_are_built_ahead_leave_room_for_those_that_are_needed():
    shared = FrameMemory(100)
    assert shared.take_ahead(40)
    assert shared.take_ahead(35)
    assert not shared.take_ahead(1)
    await soon(shared.take(25))
    waiting = asyncio.create_task(shared.take(50))
    assert await waits(waiting)
    shared.give_back(75)
    await soon(waiting)
    shared.give_back(75)
    await soon(shared.take(50))
    waiting = asyncio.create_task(shared.take(60))
    assert await waits(waiting)
    assert not shared.take_ahead(1), "nothing is built ahead while somebody waits"
    waiting.cancel()


async def test_one_that_waits_no_more_holds_up_nobody_and_takes_nothing():
    shared = FrameMemory(100)
    await soon(shared.take(60))
    first, second = (asyncio.create_task(shared.take(size)) for size in (90, 40))
    assert await waits(second)
    first.cancel()
    await soon(second)
    third = asyncio.create_task(shared.take(70))
    assert await waits(third)
    # It gets its room in the moment in which it is cancelled.
    shared.give_back(100)
    third.cancel()
    await asyncio.wait({third})
    assert third.cancelled()
    assert shared.taken == 0


def test_runs_in_several_event_loops_share_it():
    shared = FrameMemory(100)
    most = []

    async def use(size):
        await shared.take(size)
        most.append(shared.taken)
        await asyncio.sleep(0.001)
        shared.give_back(size)

    async def use_often(size):
        for _ in range(50):
            await asyncio.gather(use(size), use(size))

    with ThreadPoolExecutor(4) as pool:
        for done in [pool.submit(asyncio.run, use_often(size)) for size in (20, 35, 50, 65)]:
            done.result(60)
    assert len(most) == 400
    assert 65 < max(most) <= 100
    assert shared.taken == 0


class Batches:
    """Frames of ten bytes; notes how many there were room for when each was built."""

    largest_frame = 10

    def __init__(self, shared):
        self.built = []
        self._shared = shared

    def frame(self, step, micro_batch):
        self.built.append((step, self._shared.taken))
        if step == 99:
            raise ValueError("a torn shard")
        return b"0123456789"

    def sequences(self, step, micro_batch):
        return []


class TestFramesOfOneRun:
    async def test_room_is_taken_before_a_frame_is_built_and_given_back_once_it_is_sent(self):
        shared = FrameMemory(100)
        batches = Batches(shared)
        frames = Frames(batches, 1, memory=shared)
        for step in (1, 2, 3):
            await soon(frames.frame(step, 0))
            assert shared.taken == 20, "this one, and the next"
            frames.sent()
            frames.sent()
            assert shared.taken == 10
        await frames.drop()
        assert shared.taken == 0
        assert [step for step, _ in batches.built] == [1, 2, 3, 4]
        assert all(taken >= 10 for _, taken in batches.built)

    async def test_where_there_is_no_room_for_the_next_one_each_is_built_when_it_is_needed(self):
        shared = FrameMemory(13)
        batches = Batches(shared)
        frames = Frames(batches, 1, memory=shared)
        for step in (1, 2, 3):
            await soon(frames.frame(step, 0))
            assert shared.taken == 10
        assert batches.built == [(1, 10), (2, 10), (3, 10)]
        await frames.drop()
        assert shared.taken == 0

    async def test_a_jump_waits_for_nothing_that_the_run_itself_holds(self):
        shared = FrameMemory(30)
        frames = Frames(Batches(shared), 1, memory=shared)
        await soon(frames.frame(1, 0))
        other = asyncio.create_task(shared.take(20))
        assert await waits(other)
        jump = asyncio.create_task(frames.frame(7, 0))
        await soon(other)
        shared.give_back(20)
        await soon(jump)
        await frames.drop()
        assert shared.taken == 0

    async def test_a_host_that_gives_up_in_the_moment_the_room_comes_leaves_nothing_taken(self):
        shared = FrameMemory(10)
        await soon(shared.take(10))
        stop = asyncio.Event()

        async def until_stopped(work):
            task = asyncio.ensure_future(work)
            await stop.wait()
            shared.give_back(10)
            await asyncio.wait({task})
            raise RunInterrupted("stopped")

        frames = Frames(Batches(shared), 1, wait=until_stopped, memory=shared)
        waiting = asyncio.create_task(frames.frame(1, 0))
        assert await waits(waiting)
        stop.set()
        with pytest.raises(RunInterrupted):
            await soon(waiting)
        assert shared.taken == 10
        await frames.drop()
        assert shared.taken == 0

    @pytest.mark.parametrize("step", [98, 99])
    async def test_one_that_cannot_be_built_leaves_nothing_taken(self, step):
        shared = FrameMemory(100)
        frames = Frames(Batches(shared), 1, memory=shared)
        for fine in range(step, 99):
            await soon(frames.frame(fine, 0))
        with pytest.raises(ValueError, match="torn"):
            await soon(frames.frame(99, 0))
        await frames.drop()
        assert shared.taken == 0


def test_the_largest_frame_is_known_before_any_is_built(manifest):
    dataset = Dataset.open(manifest)
    batches = dataset.batches(3, 2, 0)
    sizes = [len(batches.frame(step, m)) for step in range(1, 2 * batches.steps_per_pass) for m in range(2)]
    assert 0.9 * batches.largest_frame - 4096 < max(sizes) <= batches.largest_frame


@pytest.fixture
def room_for_one(monkeypatch, runs):
    shared = memory.FRAMES
    assert shared.taken == 0
    monkeypatch.setattr(shared, "limit", Dataset.open(runs.manifest).batches(2, 2, 0).largest_frame)
    yield shared
    assert shared.taken == 0


async def test_runs_with_room_for_one_frame_train_all_the_same(runs, room_for_one, tmp_path):
    async with runs.client() as client:
        plans = [runs.plan(root=str(tmp_path / name), steps=3) for name in "abc"]
        await asyncio.gather(*(run(plan, client) for plan in plans))
    losses = [status(plan.root).state.losses for plan in plans]
    assert losses[0] == losses[1] == losses[2]


async def test_a_run_that_waits_for_room_heeds_its_host(runs, room_for_one):
    stop = asyncio.Event()
    await room_for_one.take(1)

    def progress(seen):
        if seen.stage == "job":
            asyncio.get_running_loop().call_later(1.0, stop.set)

    async with runs.client() as client:
        async with asyncio.timeout(60):
            with pytest.raises(RunInterrupted):
                await run(runs.plan(), client, progress, stop=stop)
    state = status(runs.root).state
    assert state.released
    assert not state.current.operations
    room_for_one.give_back(1)
    assert (await asyncio.to_thread(runs.run)).segments == 1


def test_a_run_whose_job_is_lost_gives_its_frames_back_before_it_waits_for_another(runs, proxy, monkeypatch):
    held = []
    proxy.add(r"^POST .*/cortex-training$", "forward", skip=1, before=lambda: held.append(memory.FRAMES.taken))
    proxy.add(r"^POST .*/step$", "answer", skip=1, status=503, body={"message": "zone is restarting, try again"})
    assert runs.run().segments == 2
    assert held == [0]


def test_a_run_that_fails_leaves_nothing_taken(runs, proxy, room_for_one):
    proxy.add(r"^POST .*/forward-backward$", "answer", skip=1, status=400, body={"message": "cursed"})
    with pytest.raises(RunFailed, match="cursed"):
        runs.run()
