"""Jobs that were there before the run: handed over to it, somebody else's, or its own, with a save loaded into them."""

import asyncio
import copy
import threading

import pytest

from cortex_training.errors import ConfigurationError
from cortex_training.publication.log import PublicationLog
from cortex_training.training import RunFailed, RunInterrupted, end_run, operations, status
from tests.faults.proxy import DROP_AFTER, DROP_BEFORE, TWICE
from tests.training.conftest import SUB_JOBS
from tests.training.test_bad_nights import DEAD, cancel, foreign_job, jobs, on_client, state_of, stepped_once, steps


@pytest.fixture
def hasty(monkeypatch):
    monkeypatch.setattr(operations, "LATE_S", 0.5)


def handed_over(runs, job_id, **changes):
    return runs.plan(job_id=job_id, sub_jobs=copy.deepcopy(SUB_JOBS), **changes)


def saved_steps(runs):
    return {entry.step for entry in PublicationLog(runs.root).entries()}


def stopped_after(runs, plan, step):
    """Drive `plan` until `step` is confirmed, then stop."""

    async def main():
        stop = asyncio.Event()

        def told(progress):
            if progress.stage == "train" and progress.step == step:
                stop.set()

        async with runs.client() as client:
            from cortex_training.training import run

            await run(plan, client, told, stop=stop)

    with pytest.raises(RunInterrupted):
        asyncio.run(main())


@pytest.mark.parametrize(("when_done", "alive"), [("cancel", False), ("keep", True)])
def test_a_run_trains_in_the_job_it_was_given_and_ends_it_when_it_should(runs, when_done, alive):
    job_id = foreign_job(runs)
    result = runs.run(handed_over(runs, job_id, steps=2, when_done=when_done))
    assert (result.job_id, result.segments, steps(runs, job_id)) == (job_id, 1, [1, 2])
    assert (state_of(runs, job_id) not in DEAD) == alive
    on_client(runs, lambda client: end_run(runs.root, client))
    assert state_of(runs, job_id) in DEAD


def test_a_job_that_was_stepped_before_it_was_given_is_counted_from_there(runs, proxy):
    job_id = stepped_once(runs)
    proxy.add(r"^POST .*/step$", DROP_AFTER)
    result = runs.run(handed_over(runs, job_id, steps=2))
    assert (result.steps, result.global_steps, result.segments) == (2, 3, 1)
    assert steps(runs, job_id) == [1, 2, 3]


def test_a_given_job_that_dies_is_replaced_and_the_plan_goes_on_in_the_replacement(runs, proxy):
    job_id = foreign_job(runs)
    plan = handed_over(runs, job_id, steps=6)
    killed = threading.Event()

    def kill_once():
        if not killed.is_set():
            killed.set()
            on_client(runs, lambda client: client.cancel_job(job_id), runs.service.base_url)

    proxy.add(r"^POST .*/step$", "forward", skip=3, before=kill_once)
    stopped_after(runs, plan, 5)
    replacement = status(runs.root).state.current.job_id
    assert replacement != job_id
    # The plan still names the first job, which is no reason to go back to it.
    result = runs.run(plan)
    assert (result.job_id, result.segments) == (replacement, 2)
    assert steps(runs, job_id)[:2] == [1, 2]
    assert steps(runs, replacement)[-1] == 6
    assert all(state_of(runs, job) in DEAD for job in jobs(runs))
    assert set(jobs(runs)) == {job_id, replacement}


def test_a_given_job_that_ended_before_the_run_began_is_replaced(runs):
    job_id = foreign_job(runs)
    cancel(runs, job_id)
    result = runs.run(handed_over(runs, job_id, steps=2))
    assert result.job_id != job_id
    assert steps(runs, result.job_id) == [1, 2]


def test_a_step_that_a_given_job_never_got_costs_the_job_and_no_step(runs, proxy):
    job_id = foreign_job(runs)
    proxy.add(r"^POST .*/step$", DROP_BEFORE, skip=2)
    result = runs.run(handed_over(runs, job_id, steps=4))
    assert steps(runs, job_id) == [1, 2]
    assert steps(runs, result.job_id) == [3, 4]
    assert state_of(runs, job_id) in DEAD


