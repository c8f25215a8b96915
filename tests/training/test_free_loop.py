"""What takes long in a long run is not done in the event loop, which a thousand other waits may share."""

import asyncio
import threading

import pytest

from cortex_training.datasets import batches
from cortex_training.training import cancel_jobs, driver, packs, teardown


@pytest.fixture
def worked_in(monkeypatch):
    """The threads in which each of the functions that grow with a run, or with its dataset, was called."""
    threads = {}

    def watch(module, name):
        function = getattr(module, name)

        def watched(*arguments):
            threads.setdefault(name, set()).add(threading.current_thread())
            return function(*arguments)

        monkeypatch.setattr(module, name, watched)

    watch(driver, "replay")
    watch(driver, "Packer")
    watch(packs, "encode")
    watch(teardown, "replay")
    watch(batches, "_arrays")
    watch(batches, "pass_order")
    return threads


def test_the_loop_does_none_of_what_grows_with_a_run(runs, worked_in, monkeypatch):
    monkeypatch.setattr(packs, "PACK_RECORDS", 10)
    runs.run(runs.plan(steps=2))

    async def tear_down():
        async with runs.client() as client:
            await cancel_jobs(runs.root, client)

    asyncio.run(tear_down())
    assert set(worked_in) == {"replay", "Packer", "encode", "_arrays", "pass_order"}
    assert not [name for name, threads in worked_in.items() if threading.main_thread() in threads]
