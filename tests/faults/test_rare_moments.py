"""Deaths at moments that a night rarely hits: while old records are packed, while a run goes back after a divergence,
between two tries to save, while batches are out that were sent ahead, and in a job that was there before the run.
"""

import dataclasses
import time

import pytest
import requests

from cortex_training.datasets import Dataset
from cortex_training.local.models import model_folder
from tests.faults.driver import KILL, Hit
from tests.faults.harness import MICRO_BATCHES, PEAK_RATE, STEPS, SUB_JOBS
from tests.faults.oracle import check_end, replayed
from tests.faults.proxy import DROP_BEFORE, LATE, TWICE
from tests.faults.reference import train

pytestmark = pytest.mark.live


def die_at(scene, *places):
    """One driver after the other dies at the next place: a point, a step, and which passing of it (the first)."""
    for point, step, *nth in places:
        ended = scene.drive(Hit(point, step, KILL, *nth))
        assert ended.code == -9, f"{point} at step {step}: {ended.code}\n{ended.err}"


# A pack is made of at least 20 records, and removed are four at once; packing goes on beside the training, at no step.
PACKED = {
    "made": [
        ("before create packed", 0),
        ("before mkdir packed", 0),
        ("after mkdir packed", 0),
        ("before fsync packed", 0, 2),
        ("after fsync packed", 0),
    ],
    "named": [
        ("before link packed", 0),
        ("after link packed", 0),
        ("before unlink packed", 0, 2),
        ("after unlink packed", 0),
        ("after create packed", 0),
    ],
    "removed": [("before remove packed", 0), ("after unlink packed", 0, 2), ("after remove packed", 0, 3)],
}


@pytest.mark.parametrize("places", PACKED.values(), ids=PACKED)
def test_a_driver_killed_while_it_packs_loses_no_record(scene, places):
    scene.pack_records = 20
    die_at(scene, *places)
    # A driver that dies while a step is on its way costs its job, and the training does not wait for the packs.
    assert scene.finish()["segments"] <= 1 + len(places)
    assert list((scene.root / "journal" / "packed").glob("[0-9]*"))


@pytest.fixture(scope="module")
def diverging(material):
    """The fourth step's first frame, and what a run must show that leaves the fourth step's batches out."""
    batches = Dataset.open(material.manifest).batches(2, MICRO_BATCHES, 0)
    frames = {
        (step, micro_batch): batches.frame(step if step < 4 else step + 1, micro_batch)
        for step in range(1, STEPS + 2)
        for micro_batch in range(MICRO_BATCHES)
    }
    later = train(model_folder("tiny"), frames, steps=STEPS, micro_batches=MICRO_BATCHES, peak_rate=PEAK_RATE)
    reference = material.reference
    return reference.frames[4, 0], dataclasses.replace(reference, later=later)


# The divergence shows at step 4. A driver that finds it on record sends nothing before it goes back: it is at step 0.
ROLLED_BACK = {
    "found": [("before record diverged", 4), ("after record diverged", 4), ("before record ended", 0)],
    "cancelling": [("after record ended", 4), ("before send cancel", 0), ("answered send cancel", 0)],
    "cancelled": [("before record cancelled", 4), ("after record cancelled", 0), ("before record segment", 0)],
    "creating": [("after record segment", 4), ("before send create", 0), ("written send create", 0)],
    "created": [("answered send create", 4), ("before record running", 0)],
    "loaded": [("after record created", 4), ("after record running", 0), ("before record intent forward_backward", 3)],
}


@pytest.mark.parametrize("places", ROLLED_BACK.values(), ids=ROLLED_BACK)
def test_a_driver_killed_while_it_goes_back_goes_back_once(scene, diverging, places):
    scene.spoiled_frame, reference = diverging
    scene.material = dataclasses.replace(scene.material, reference=reference)
    scene.write_plan(max_replacements=0, divergence={"action": "rollback", "skip_batches": 1})
    die_at(scene, *places)
    assert scene.finish()["segments"] == 2
    assert [record["cause"] for record in scene.evidence.records if record["type"] == "segment"] == [
        "first",
        "rollback",
    ]
    # Published was the save after step 2, so step 3 is made again.
    assert replayed(scene.evidence, reference) == 1


def kill_between_two_saves(scene):
    """Kill a driver once it has given up a save for lost, and before it tries the next one."""
    process = scene.start()
    until = time.monotonic() + scene.patience_s
    while not any(about_a_save(scene.evidence, record) for record in records(scene)):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < until
        time.sleep(0.1)
    process.kill()
    assert scene.wait(process).code == -9


def records(scene):
    return scene.evidence.records if (scene.root / "journal").exists() else []


def about_a_save(evidence, record):
    intent = evidence.records[record["intent"] - 1] if record["type"] == "outcome" else {}
    return intent.get("op") == "save" and record["status"] == "refused"


@pytest.mark.parametrize("action", [DROP_BEFORE, LATE])
def test_a_driver_killed_between_two_tries_to_save_saves_again(scene, action):
    """Also where the save that was given up lands while nobody drives."""
    scene.proxy.add(r"^POST .*/save$", action, times=2, delay_s=0.3)
    kill_between_two_saves(scene)
    assert scene.finish()["segments"] == 1


