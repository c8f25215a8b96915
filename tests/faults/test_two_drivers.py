"""A driver freezes, another one takes the run over, and the first one wakes up."""

import pytest

from tests.faults.driver import FREEZE, KILL, Hit
from tests.faults.harness import wait_until_frozen, wake
from tests.faults.oracle import check_end

pytestmark = pytest.mark.live

FROZEN_AT = [
    ("before send step", 3),
    ("permitted send step", 3),
    ("permitted send fwd-bwd", 4),
    ("permitted send save", 4),
    ("after record sent step", 5),
    ("permitted send create", 0),
]


def freeze(scene, point, step):
    frozen = scene.start(Hit(point, step, FREEZE))
    assert wait_until_frozen(frozen), frozen.communicate()
    return frozen


def wake_up(scene, frozen):
    wake(frozen)
    return scene.wait(frozen)


@pytest.mark.parametrize(
    ("point", "step"), [*FROZEN_AT[:3], *(pytest.param(*place, marks=pytest.mark.long) for place in FROZEN_AT[3:])]
)
def test_a_driver_that_wakes_up_behind_its_successor_changes_nothing(scene, point, step):
    frozen = freeze(scene, point, step)
    try:
        result = scene.finish()
    finally:
        ended = wake_up(scene, frozen)
    assert ended.code == 1
    assert "belongs to another driver" in ended.err
    check_end(scene.evidence, scene.material.reference, scene.service, result)


def test_a_driver_that_wakes_up_before_it_sends_sends_nothing(scene):
    frozen = freeze(scene, "before send step", 3)
    scene.drive(Hit("before record intent step", 5, KILL))
    sent = scene.proxy.count("^POST .*/step$")
    assert wake_up(scene, frozen).code == 1
    assert scene.proxy.count("^POST .*/step$") == sent
    scene.finish()


def test_a_driver_that_wakes_up_behind_its_creation_leaves_the_job_to_its_successor(scene):
    frozen = freeze(scene, "answered send create", 0)
    second = scene.start(Hit("after record intent save", 4, FREEZE))
    assert wait_until_frozen(second), second.communicate()
    assert wake_up(scene, frozen).code == 1
    assert wake_up(scene, second).result["segments"] == 1
    scene.finish()


def test_a_driver_that_wakes_up_before_its_successor_wrote_anything_is_stopped(scene):
    frozen = freeze(scene, "after record outcome step done", 3)
    second = freeze(scene, "before record intent forward_backward", 4)
    sent = scene.proxy.count("^POST ")
    try:
        assert wake_up(scene, frozen).code == 1
        assert scene.proxy.count("^POST ") == sent
        assert wake_up(scene, second).result["segments"] == 1
    finally:
        second.kill()
    scene.finish()


def test_a_driver_that_wakes_up_while_its_successor_works_is_stopped(scene):
    frozen = freeze(scene, "permitted send step", 2)
    second = scene.start(Hit("after record intent save", 4, FREEZE))
    assert wait_until_frozen(second), second.communicate()
    assert wake_up(scene, frozen).code == 1
    assert wake_up(scene, second).result["steps"] == 5
    scene.finish()
