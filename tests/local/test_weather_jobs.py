"""Bad weather for jobs: restarts, failures, capacity, credentials, slow cancels."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest

from cortex_training.local.control_client import ControlError, ServiceControl
from tests.conftest import ServiceFactory
from tests.local.api import Caller, RunningJob, chunks_of, masked_frame, sampling, token_batch, training


@pytest.fixture
def job(weathered: Caller) -> Iterator[RunningJob]:
    job = weathered.running(training(), sampling())
    yield job
    job.call("POST", ":cancel")


def operations(control: ServiceControl, job: RunningJob) -> list[str]:
    return [entry["op"] for entry in control.executions(job.job_id)]


def has_gradients(job: RunningJob) -> bool:
    """Whether the step that this makes had anything to spend (in a simulation)."""
    return bool(job.step()["metrics"]["grad_norm"])


@pytest.mark.parametrize(
    ("loses", "gradients", "executed"),
    [("gradients", False, 1), ("groups", True, 2), ("both", False, 2)],
)
def test_what_a_restart_loses(
    job: RunningJob, control: ServiceControl, loses: str, gradients: bool, executed: int
) -> None:
    frame = masked_frame(token_batch())
    job.forward_backward(frame, group_id="g")
    control.act("restart-worker", job.job_id, loses=loses)
    if executed == 2:
        # The group is new to the worker, and its gradient with it.
        assert has_gradients(job) is gradients
        job.forward_backward(frame, group_id="g")
    else:
        job.forward_backward(frame, group_id="g")
        assert has_gradients(job) is gradients
    assert operations(control, job).count("forward-backward") == executed


def test_a_restart_loses_both_unless_told_otherwise(job: RunningJob, control: ServiceControl) -> None:
    chunks = chunks_of(masked_frame(token_batch(16, 64)), group_id="g", max_bytes=18_000)
    job.forward_backward(masked_frame(token_batch()))
    job.post_frame(chunks[0])
    control.act("restart-worker", job.job_id)
    answer = job.post_frame(chunks[-1])
    assert (answer.status_code, "chunk_group_restart_required" in answer.text) == (409, True)
    assert not has_gradients(job)


def test_what_a_restart_loses_is_an_assumption(start_local_service: ServiceFactory) -> None:
    service = start_local_service(faults=[], simulate="0", assume=["worker-restart=groups"])
    job = Caller(service.url).running(training())
    job.forward_backward(masked_frame(token_batch()), group_id="g")
    service.control.act("restart-worker", job.job_id)
    assert has_gradients(job)
    job.forward_backward(masked_frame(token_batch()), group_id="g")
    assert operations(service.control, job) == ["forward-backward", "step", "forward-backward"]


def test_only_the_sub_job_that_is_named_restarts(job: RunningJob, control: ServiceControl) -> None:
    job.forward_backward(masked_frame(token_batch()), group_id="g")
    control.act("restart-worker", job.job_id, sub_job="sampling", seconds=30)
    states = [one["status"] for one in job.describe()["sub_jobs"]]
    assert states == ["running", "initializing"]
    assert job.describe()["status"] == "running"
    refused = job.call("POST", "/step", json={})
    assert (refused.status_code, "restarting" in refused.json()["message"]) == (409, True)
    control.act("restart-worker", job.job_id, sub_job=f"{job.job_id}:sampling:0", seconds=0)
    assert has_gradients(job)
    with pytest.raises(ControlError, match="sub_job: 'other' is no sub-job"):
        control.act("restart-worker", job.job_id, sub_job="other")


def test_a_restart_right_after_a_step(job: RunningJob, control: ServiceControl) -> None:
    control.add("restart-worker", on="forward-backward", when="executed", skip=1, loses="gradients")
    for _ in range(2):
        job.forward_backward(masked_frame(token_batch()))
    assert not has_gradients(job)
    job.forward_backward(masked_frame(token_batch()))
    assert has_gradients(job)


def test_a_restart_can_take_the_requests_that_wait(job: RunningJob, control: ServiceControl) -> None:
    control.add("slow-operation", on="step", seconds=0.4)
    running, waiting = (job.call("POST", "/step", json={}) for _ in range(2))
    wait_for_state(job, running, "running")
    control.act("restart-worker", job.job_id, requests="failed")
    pages = [job.poll(reply) for reply in (running, waiting)]
    assert [page["status"] for page in pages] == ["failed", "failed"]
    assert "the worker restarted" in pages[1]["error"]
    # The one that ran could not be stopped: a result that was lost.
    assert operations(control, job) == ["step"]
    assert job.step()["global_steps"] == 2


def wait_for_state(job: RunningJob, reply: Any, state: str) -> None:
    until = time.monotonic() + 10
    while job.call("GET", f"/requests/{reply.json()['request_id']}").json()["status"] != state:
        assert time.monotonic() < until


@pytest.mark.parametrize(("groups", "partial", "completed"), [("partial", 409, 1), ("completed", 200, 2)])
def test_some_groups_are_forgotten(
    job: RunningJob, control: ServiceControl, groups: str, partial: int, completed: int
) -> None:
    frame = masked_frame(token_batch())
    chunks = chunks_of(masked_frame(token_batch(16, 64)), group_id="partial", max_bytes=18_000)
    job.forward_backward(frame, group_id="completed")
    for chunk in chunks[:-1]:
        job.post_frame(chunk)
    control.act("forget-groups", job.job_id, groups=groups, sub_job="training")
    job.forward_backward(frame, group_id="completed")
    assert operations(control, job).count("forward-backward") == completed
    assert job.post_frame(chunks[-1]).status_code == partial


def test_a_job_fails_at_a_step(job: RunningJob, control: ServiceControl) -> None:
    control.add("fail-job", on="step", when="executed", at_step=3, reason="node lost", job_id=job.job_id)
    for number in (1, 2):
        assert job.step()["global_steps"] == number
    reply = job.call("POST", "/step", json={})
    described = job.wait_for("failed")
    assert described["reason"] == "node lost"
    poll = job.call("GET", f"/requests/{reply.json()['request_id']}")
    assert (poll.status_code, poll.json()["job_status"], poll.json()["reason"]) == (409, "failed", "node lost")
    assert operations(control, job) == ["step"] * 3


def test_a_job_is_terminated_before_it_takes_a_request(job: RunningJob, control: ServiceControl) -> None:
    control.add("fail-job", on="save", state="terminated")
    assert job.call("POST", "/save", json={}).status_code == 409
    assert job.describe()["status"] == "terminated"
    assert operations(control, job) == []


@pytest.mark.parametrize(("when", "executed"), [("before", []), ("executed", ["step"])])
def test_a_request_fails(job: RunningJob, control: ServiceControl, when: str, executed: list[str]) -> None:
    control.add("fail-request", on="step", when=when, error="CUDA out of memory")
    page = job.poll(job.call("POST", "/step", json={}))
    assert (page["status"], page["error"], page["result"]) == ("failed", "CUDA out of memory", None)
    assert operations(control, job) == executed


def test_a_slow_operation_counts_as_work(job: RunningJob, control: ServiceControl) -> None:
    control.add("slow-operation", on="save", seconds=0.2)
    job.save()
    job.step()
    busy = control.busy(job.job_id)
    assert busy["operations"]["save"]["busy_s"] >= 0.2
    assert busy["operations"]["step"]["count"] == 1
    assert busy["busy_s"] == pytest.approx(sum(one["busy_s"] for one in busy["operations"].values()))
    assert busy in control.busy_jobs()


def test_a_slow_cancel_holds_its_gpus_meanwhile(weathered: Caller, control: ServiceControl) -> None:
    job = weathered.running(training(config={"n_gpus": 8}), hardware="B300")
    control.add("slow-cancel", on="cancel-job", seconds=0.5, job_id=job.job_id)
    assert job.call("POST", ":cancel").json()["status"] == "cancelling"
    assert weathered.call("GET", "/capacity?hardware=B300").json()["in_use_gpus"] == 8
    assert job.call("POST", ":cancel").status_code == 200
    job.wait_for("cancelled")
    assert weathered.call("GET", "/capacity?hardware=B300").json()["in_use_gpus"] == 0


def test_capacity_is_lost_and_comes_back(start_local_service: ServiceFactory) -> None:
    service = start_local_service(faults=[], simulate="0", gpus=4)
    caller, control = Caller(service.url), service.control
    older, newer = (caller.running(training(config={"n_gpus": 2})) for _ in range(2))
    control.act("set-capacity", gpus=1, hardware="H200")
    capacity = caller.call("GET", "/capacity?hardware=H200").json()
    assert (capacity["max_total_gpus"], capacity["in_use_gpus"], capacity["available_gpus"]) == (1, 4, 0)
    assert older.describe()["status"] == newer.describe()["status"] == "running"
    control.act("set-capacity", gpus=2, evict=True)
    assert (newer.describe()["status"], newer.describe()["reason"]) == ("failed", "capacity_lost")
    assert older.describe()["status"] == "running"
    waiting = RunningJob(caller, caller.create(training(config={"n_gpus": 2})).json()["job_id"])
    assert waiting.describe()["status"] == "pending"
    control.act("set-capacity", gpus=16)
    waiting.wait_for("running")


def test_a_token_expires_for_the_request_that_brings_it(weathered: Caller, control: ServiceControl) -> None:
    control.add("expire-token", on="capacity", skip=1)
    old, new = {"authorization": "Bearer old"}, {"authorization": 'Snowflake Token="new"'}
    statuses = [weathered.call("GET", "/capacity", headers=headers).status_code for headers in (old, old, old, new)]
    assert statuses == [200, 401, 401, 200]
    assert weathered.call("GET", "/capacity", headers=old).json()["code"] == "390112"
    assert weathered.call("GET", "/capacity").status_code == 200


def test_every_token_expires_for_a_while(weathered: Caller, control: ServiceControl) -> None:
    tokens = [{"authorization": f"Bearer {name}"} for name in ("one", "two")]
    for token in tokens:
        weathered.call("GET", "/capacity", headers=token)
    control.act("expire-token", requests=2, code="390114")
    assert [weathered.call("GET", "/capacity", headers=tokens[0]).status_code for _ in range(3)] == [401, 401, 200]
    assert weathered.call("GET", "/capacity", headers=tokens[1]).json()["code"] == "390114"


def test_what_cannot_happen_to_a_job_is_said_and_changes_nothing(job: RunningJob, control: ServiceControl) -> None:
    rule = control.add("restart-worker", on="step", when="executed", sub_job="nothing", job_id=job.job_id)
    assert job.step()["global_steps"] == 1
    assert control.fired(rule) == 1
    with pytest.raises(ControlError, match="job_id: fail-job happens to a job"):
        control.act("fail-job")
    with pytest.raises(ControlError, match="404"):
        control.act("fail-job", "unknown")


def test_a_model_that_really_trains_loses_its_gradients(start_local_service: ServiceFactory) -> None:
    service = start_local_service(faults=[], execution_log_weights=True)
    control, job = service.control, Caller(service.url).running(training())
    job.forward_backward(masked_frame(token_batch(seed=1)))
    control.act("restart-worker", job.job_id, loses="gradients")
    # AdamW leaves weights alone that have no gradient.
    assert job.step()["metrics"]["grad_norm"] == 0.0
    job.forward_backward(masked_frame(token_batch(seed=2)))
    assert job.step()["metrics"]["grad_norm"] > 0.0
    saved = job.save()
    job.forward_backward(masked_frame(token_batch(seed=3)))
    job.step()
    job.load(saved)
    hashes = [one["weights_sha256"] for one in control.executions(job.job_id) if one["op"] != "forward-backward"]
    lost, second, at_save, third, loaded = hashes
    assert second == at_save == loaded
    assert len({lost, second, third}) == 3
    assert [len(one) for one in hashes] == [64] * 5
