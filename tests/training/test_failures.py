"""What a person is told when a run can't go on, and what a failure leaves behind."""

import asyncio

import pytest

from cortex_training.training import RunFailed, RunInterrupted, run, status
from cortex_training.training.last_words import last_error_lines
from tests.faults.proxy import ANSWER


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


def test_a_run_that_was_stopped_before_its_job_existed_creates_none(runs):
    async def main():
        stop = asyncio.Event()
        stop.set()
        async with runs.client() as client:
            with pytest.raises(RunInterrupted):
                await run(runs.plan(), client, stop=stop)

    asyncio.run(main())
    (job_id,) = status(runs.root).state.job_ids

    async def look():
        async with runs.client() as client:
            return [job["job_id"] for job in await client.list_jobs()]

    assert job_id not in asyncio.run(look())
