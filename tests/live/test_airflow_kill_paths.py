"""What may cancel the job of a deferred training run, and what may not."""

from __future__ import annotations

import signal

import pytest

from cortex_training.publication import PosixStore
from cortex_training.states import is_terminal_job
from cortex_training.training.journal import read_journal
from tests.faults.proxy import ANSWER
from tests.live.conftest import Night, confirmed_step, run_status, wait_until

ENDLESS = 100_000

pytestmark = [pytest.mark.live, pytest.mark.timeout(900)]


def test_a_triggerer_that_is_stopped_or_stood_still_cancels_nothing(night: Night) -> None:
    plan = night.plan("run", steps=ENDLESS)
    run = night.start("train_only", plan=plan)
    wait_until(lambda: confirmed_step(plan) > 2, "the run trains")

    # A deployment stops the triggerer: it releases the run, and another one goes on in the same job.
    stopped = run.triggerer_of("train")
    night.airflow.kill_component(stopped, signal.SIGTERM)
    released = [r.type for r in read_journal(PosixStore(plan["root"]))].index("released")
    began_at = confirmed_step(plan)
    wait_until(lambda: confirmed_step(plan) > began_at, "the other triggerer goes on")
    assert run.triggerer_of("train") != stopped
    assert released > 0
    night.airflow.restart_triggerer(stopped)

    # A triggerer stands still until another one has its triggers, and comes back: it is told that a user cancelled.
    frozen = run.triggerer_of("train")
    night.airflow.freeze_component(frozen)
    wait_until(lambda: run.triggerer_of("train") != frozen, "the trigger moves")
    night.airflow.thaw_component(frozen)
    wait_until(lambda: "cancelled by user action" in run.trigger_log("train", frozen), "it is told so")
    began_at = confirmed_step(plan)
    wait_until(lambda: confirmed_step(plan) > began_at + 2, "the run goes on")
    assert night.cancels() == 0
    assert len(night.live_jobs()) == 1

    # The user marks the task failed. The service is busy for longer than Airflow lets a trigger's on_kill live.
    (job_id,) = night.live_jobs()
    night.proxy.add(":cancel$", ANSWER, times=2, status=503, headers={"Retry-After": "3"}, body={"message": "busy"})
    run.mark("train", "failed")
    run.wait("success")  # its last task cancels what is left, and nothing is
    wait_until(lambda: night.jobs()[job_id] == "cancelled", "the job is cancelled")
    night.settle()


def test_a_cleared_task_gets_a_new_job_and_others_notice_nothing(night: Night) -> None:
    plan, other = night.plan("run", steps=ENDLESS), night.plan("other", steps=ENDLESS)
    run, bystander = night.start("train_only", plan=plan), night.start("train_only", plan=other)
    wait_until(lambda: min(map(confirmed_step, (plan, other))) > 1, "both train")
    (old,), (theirs,) = jobs_of(plan), jobs_of(other)

    run.clear("train")
    wait_until(lambda: len(jobs_of(plan)) == 2, "the new try has a job")
    new = jobs_of(plan)[1]
    wait_until(lambda: is_terminal_job(night.jobs()[old]), "the old job is cancelled")
    began_at = confirmed_step(plan)
    wait_until(lambda: confirmed_step(plan) > began_at, "it trains in the new job")
    assert sorted(night.live_jobs()) == sorted([new, theirs])
    assert 1 <= night.cancels(old) <= 2

    run.mark("train", "failed")
    wait_until(lambda: is_terminal_job(night.jobs()[new]), "its present job is cancelled")
    assert 1 <= night.cancels(new) <= 2
    assert night.cancels(theirs) == 0
    bystander.mark("train", "failed")
    night.settle(jobs=3)


def test_a_task_that_is_cleared_while_it_runs_on_a_worker_trains_in_a_new_job(night: Night) -> None:
    plan = night.plan("run", steps=ENDLESS)
    run = night.start("train_on_worker", plan=plan)
    wait_until(lambda: confirmed_step(plan) > 1, "it trains")
    (old,) = jobs_of(plan)
    run.clear("train")
    wait_until(lambda: len(jobs_of(plan)) == 2, "the new try has a job")
    new = jobs_of(plan)[1]
    wait_until(lambda: is_terminal_job(night.jobs()[old]), "the old job is cancelled")
    began_at = confirmed_step(plan)
    wait_until(lambda: confirmed_step(plan) > began_at, "it trains in the new job")
    assert night.live_jobs() == [new]
    run.mark("train", "failed")
    wait_until(lambda: is_terminal_job(night.jobs()[new]), "its present job is cancelled")
    night.settle(jobs=2)


def test_time_limits_hold_over_a_deferral_and_end_the_job(night: Night) -> None:
    late_task, late_run = night.plan("task", steps=ENDLESS), night.plan("run", steps=ENDLESS)
    limited, timed_out = night.start("train_20_s", plan=late_task), night.start("run_30_s", plan=late_run)
    timed_out.wait("failed")
    limited.wait("success")  # its last task runs whatever happened
    assert limited.states()["train"] == "failed"
    assert "did not end within 20 s" in limited.log("train")
    assert timed_out.states()["train"] == "skipped"
    night.settle(jobs=2)
    for plan in (late_task, late_run):
        (job_id,) = jobs_of(plan)
        assert 1 <= night.cancels(job_id) <= 2


def jobs_of(plan: dict[str, object]) -> list[str]:
    told = run_status(plan)
    return told.state.job_ids if told else []