def test_a_plan_that_names_a_newer_job_moves_there_with_its_weights(runs):
    first = foreign_job(runs)
    stopped_after(runs, handed_over(runs, first, steps=6), 3)
    second = foreign_job(runs)
    result = runs.run(handed_over(runs, second, steps=6))
    assert (result.job_id, result.segments) == (second, 2)
    assert state_of(runs, first) in DEAD
    # From the last publication: step 3 is taken again.
    assert steps(runs, second) == [3, 4, 5, 6]


def test_a_job_that_was_made_of_other_sub_jobs_is_refused_before_anything_happens(runs):
    job_id = foreign_job(runs)
    sub_jobs = copy.deepcopy(SUB_JOBS)
    sub_jobs[0]["training_config"]["optimizer"]["lr"] = 1e-3
    with pytest.raises(ConfigurationError, match=r"plan.job_id.*optimizer.lr differs.*those it was made of"):
        runs.run(runs.plan(job_id=job_id, sub_jobs=sub_jobs))
    assert steps(runs, job_id) == []
    assert state_of(runs, job_id) not in DEAD
    cancel(runs, job_id)


# A save loaded into the job that lost its weights


def test_a_save_goes_back_into_the_same_job_where_the_plan_wants_it(runs, proxy):
    proxy.add(r"^POST .*/step$", TWICE, skip=3)
    result = runs.run(runs.plan(load_in_place=True))
    (job_id,) = jobs(runs)
    assert (result.segments, result.steps) == (2, 6)
    # Step 4 happened twice, the save of it was refused, and steps 3 and 4 were taken again from the save of step 2.
    assert steps(runs, job_id) == [1, 2, 3, 4, 5, 3, 4, 5, 6]
    assert saved_steps(runs) == {2, 4, 6}


def test_somebody_elses_job_goes_on_from_a_save_too(runs, proxy):
    job_id = foreign_job(runs)
    proxy.add(r"^POST .*/step$", TWICE, skip=3)
    result = runs.run(runs.plan(job_id=job_id, load_in_place=True))
    assert (result.job_id, result.segments, result.steps) == (job_id, 2, 6)
    assert state_of(runs, job_id) not in DEAD
    cancel(runs, job_id)


@pytest.mark.parametrize(
    ("skip", "options"),
    [
        pytest.param(3, {}, id="not asked for"),
        pytest.param(2, {"load_in_place": True}, id="gradients behind the save"),
        pytest.param(1, {"load_in_place": True}, id="no save to go on from"),
    ],
)
def test_no_save_goes_back_into_a_job_without_proof(runs, proxy, skip, options):
    proxy.add(r"^POST .*/step$", TWICE, skip=skip)
    result = runs.run(runs.plan(**options))
    first, _ = jobs(runs)
    assert (result.segments, result.steps) == (2, 6)
    assert state_of(runs, first) in DEAD


def test_replacements_are_counted_in_the_same_job_too(runs, proxy):
    proxy.add(r"^POST .*/step$", TWICE, skip=3)
    with pytest.raises(RunFailed, match="0 replacements were used"):
        runs.run(runs.plan(load_in_place=True, max_replacements=0))


# A load without an answer


def moved_to(runs, proxy, action, times=1, **changes):
    """A run that goes on in another job, where the first answers to its load are lost."""
    first = foreign_job(runs)
    stopped_after(runs, runs.plan(job_id=first, steps=4), 3)
    second = foreign_job(runs)
    proxy.add(r"^POST .*/load$", action, times=times)
    try:
        return second, runs.run(runs.plan(job_id=second, steps=4, **changes))
    finally:
        for job_id in (first, second):
            if state_of(runs, job_id) not in DEAD:
                cancel(runs, job_id)


@pytest.mark.parametrize("action", [DROP_BEFORE, DROP_AFTER])
def test_a_load_without_an_answer_is_sent_again_to_somebody_elses_job(runs, proxy, hasty, action):
    second, result = moved_to(runs, proxy, action)
    assert (result.job_id, result.steps) == (second, 4)
    assert steps(runs, second) == [3, 4]


def test_loads_that_never_get_an_answer_end_the_run(runs, proxy, hasty):
    with pytest.raises(RunFailed, match=r"could not be loaded.*3 loads got no answer"):
        moved_to(runs, proxy, DROP_BEFORE, times=9)


def test_a_load_that_may_still_land_costs_a_job_that_was_given(runs, proxy):
    second, result = moved_to(runs, proxy, DROP_BEFORE, sub_jobs=copy.deepcopy(SUB_JOBS))
    assert result.job_id != second
    assert steps(runs, second) == []
    assert steps(runs, result.job_id) == [3, 4]
