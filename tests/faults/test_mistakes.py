"""The suite tests itself: each planted mistake is caught by a schedule that an engine without it survives, and by one
of the first random nights.
"""

import pytest

from tests.faults import test_lost_jobs, test_network, test_two_drivers
from tests.faults.driver import KILL, POWER, Hit
from tests.faults.mistakes import MISTAKES
from tests.faults.oracle import Wrong
from tests.faults.proxy import DROP_AFTER, DROP_BEFORE
from tests.faults.test_random import live_through

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]

NIGHTS = range(1, 201)
NIGHT_PATIENCE_S = 60.0
OUT_OF_TIME = ("was not done after", "did not come to the point")


def die_before_the_batch_behind_a_save(scene):
    scene.drive(Hit("before record intent forward_backward", 3, KILL))
    scene.finish()


def lose_the_power(scene):
    scene.watch_the_disk()
    scene.drive(Hit("before send step", 3, POWER))
    scene.finish()


def lose_a_step(scene):
    test_network.test_a_step_without_an_answer_is_settled_by_a_save(scene, DROP_BEFORE, 2, 2)


SCHEDULES = {
    "resend": lambda scene: test_network.test_a_step_without_an_answer_is_settled_by_a_save(scene, DROP_AFTER, 1, 2),
    "takeover": test_two_drivers.test_a_driver_that_wakes_up_before_its_successor_wrote_anything_is_stopped,
    "fsync": lose_the_power,
    "segment": lose_a_step,
    "count": lambda scene: test_network.test_a_step_that_the_network_repeats_costs_its_job(scene, 1),
    "early": die_before_the_batch_behind_a_save,
    "dead": test_lost_jobs.test_a_job_that_ended_while_nobody_drove_is_replaced,
    "window": test_two_drivers.test_a_driver_that_wakes_up_before_it_sends_sends_nothing,
    "attempt": test_network.test_a_cancelled_batch_gets_a_new_name,
}


def test_every_mistake_has_a_schedule():
    assert set(SCHEDULES) == set(MISTAKES)


def is_a_judgement(caught):
    """Whether the judge found something: a mistake that no longer fits the engine, and crashes it, or a slow machine
    would end a schedule just as well.
    """
    return not any(said in str(caught) for said in ("Traceback", *OUT_OF_TIME))


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_planted_mistake_is_caught(scene, mistake):
    scene.mistake = mistake
    with pytest.raises(AssertionError) as caught:
        SCHEDULES[mistake](scene)
    assert is_a_judgement(caught.value)
    print(f"{MISTAKES[mistake].what}: {caught.value}")


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_random_night_catches_a_planted_mistake(next_scene, mistake):
    for seed in NIGHTS:
        with next_scene() as scene:
            scene.mistake, scene.patience_s = mistake, NIGHT_PATIENCE_S
            try:
                live_through(scene, seed)
            except Wrong as caught:
                if is_a_judgement(caught):
                    print(f"{MISTAKES[mistake].what}: night {seed}: {caught}")
                    return
    pytest.fail(f"no night of {NIGHTS} caught it: {MISTAKES[mistake].what}")
