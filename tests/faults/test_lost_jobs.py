"""The job ends under the run, or the whole service does."""

import threading

import pytest
import requests

from tests.faults.driver import KILL, Hit
from tests.faults.harness import Scene
from tests.faults.proxy import FaultProxy

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


@pytest.fixture
def own_scene(tmp_path, start_local_service, material):
    """A scene whose service may be killed; `again` starts another one in its place."""
    service = start_local_service()
    with FaultProxy(service.base_url) as proxy:
        scene = Scene(tmp_path, service, proxy, material)

        def again(**options):
            scene.service = start_local_service(**options)
            proxy.upstream = scene.service.base_url

        yield scene, again


def test_a_service_that_comes_back_with_its_checkpoints_costs_a_new_job(own_scene):
    scene, again = own_scene
    down = threading.Event()

    def crash():
        scene.service.kill()
        down.set()

    rule = scene.proxy.add(r"^GET .*/requests/", "forward", skip=14, before=crash)
    process = scene.start()
    assert down.wait(60), process.communicate()
    again()
    assert scene.wait(process).result["segments"] == 2
    assert rule.seen > 14
    scene.finish()


def test_a_service_that_comes_back_empty_ends_the_run_with_the_reason(own_scene, tmp_path):
    scene, again = own_scene
    assert scene.drive(Hit("before record intent step", 4, KILL)).code == -9
    scene.service.kill()
    again(data_dir=tmp_path / "empty")
    ended = scene.drive()
    assert ended.code == 1
    assert "refused to create a job" in ended.err
    assert "checkpoint" in ended.err
