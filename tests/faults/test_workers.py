"""Workers that restart and forget gradients, the names of batches, or both; requests that fail; and what can't be told.

A worker that says so, by leaving ``running`` or by a refusal, costs the job. One that says nothing can only be told by
a step that had no gradient to spend.
"""

import pytest

from tests.faults.driver import KILL, Hit
from tests.faults.oracle import replayed

pytestmark = pytest.mark.live

LOST = ["gradients", "groups", "both"]


@pytest.mark.parametrize("requests", ["kept", "failed"])
@pytest.mark.parametrize("loses", LOST)
def test_a_worker_that_restarts_between_the_batches_of_a_step_costs_the_job(scene, loses, requests):
    # The first batch of step 4 was executed, and its answer can't be read until the worker is back.
    scene.control.add(
        "restart-worker",
        on="forward-backward",
        when="executed",
        skip=6,
        loses=loses,
        seconds=3,
        requests=requests,
    )
    assert scene.finish()["segments"] == 2
    # Published was the save after step 2; step 3 is made again.
    assert replayed(scene.evidence, scene.material.reference) == 1


@pytest.mark.parametrize("loses", LOST)
def test_a_worker_that_restarts_while_nobody_drives_is_not_waited_for(scene, loses):
    assert scene.drive(Hit("after record outcome forward_backward done", 4, KILL)).code == -9
    scene.control.act("restart-worker", scene.job_id, loses=loses, seconds=20)
    assert scene.finish()["segments"] == 2


@pytest.mark.parametrize("loses", LOST)
def test_a_worker_that_restarts_under_a_step_costs_the_job_or_nothing(scene, loses):
    scene.control.add("restart-worker", on="step", when="executed", skip=2, loses=loses, seconds=3)
    assert scene.finish()["segments"] <= 2


@pytest.mark.parametrize("loses", LOST)
def test_a_worker_that_restarts_under_a_save_costs_the_job_or_nothing(scene, loses):
    scene.control.add("restart-worker", on="save", when="executed", loses=loses, seconds=2)
    assert scene.finish()["segments"] <= 2


@pytest.mark.parametrize("step", [1, 3, 5], ids=["first", "middle", "last"])
def test_a_step_that_had_no_gradient_to_spend_costs_the_job(scene, step):
    """A silent restart behind the last batch of a step: the optimizer steps on nothing, and says a norm of 0."""
    scene.control.add("restart-worker", on="forward-backward", when="executed", skip=2 * step - 1, loses="gradients")
    result = scene.finish()
    assert result["segments"] == 2
    reasons = [record["reason"] for record in scene.evidence.records if record["type"] == "ended"]
    assert "gradient" in reasons[0]


def test_a_worker_that_silently_forgets_names_is_not_asked_for_them(scene):
    """Every batch had its answer before the restart, so nothing is sent again under a name that was forgotten."""
    scene.control.add("restart-worker", on="forward-backward", when="executed", skip=3, loses="groups", times=3)
    assert scene.finish()["segments"] == 1


@pytest.mark.parametrize("when", ["before", "executed"])
def test_a_step_that_is_reported_as_failed_costs_the_job(scene, when):
    scene.control.add("fail-request", on="step", when=when, skip=2, error="out of memory")
    assert scene.finish()["segments"] == 2


def test_a_batch_that_is_reported_as_failed_and_was_not_executed_gets_a_new_name(scene):
    scene.control.add("fail-request", on="forward-backward", when="before", skip=3, error="out of memory")
    assert scene.finish()["segments"] == 1


def test_an_operation_slower_than_its_window_is_waited_for(scene):
    scene.control.add("slow-operation", on=["step", "save", "forward-backward"], skip=4, times=3, seconds=2.5)
    assert scene.finish()["segments"] == 1
