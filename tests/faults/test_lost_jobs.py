"""The job ends under the run, or the whole service does."""

import threading

import pytest
import requests

from tests.faults.driver import KILL, Hit
from tests.faults.proxy import DROP_BEFORE

pytestmark = pytest.mark.live

STEP = r"^POST .*/step$"


def cancel_the_job(scene):
    job_id = scene.evidence.segments[-1].job_id
    requests.post(f"{scene.service.url}/{job_id}:cancel", timeout=30).raise_for_status()


def test_a_job_that_ended_while_nobody_drove_is_replaced(scene):
    assert scene.drive(Hit("before record intent step", 4, KILL)).code == -9
    cancel_the_job(scene)
    assert scene.finish()["segments"] == 2


def test_a_job_that_ends_under_a_step_is_replaced(scene):
    scene.proxy.add(STEP, "forward", skip=2, before=lambda: cancel_the_job(scene))
    assert scene.finish()["segments"] == 2


def test_a_service_that_comes_back_with_its_checkpoints_costs_a_new_job(own_scene):
    scene = own_scene()
    down = threading.Event()

    def crash():
        scene.service.kill()
        down.set()

    rule = scene.proxy.add(r"^GET .*/requests/", "forward", skip=14, before=crash)
    process = scene.start()
    assert down.wait(60), process.communicate()
    own_scene()
    assert scene.wait(process).result["segments"] == 2
    assert rule.seen > 14
    scene.finish()


def test_a_service_that_comes_back_empty_ends_the_run_with_the_reason(own_scene, tmp_path):
    scene = own_scene()
    assert scene.drive(Hit("before record intent step", 4, KILL)).code == -9
    scene.service.kill()
    own_scene(data_dir=tmp_path / "empty")
    ended = scene.drive()
    assert ended.code == 1
    assert "refused to create a job" in ended.err
    assert "checkpoint" in ended.err


@pytest.mark.parametrize("step", [1, 3, 5], ids=["first", "middle", "last"])
@pytest.mark.parametrize("state", ["failed", "terminated"])
def test_a_job_that_ends_with_a_step_is_replaced(scene, step, state):
    scene.control.add(
        "fail-job", on="step", when="executed", at_step=step, times=1, state=state, reason="the node went away"
    )
    assert scene.finish()["segments"] == 2
    assert "the node went away" in next(r["reason"] for r in scene.evidence.records if r["type"] == "ended")


def test_a_job_whose_cancel_is_slow_is_let_go_before_the_next_one_needs_its_gpus(own_scene):
    scene = own_scene(gpus=2)
    scene.control.add("slow-cancel", on="step", skip=2, seconds=3)
    scene.proxy.add(STEP, DROP_BEFORE, skip=3)
    assert scene.finish()["segments"] == 2


def test_a_run_waits_for_capacity_that_went_and_comes_back(own_scene):
    scene = own_scene(gpus=2)
    rule = scene.control.add("set-capacity", on="step", when="executed", at_step=3, gpus=0, evict=True)
    process = scene.start()
    scene.control.wait_until_fired(rule, timeout_s=240)
    waiting = scene.control.add("delay", on="get-job", skip=3, seconds=0)
    scene.control.wait_until_fired(waiting, timeout_s=240)
    scene.control.act("set-capacity", gpus=2)
    assert scene.wait(process).result["segments"] == 2
    scene.finish()
