"""Batches that go out in several chunks, with the network or the driver failing in the middle of a group."""

import pytest

from tests.faults.driver import FREEZE, KILL, TERMINATE, Hit
from tests.faults.harness import wait_until_frozen, wake
from tests.faults.proxy import ANSWER, DROP_AFTER, DROP_BEFORE, LATE, TWICE
from tests.faults.test_network import BATCH, restart_required

pytestmark = pytest.mark.live

CHUNKS = 4
"""At least so many chunks a batch has here."""


@pytest.fixture
def scene(scene):
    scene.chunk_payload_bytes = 1500
    return scene


def test_chunks_that_are_lost_late_or_repeated_in_the_middle_of_a_group_change_nothing(scene):
    faults = [(DROP_BEFORE, 1), (DROP_AFTER, 2), (TWICE, 5), (LATE, 10), (DROP_AFTER, 3 * CHUNKS - 1), (LATE, 17)]
    rules = [scene.proxy.add(BATCH, action, skip=skip, delay_s=0.2) for action, skip in faults]
    assert scene.finish()["segments"] == 1
    assert min(rule.seen for rule in rules) > 10 * CHUNKS, "the batches were not sent in chunks"


def test_the_reply_to_a_chunk_that_comes_behind_the_next_driver_is_nobodys(scene):
    """Replies out of order: the first driver's chunk is answered when the second one has sent the whole group."""
    held = scene.proxy.add(BATCH, "hold", skip=CHUNKS + 1)
    first = scene.start()
    assert held.holding.wait(240)
    second = scene.start(Hit("after record intent step", 2, KILL))
    assert scene.wait(second).code == -9
    held.released.set()
    ended = scene.wait(first)
    assert ended.code == 1
    assert "belongs to another driver" in ended.err
    scene.finish()


@pytest.mark.parametrize("nth", [2, 3])
def test_a_driver_that_dies_between_two_chunks_is_followed_by_one_that_sends_the_group_again(scene, nth):
    for point, step in (("written send fwd-bwd", 1), ("answered send fwd-bwd", 3), ("permitted send fwd-bwd", 6)):
        assert scene.drive(Hit(point, step, KILL, nth)).code == -9
    assert scene.finish()["segments"] == 1


def test_a_driver_that_is_asked_to_stop_between_two_chunks_sends_the_whole_group(scene):
    assert scene.drive(Hit("written send fwd-bwd", 3, TERMINATE, 2)).code == 130
    assert scene.finish()["segments"] == 1


def test_a_driver_that_freezes_between_two_chunks_wakes_up_to_nothing(scene):
    frozen = scene.start(Hit("permitted send fwd-bwd", 3, FREEZE, 2))
    assert wait_until_frozen(frozen)
    try:
        assert scene.finish()["segments"] == 1
    finally:
        wake(frozen)
        ended = scene.wait(frozen)
    assert "belongs to another driver" in ended.err


def test_a_group_that_has_to_start_over_in_its_middle_is_sent_again(scene):
    scene.proxy.add(BATCH, ANSWER, skip=CHUNKS + 2, status=409, body=restart_required())
    assert scene.finish()["segments"] == 1


@pytest.mark.parametrize("groups", ["partial", "all"])
def test_a_worker_that_forgets_half_a_group_is_sent_it_again(scene, groups):
    scene.control.add("forget-groups", on="forward-backward", when="before", skip=CHUNKS + 2, groups=groups)
    assert scene.finish()["segments"] == 1
