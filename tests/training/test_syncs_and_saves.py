"""Saves and weight syncs that the service fails, and what samplers hold after a job was replaced."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor

import pytest

from cortex_training.publication import PublicationLog
from cortex_training.training import RunFailed, status
from tests.conftest import start_service
from tests.training.conftest import Runs
from tests.training.test_bad_nights import on_client


@pytest.fixture(scope="module")
def stormy(tmp_path_factory):
    service = start_service(tmp_path_factory.mktemp("stormy"), faults=[], gpus=256)
    yield service
    service.stop()


@pytest.fixture
def failing(stormy, manifest, tmp_path):
    """Runs on a service whose operations can be failed."""
    yield Runs(stormy, manifest, tmp_path / "run", stormy.base_url)
    stormy.control.clear()


@pytest.mark.parametrize("operation", ["save", "weight-sync"])
def test_what_fails_once_is_sent_again(failing, stormy, operation):
    rule = stormy.control.add("fail-request", on=operation, error="node hiccup")
    result = failing.run(failing.plan(weight_sync_every_steps=2))
    assert stormy.control.fired(rule) == 1
    assert (result.segments, result.steps) == (1, 6)
    steps = [row["global_steps"] for row in failing.executed("step", result.job_id)]
    assert steps == [1, 2, 3, 4, 5, 6]
    assert {entry.step for entry in PublicationLog(failing.root).entries()} >= {4, 6}
    assert len(failing.executed("weight-sync", result.job_id)) == 3


@pytest.mark.parametrize(
    ("operation", "said"), [("save", "the save after step 2"), ("weight-sync", "weight sync after")]
)
def test_what_keeps_failing_ends_the_run_and_its_job(failing, stormy, operation, said):
    rule = stormy.control.add("fail-request", on=operation, error="disk full", times=0)
    with pytest.raises(RunFailed, match=f"{said}.* failed 3 times.*disk full"):
        failing.run(failing.plan(weight_sync_every_steps=2))
    assert stormy.control.fired(rule) == 3
    (job_id,) = status(failing.root).state.job_ids
    assert _state(failing, job_id) == "cancelled"


def test_samplers_of_a_new_job_begin_with_the_weights_that_its_training_begins_with(failing, stormy, tmp_path):
    """Whoever generates beside the training would be answered by the base model again until the next sync."""
    changes = {
        "weight_sync_every_steps": 2,
        "learning_rate": {"schedule": "constant", "peak": 0.05},
        "when_done": "keep",
    }
    undisturbed = failing.run(failing.plan(root=str(tmp_path / "undisturbed"), steps=2, **changes))
    expected = _generated(failing, undisturbed.job_id)

    dies = stormy.control.add("fail-job", on="step", when="executed", at_step=3, reason="node lost")
    with ThreadPoolExecutor() as threads:
        training = threads.submit(failing.run, failing.plan(**changes))
        stormy.control.wait_until_fired(dies)
        held = stormy.control.add("hold", on="forward-backward")
        try:
            stormy.control.wait_until_holding(held)
            _, second = status(failing.root).state.job_ids
            assert _generated(failing, second) == expected
        finally:
            stormy.control.release(held)
        result = training.result()
    assert (result.segments, result.job_id) == (2, second)
    assert _generated(failing, second) != expected
    for job_id in (undisturbed.job_id, second):
        on_client(failing, lambda client, job_id=job_id: client.cancel_job(job_id))


def _generated(runs: Runs, job_id: str) -> str:
    async def generate(client):
        request = await client.generate(job_id, ["What comes after 7?"], [{"max_tokens": 12, "temperature": 0.0}])
        answer = await client.poll_request(job_id, request)
        return json.dumps({**answer, "job_id": None}, sort_keys=True)

    return on_client(runs, generate)


def _state(runs: Runs, job_id: str) -> str:
    return on_client(runs, lambda client: client.get_job(job_id))["status"]
