"""The driver dies, or is asked to stop, at every place that the table knows, and the same command goes on."""

import contextlib
import json
import random
import signal
import subprocess

import pytest

from tests.faults.driver import KILL, TERMINATE, Hit
from tests.faults.harness import MICRO_BATCHES, passed
from tests.faults.oracle import replayed
from tests.faults.points import (
    MAY_STILL_COME,
    POINTS,
    RECOVERY_POINTS,
    STEPS_OF,
    chains,
    first_middle_last,
)
from tests.faults.proxy import DROP_BEFORE

pytestmark = pytest.mark.live

CHAINS = chains(6)


def name(chain):
    return ", ".join(f"{point}@{step}" for point, step in chain)


def die_along(scene, chain, action):
    for point, step in chain:
        ended = scene.drive(Hit(point, step, action))
        expected = {KILL: {-9}, TERMINATE: {130, 0}}[action]
        assert ended.code in expected, f"{point} at step {step}: {ended.code}\n{ended.err}"
    return scene.finish()


def check_lineage(scene, chain, result):
    """A driver that dies costs a new job only where its step may still come; nothing that was confirmed is repeated."""
    assert result["segments"] <= 1 + sum(point in MAY_STILL_COME for point, _ in chain)
    assert replayed(scene.evidence, scene.material.reference) <= sum(point in MAY_STILL_COME for point, _ in chain)


def test_the_table_lists_every_point_that_an_undisturbed_run_passes(scene, tmp_path):
    scene.drive(trace=tmp_path / "trace")
    seen = {}
    for point, step in passed(tmp_path / "trace"):
        seen.setdefault(point, set()).add(step)
    assert {point: tuple(sorted(steps)) for point, steps in seen.items()} == STEPS_OF
    scene.finish()


def test_the_table_lists_every_point_that_a_rescue_adds(scene, tmp_path):
    scene.proxy.add(r"^POST .*/step$", DROP_BEFORE, skip=2)
    scene.drive(trace=tmp_path / "trace")
    assert {point for point, _ in passed(tmp_path / "trace")} - set(POINTS) == set(RECOVERY_POINTS)
    assert scene.finish()["segments"] == 2


def test_the_chains_strike_every_point():
    assert sorted(point for chain in CHAINS for point, _ in chain) == sorted(POINTS)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("chain", CHAINS, ids=name)
def test_a_killed_driver_is_taken_over(scene, chain):
    result = die_along(scene, chain, KILL)
    check_lineage(scene, chain, result)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("chain", CHAINS[1:2], ids=name)
def test_a_driver_that_is_asked_to_stop_keeps_its_job(scene, chain):
    assert die_along(scene, chain, TERMINATE)["segments"] == 1


@pytest.mark.parametrize("point", RECOVERY_POINTS)
def test_a_driver_killed_during_a_rescue_does_not_go_back_to_the_old_job(scene, point):
    scene.proxy.add(r"^POST .*/step$", DROP_BEFORE, skip=2)
    ended = scene.drive(Hit(point, 3, KILL))
    assert ended.code == -9, ended.err
    assert scene.finish()["segments"] == 2


@pytest.mark.timeout(900)
def test_twenty_restarts_of_a_slow_run_make_no_new_job(own_scene):
    """Operations of 0.2 s without a model: the reference knows no losses here, the service says what it executed."""
    scene = own_scene(simulate="0.2")
    moments = random.Random(20)
    ends = []
    scene.write_plan(steps=60)
    for _ in range(20):
        process = scene.start()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(moments.uniform(0.8, 1.8))
        process.send_signal(signal.SIGTERM)
        ends.append(process.communicate(scene.patience_s))
        # -15 is a driver that had not come to handle signals yet.
        assert process.returncode in (130, 0, -signal.SIGTERM), ends[-1]
    last = scene.start()
    ends.append(last.communicate(scene.patience_s))
    assert json.loads(ends[-1][0])["segments"] == 1
    assert [r["global_steps"] for r in scene.evidence.executed("step", scene.job_id)] == list(range(1, 61))
    groups = [r["chunk_group"] for r in scene.evidence.executed("forward-backward", scene.job_id)]
    assert len(groups) == len(set(groups)) == 60 * MICRO_BATCHES + 1


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("action", [KILL, TERMINATE])
@pytest.mark.parametrize("point", POINTS)
def test_every_point_at_the_first_a_middle_and_the_last_step(scene, point, action):
    chain = [(point, step) for step in first_middle_last(point)]
    result = die_along(scene, chain, action)
    if action == KILL:
        check_lineage(scene, chain, result)
    else:
        assert result["segments"] == 1
