"""What a person is told when a run can't go on, and what a failure leaves behind."""

import asyncio
import dataclasses

import pytest

from cortex_training.aio import AsyncCortexTrainingClient
from cortex_training.publication import PosixStore, PublicationLog, StoreError
from cortex_training.training import RunFailed, RunInterrupted, run, status
from cortex_training.training.driver import Driver
from cortex_training.training.last_words import last_error_lines
from tests.faults.proxy import ANSWER, DROP_BEFORE


class ScriptedLog:
    """A client that only tails logs."""

    def __init__(self, answer):
        self.answer = answer

    async def tail_logs(self, job_id, **options):
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


def test_the_last_error_lines_are_those_of_level_error():
    entries = [
        {"level": "INFO", "msg": "step 1"},
        *({"level": "ERROR", "msg": f"CUDA out of memory {n}"} for n in range(9)),
    ]
    lines = asyncio.run(last_error_lines(ScriptedLog({"entries": entries}), "job"))
    assert lines == [f"CUDA out of memory {n}" for n in range(4, 9)]


@pytest.mark.parametrize("answer", [{}, {"entries": []}, RunFailed("no log"), TimeoutError()])
def test_a_log_that_cannot_be_read_adds_nothing(answer):
    assert asyncio.run(last_error_lines(ScriptedLog(answer), "job")) == []


def test_a_run_that_gives_up_says_what_the_services_log_says_and_cancels_its_job(runs, proxy):
    proxy.add(
        r"^POST .*/operation$",
        ANSWER,
        times=9,
        status=200,
        body={"entries": [{"level": "ERROR", "msg": "expert 3 caught fire"}], "next_cursor": "1", "eof": True},
    )
    plan = runs.plan(learning_rate={"schedule": "constant", "peak": 1e30}, save_every_steps=1)
    with pytest.raises(RunFailed, match="expert 3 caught fire"):
        runs.run(plan)


def test_a_run_that_cannot_even_cancel_its_job_says_why_it_failed(runs, proxy, monkeypatch):
    impatient = AsyncCortexTrainingClient(runs.base_url, runs.service.database, runs.service.schema, retry_budget_s=0.1)
    rule = proxy.add(r"^POST .*(/forward-backward|:cancel)$", DROP_BEFORE, skip=1, times=10**6)
    with monkeypatch.context() as patch:
        patch.setattr(runs, "client", lambda: impatient)
        with pytest.raises(RunFailed, match=r"(?s)did not become a request .* within 1 s.*is still alive, because"):
            runs.run(runs.plan(steps=1, patience_s=1))
    proxy.rules.remove(rule)
    result = runs.run(runs.plan(steps=1))
    assert (result.steps, result.segments) == (1, 1)


def test_old_publications_that_cannot_be_removed_end_no_run(runs, monkeypatch):
    remove = PosixStore.remove

    def refused(self, name):
        if name.startswith("pub/"):
            raise StoreError(f"remove {name}: Permission denied; check owner and mode")
        remove(self, name)

    monkeypatch.setattr(PosixStore, "remove", refused)
    runs.run(runs.plan(steps=3, micro_batches_per_step=1, save_every_steps=1, keep_publications=1))
    assert [entry.step for entry in PublicationLog(runs.root).entries()] == [1, 2, 3]
    assert any("could not be removed: remove pub/" in moment.message for moment in runs.progress)


def test_a_finished_run_that_cannot_be_released_is_finished_all_the_same(runs, monkeypatch):
    create = PosixStore.create

    def full(self, name, data=b""):
        if b'"type": "released"' in data:
            raise StoreError(f"write {name}: No space left on device")
        return create(self, name, data)

    with monkeypatch.context() as patch:
        patch.setattr(PosixStore, "create", full)
        result = runs.run()
    assert (result.steps, result.entry) == (6, PublicationLog(runs.root).latest().name)
    assert runs.progress[-1].stage == "done"
    assert "No space left on device" in runs.progress[-1].message
    assert not status(runs.root).state.released
    assert runs.run() == dataclasses.replace(result, epoch=2)


def test_a_run_that_was_stopped_before_its_job_existed_creates_none(runs, monkeypatch):
    claim = Driver.claim

    async def claim_and_stop(*arguments, stop, **options):
        driver = await claim(*arguments, stop=stop, **options)
        stop.set()
        return driver

    monkeypatch.setattr(Driver, "claim", claim_and_stop)

    async def main():
        stop = asyncio.Event()
        async with runs.client() as client:
            with pytest.raises(RunInterrupted):
                await run(runs.plan(), client, stop=stop)

    asyncio.run(main())
    (job_id,) = status(runs.root).state.job_ids

    async def look():
        async with runs.client() as client:
            return [job["job_id"] for job in await client.list_jobs()]

    assert job_id not in asyncio.run(look())