def test_a_driver_killed_between_two_tries_to_settle_a_step_settles_it(scene):
    scene.proxy.add(r"^POST .*/step$", DROP_BEFORE, skip=2)
    scene.proxy.add(r"^POST .*/save$", DROP_BEFORE, skip=1, times=2)
    kill_between_two_saves(scene)
    assert scene.finish()["segments"] == 2
    assert replayed(scene.evidence, scene.material.reference) == 0


# Nothing goes behind a step that is saved, so the batches of steps 2 and 4 are sent ahead.
AHEAD = {
    "sending": [
        ("before record intent forward_backward", 2),
        ("permitted send fwd-bwd", 4),
        ("answered send fwd-bwd", 4, 2),
        ("after record sent forward_backward", 4, 2),
    ],
    "waiting": [
        ("written send fwd-bwd", 2, 2),
        ("after record outcome forward_backward done", 2),
        ("before record outcome step done", 4),
        ("before record sent step", 5),
    ],
}


@pytest.mark.parametrize("places", AHEAD.values(), ids=AHEAD)
def test_a_driver_killed_with_batches_ahead_loses_and_repeats_nothing(scene, places):
    scene.write_plan(submit_ahead=True, assume_fifo=True)
    die_at(scene, *places)
    assert scene.finish()["segments"] == 1
    assert replayed(scene.evidence, scene.material.reference) == 0
    assert any(record.get("ahead") for record in scene.evidence.records)


def given_job(scene):
    """A job that somebody made of the plan's sub-jobs."""
    created = requests.post(scene.service.url, json={"sub_job_configs": SUB_JOBS}, timeout=30)
    created.raise_for_status()
    return created.json()["job_id"]


def end(scene, job_id):
    requests.post(f"{scene.service.url}/{job_id}:cancel", timeout=30).raise_for_status()


GIVEN = {
    "taken": [("before record segment", 0), ("after record segment", 0), ("before record running", 0)],
    "counted": [
        ("before record intent save", 0),
        ("written send save", 0),
        ("answered send save", 0),
        ("before record outcome save done", 0),
        ("after record outcome save done", 0),
    ],
}


@pytest.mark.parametrize("places", GIVEN.values(), ids=GIVEN)
def test_a_driver_killed_before_its_first_step_goes_on_in_the_job_it_was_given(scene, places):
    job_id = given_job(scene)
    scene.write_plan(job_id=job_id)
    die_at(scene, *places)
    result = scene.finish()
    assert (result["job_id"], result["segments"]) == (job_id, 1)
    assert replayed(scene.evidence, scene.material.reference) == 0


def test_a_driver_killed_with_a_step_unsent_goes_on_in_another_job_than_it_was_given(scene):
    job_id = given_job(scene)
    scene.write_plan(job_id=job_id)
    die_at(scene, ("before send step", 1), ("permitted send step", 3), ("before record intent step", 4))
    assert scene.finish()["segments"] == 3
    assert replayed(scene.evidence, scene.material.reference) == 0


def test_a_driver_killed_with_a_step_unsent_sends_it_again_to_somebody_elses_job(scene):
    job_id = given_job(scene)
    scene.write_plan(job_id=job_id, sub_jobs=[], experiment_name=None)
    # The second dies behind the first of the two saves that show that the step was not executed.
    die_at(scene, ("before send step", 3), ("after record outcome save done", 3))
    result = scene.drive().result
    assert (result["job_id"], result["segments"]) == (job_id, 1)
    end(scene, job_id)
    check_end(scene.evidence, scene.material.reference, scene.service, result)
    assert replayed(scene.evidence, scene.material.reference) == 0


LOADED = {
    "sent": [("before record intent load", 2), ("permitted send load", 2), ("written send load", 2)],
    "answered": [("answered send load", 2), ("after record sent load", 2)],
    "done": [("before record outcome load done", 2), ("after record outcome load done", 2)],
}


@pytest.mark.parametrize("places", LOADED.values(), ids=LOADED)
def test_a_driver_killed_while_it_loads_into_somebody_elses_job_loads_again(scene, places):
    die_at(scene, ("before record intent step", 4))
    job_id = given_job(scene)
    scene.write_plan(job_id=job_id, sub_jobs=[], experiment_name=None)
    die_at(scene, *places)
    result = scene.drive().result
    assert result["job_id"] == job_id
    end(scene, job_id)
    check_end(scene.evidence, scene.material.reference, scene.service, result)
    assert replayed(scene.evidence, scene.material.reference) == 1


# The fourth step is delivered twice, so the save behind it shows a count too many; the save after step 2 goes back in.
IN_PLACE = {
    "began": ([("before record ended", 4), ("after record ended", 4), ("before record segment", 0)], 1),
    "sent": ([("before record intent load", 2)], 1),
    "done": ([("after record sent load", 2), ("before record outcome load done", 2)], 1),
    "counted": ([("answered send save", 2, 2), ("after record outcome save done", 2)], 1),
    # Nobody knows whether the load lands among the steps to come, so it costs the job.
    "without an answer": ([("answered send load", 2)], 2),
}


@pytest.mark.parametrize(("places", "jobs"), IN_PLACE.values(), ids=IN_PLACE)
def test_a_driver_killed_while_a_save_goes_back_into_its_job_ends_with_the_same_weights(scene, places, jobs):
    scene.write_plan(load_in_place=True)
    scene.doubled = 1
    scene.proxy.add(r"^POST .*/step$", TWICE, skip=3)
    die_at(scene, *places)
    scene.finish()
    assert len({segment.job_id for segment in scene.evidence.segments}) == jobs
