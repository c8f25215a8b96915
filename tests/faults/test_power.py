"""The power goes: what no fsync made durable is lost, and the same command goes on."""

import json

import pytest

from tests.faults.driver import KILL, POWER, Hit
from tests.faults.harness import STEPS, passed
from tests.faults.oracle import check_end, replayed
from tests.faults.points import MAY_STILL_COME, MKDIR_POINTS, PLACED_POINTS, STEPS_OF, WRITES, first_middle_last
from tests.faults.test_rare_moments import PACKED

pytestmark = pytest.mark.live


def die_along(scene, chain, action):
    for point, step, *nth in chain:
        ended = scene.drive(Hit(point, step, action, *nth))
        assert ended.code == -9, f"{point} at step {step}: {ended.code}\n{ended.err}"


def finish(scene, chain):
    """A lost intent permits nothing yet, so only one that is durable may cost a job."""
    result = scene.finish()
    lost = sum(point in MAY_STILL_COME and not point.startswith("placed") for point, _ in chain)
    assert result["segments"] <= 1 + lost
    assert replayed(scene.evidence, scene.material.reference) <= lost
    return result


def end_with_the_power(scene):
    """The power goes right behind the end of the run: nobody comes to put anything right."""
    # A driver that finds the last step done sends nothing, and ends at step 0.
    ended = scene.drive(*(Hit("after record released", step, POWER) for step in (0, STEPS + 1)))
    assert ended.code == -9, ended.err
    check_end(scene.evidence, scene.material.reference, scene.service, {"steps": STEPS})


def test_the_table_lists_every_write_that_an_undisturbed_run_makes(scene, tmp_path):
    scene.watch_the_disk()
    scene.drive(trace=tmp_path / "trace")
    seen = {}
    for point, step in passed(tmp_path / "trace"):
        seen.setdefault(point, set()).add(step)
    found = {point: tuple(sorted(steps)) for point, steps in seen.items()}
    assert found == {**STEPS_OF, **PLACED_POINTS, **MKDIR_POINTS}
    scene.finish()


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("point", [f"{stage} {what}" for what in WRITES for stage in ("before", "placed", "after")])
def test_a_run_goes_on_when_the_power_goes_at_a_write(scene, point):
    scene.watch_the_disk()
    chain = [(point, step) for step in first_middle_last(point)]
    die_along(scene, chain, POWER)
    finish(scene, chain)


@pytest.mark.parametrize("point", MKDIR_POINTS)
def test_a_folder_of_a_killed_driver_is_as_durable_as_what_is_put_in_it(scene, point):
    """The next driver finds the folder there and has to make sure of it itself."""
    scene.watch_the_disk()
    die_along(scene, [(point, MKDIR_POINTS[point][-1])], KILL)
    end_with_the_power(scene)


@pytest.mark.parametrize(
    "point", [p if p == "placed publish entry" else pytest.param(p, marks=pytest.mark.long) for p in PLACED_POINTS]
)
def test_what_a_killed_driver_left_unsynced_is_made_durable_by_the_next(scene, point):
    scene.watch_the_disk()
    die_along(scene, [(point, PLACED_POINTS[point][-1])], KILL)
    end_with_the_power(scene)


@pytest.mark.parametrize("places", PACKED.values(), ids=PACKED)
def test_a_run_whose_power_goes_while_it_packs_loses_no_record(scene, places):
    scene.watch_the_disk()
    scene.pack_records = 20
    die_along(scene, places, POWER)
    # A driver that dies while a step is on its way costs its job, and the training does not wait for the packs.
    assert scene.finish()["segments"] <= 1 + len(places)
    assert list((scene.root / "journal" / "packed").glob("[0-9]*"))


def test_the_power_takes_what_was_not_synced_and_nothing_else(scene):
    scene.watch_the_disk()
    scene.drive(Hit("placed record intent step", 2, KILL))
    seen = scene.evidence.records[-1]
    scene.drive(Hit("before claim epoch", 0, POWER))
    known = scene.evidence.records
    assert (seen["type"], seen["op"]) == ("intent", "step")
    assert seen not in known
    assert known[-1]["type"] == "outcome"
    assert json.loads((scene.root / "run.json").read_text())
    scene.finish()
