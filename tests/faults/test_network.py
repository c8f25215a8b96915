"""Answers that never come, come late or come twice; refusals in a row; batches that the service gave up."""

import json

import pytest
import requests

from tests.faults.oracle import replayed
from tests.faults.proxy import ANSWER, DROP_AFTER, DROP_BEFORE, LATE, TWICE

pytestmark = pytest.mark.live

STEP, BATCH, SAVE = r"^POST .*/step$", r"^POST .*/forward-backward$", r"^POST .*/save$"
CREATE, POLL, CANCEL = r"^POST .*/cortex-training$", r"^GET .*/requests/", r"^POST .*:cancel$"


@pytest.mark.parametrize(
    "skip",
    [pytest.param(0, id="first", marks=pytest.mark.long), pytest.param(2, id="middle"), pytest.param(4, id="last")],
)
@pytest.mark.parametrize(("action", "segments"), [(DROP_BEFORE, 2), (DROP_AFTER, 1), (LATE, 2)])
def test_a_step_without_an_answer_is_settled_by_a_save(scene, action, segments, skip):
    # Late is later than the settling save: the step lands on a job that was given up.
    scene.proxy.add(STEP, action, skip=skip, delay_s=8.0)
    assert scene.finish()["segments"] == segments
    assert replayed(scene.evidence, scene.material.reference) == 0


@pytest.mark.parametrize("skip", [0, 1, 4], ids=["first", "before a save", "last"])
def test_a_step_that_the_network_repeats_costs_its_job(scene, skip):
    scene.doubled = 1
    scene.proxy.add(STEP, TWICE, skip=skip)
    assert scene.finish()["segments"] == 2


def test_nothing_else_is_changed_by_lost_late_or_repeated_messages(scene):
    for action, skip in ((DROP_BEFORE, 0), (DROP_AFTER, 1), (TWICE, 3), (LATE, 5)):
        scene.proxy.add(BATCH, action, skip=skip)
    for action, skip in ((DROP_BEFORE, 2), (DROP_AFTER, 5), (TWICE, 8)):
        scene.proxy.add(POLL, action, skip=skip)
    for action, skip in ((DROP_AFTER, 0), (TWICE, 1), (DROP_BEFORE, 2)):
        scene.proxy.add(SAVE, action, skip=skip)
    scene.proxy.add(CREATE, DROP_AFTER)
    scene.proxy.add(CANCEL, DROP_AFTER)
    assert scene.finish()["segments"] == 1


@pytest.mark.long
@pytest.mark.parametrize("pattern", [CREATE, SAVE], ids=["create", "save"])
@pytest.mark.parametrize("action", [DROP_BEFORE, TWICE, LATE])
def test_a_job_and_a_save_survive_the_same(scene, pattern, action):
    scene.proxy.add(pattern, action)
    assert scene.finish()["segments"] == 1


def test_a_storm_of_refusals_is_waited_out(scene):
    for pattern, status in ((BATCH, 503), (POLL, 502), (CREATE, 503), (SAVE, 429), (STEP, 429)):
        scene.proxy.add(pattern, ANSWER, skip=0 if pattern == CREATE else 1, times=3, status=status)
    assert scene.finish()["segments"] == 1


def test_a_step_refused_beyond_its_window_is_promised_again(scene):
    scene.proxy.add(STEP, ANSWER, skip=1, times=2, status=429, headers={"Retry-After": "2"})
    assert scene.finish()["segments"] == 1


def restart_required():
    """As the gateway wraps it: the worker's own answer is JSON inside the message."""
    detail = {"detail": {"code": "chunk_group_restart_required", "message": "unknown", "expected_start_chunk": 0}}
    return {"code": "517604", "message": f"forwardBackward failed: zone returned 409: {json.dumps(detail)}"}


def test_a_batch_that_has_to_start_over_once_is_sent_again(scene):
    scene.proxy.add(BATCH, ANSWER, skip=3, status=409, body=restart_required())
    assert scene.finish()["segments"] == 1


def test_a_worker_that_keeps_forgetting_its_batches_is_not_trusted(scene):
    scene.proxy.add(BATCH, ANSWER, skip=5, times=2, status=409, body=restart_required())
    assert scene.finish()["segments"] == 2


def test_a_cancelled_batch_gets_a_new_name(scene):
    cancel_a_batch(scene, skip=3)
    assert scene.finish()["segments"] == 1


def test_a_credential_that_ends_stops_drivers_and_not_the_run(scene):
    for pattern, skip in ((CREATE, 0), (BATCH, 2), (STEP, 1), (SAVE, 0), (POLL, 3)):
        scene.proxy.add(pattern, ANSWER, skip=skip, status=401, body={"code": "390114", "message": "token expired"})
        ended = scene.drive()
        assert ended.code == 1
        assert "token expired" in ended.err
    assert scene.finish()["segments"] == 1


def cancel_a_batch(scene, skip):
    """Keep the job busy with saves, so that the batch behind them can be cancelled before it begins."""
    job_id = []

    def occupy():
        job_id[:] = [scene.evidence.segments[-1].job_id]
        for _ in range(8):
            requests.post(f"{scene.service.url}/{job_id[0]}/save", json={"checkpoint_type": "resumable"}, timeout=30)

    def cancel(answer):
        order = {"operation_type": "cancel-request", "payload": {"request_id": answer["request_id"]}}
        requests.post(f"{scene.service.url}/{job_id[0]}/operation", json=order, timeout=30).raise_for_status()

    scene.proxy.add(BATCH, "forward", skip=skip, before=occupy, after=cancel)
