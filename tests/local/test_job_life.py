"""States of jobs: who waits, who runs, who is taken down, and what is refused when."""

from __future__ import annotations

import uuid
from typing import Any

import pytest

from tests.conftest import RunningService, ServiceFactory
from tests.local.api import Caller, RunningJob, masked_frame, sampling, token_batch, training

BIG = {"max_tokens": 400, "ignore_eos": True}
"""Sampling parameters that keep the tiny model busy for a moment."""


def test_what_a_job_shows_of_itself(caller: Caller) -> None:
    trainer, sampler = training(seed=3, dtype="bfloat16"), sampling()
    job = caller.running(trainer, sampler, experiment_name="nightly", hardware="B200", idle_timeout_seconds=600)
    described = job.describe()
    assert described["sub_jobs"] == [
        {"sub_job_id": f"{job.job_id}:training:0", "status": "running", **trainer},
        {"sub_job_id": f"{job.job_id}:sampling:0", "status": "running", **sampler},
    ]
    assert (described["hardware"], described["idle_timeout_seconds"]) == ("B200", 600)
    assert described["created_at"] <= described["updated_at"]
    run = job.call("GET", "/experiment-run").json()
    assert run["experiment_name"] == "TESTS.PUBLIC.NIGHTLY"
    assert run["experiment_run_name"]


def test_a_callers_id_is_honoured_once(caller: Caller, contrary: Caller) -> None:
    job_id = str(uuid.uuid4())
    assert caller.create(training(), job_id=job_id).json() == {"job_id": job_id}
    duplicate = caller.create(training(), job_id=job_id)
    assert (duplicate.status_code, duplicate.json()["code"]) == (409, 409)
    assert contrary.create(training(), job_id=job_id).json()["job_id"] != job_id


def test_jobs_wait_for_gpus_in_order(start_local_service: ServiceFactory) -> None:
    """A placing job holds its GPUs, and this service's jobs stay placing: no model is loaded for the test."""
    caller = Caller(start_local_service(gpus=4, placing_seconds=600).url)
    first, second, third = (created(caller, n_gpus) for n_gpus in (3, 2, 1))
    assert first.describe()["status"] == "placing"
    waiting = second.describe()
    assert waiting["status"] == "pending"
    assert "2 H200 GPUs" in waiting["reason"]
    assert third.describe()["status"] == "pending"
    capacity = caller.call("GET", "/capacity", params={"hardware": "H200"}).json()
    assert capacity == {
        "has_reservation": True,
        "max_total_gpus": 4,
        "reserved_gpus": 4,
        "in_use_gpus": 3,
        "pending_gpus": 3,
        "available_gpus": 1,
    }
    assert caller.call("GET", "/capacity", params={"hardware": "B300"}).json()["in_use_gpus"] == 0
    assert caller.call("GET", "/capacity").json()["max_total_gpus"] == 12
    assert caller.call("GET", "/capacity", params={"hardware": "A10"}).status_code == 400
    first.call("POST", ":cancel")
    assert [job.describe()["status"] for job in (second, third)] == ["placing", "placing"]
    elsewhere = created(caller, 4, hardware="B200")
    assert elsewhere.describe()["status"] == "placing"
    shared = training(config={"n_gpus": 4, "multiplex_job_id": f"{elsewhere.job_id}:training:0"})
    multiplexed = RunningJob(caller, caller.create(shared, hardware="B200").json()["job_id"])
    assert multiplexed.describe()["status"] == "placing"


def created(caller: Caller, n_gpus: int, **fields: Any) -> RunningJob:
    reply = caller.create(training(config={"n_gpus": n_gpus}), **fields)
    assert reply.status_code == 200, reply.text
    return RunningJob(caller, reply.json()["job_id"])


def test_lists_are_filtered_by_state_and_place(start_local_service: ServiceFactory) -> None:
    service = start_local_service(gpus=1, placing_seconds=600)
    caller = Caller(service.url)
    placing, waiting = (created(caller, 1).job_id for _ in range(2))

    def ids(**query: str) -> list[str]:
        return [job["job_id"] for job in caller.call("GET", "", params=query).json()["jobs"]]

    assert ids() == [placing, waiting]
    assert ids(status="placing") == ids(status="JOB_STATE_PLACING") == [placing]
    assert ids(status="pending") == [waiting]
    assert ids(status="terminated") == []
    elsewhere = Caller(service.url.replace("/schemas/PUBLIC/", "/schemas/OTHER/"))
    assert elsewhere.call("GET", "").json() == {"jobs": []}
    assert elsewhere.call("GET", f"/{placing}").status_code == 404
    assert Caller(service.url.replace("TESTS", "tests")).call("GET", f"/{placing}").status_code == 200


def test_cancelling_is_idempotent_and_ends_everything(caller: Caller) -> None:
    job = caller.running(training(), sampling())
    reply = job.post_frame(masked_frame(token_batch()))
    job.poll(reply)
    assert job.call("POST", ":cancel").status_code == 200
    ended = job.wait_for("cancelled")
    assert job.call("POST", ":cancel").status_code == 200
    assert ended["gpu_seconds"] > 0
    for refused in (
        job.call("GET", f"/requests/{reply.json()['request_id']}"),
        job.post_frame(masked_frame(token_batch())),
        job.call("POST", "/step", json={}),
        job.call("POST", "/save", json={}),
        job.call("POST", "/load", json={"checkpoint_id": "x"}),
        job.call("POST", "/generate", json={"prompts": ["a"]}),
        job.operation("weight-sync", {}),
        job.operation("tail-logs", {}),
    ):
        assert refused.status_code == 409
        assert refused.json()["job_status"] == "cancelled"
        assert "cancelled" in refused.json()["message"]
    assert job.describe()["gpu_seconds"] == ended["gpu_seconds"]


def test_polls_after_the_end_can_be_served(contrary: Caller) -> None:
    job = contrary.running()
    reply = job.post_frame(masked_frame(token_batch()))
    result = job.poll(reply)
    job.call("POST", ":cancel")
    assert job.poll(reply) == result


def test_cancelling_while_an_operation_runs_stops_it(caller: Caller, local_service: RunningService) -> None:
    job = caller.running(sampling(config={"max_seq_len": 4096}, model_name="Qwen/Qwen3-8B"))
    job.call(
        "POST", "/generate", json={"prompts": [[5]] * 64, "sampling_params": {"max_tokens": 4000, "ignore_eos": True}}
    )
    queued = job.call("POST", "/generate", json={"prompts": ["never sampled"]})
    assert queued.status_code == 200
    assert job.call("POST", ":cancel").json()["status"] in ("cancelling", "cancelled")
    job.wait_for("cancelled")
    assert local_service.execution_log(job.job_id) == []


def test_a_waiting_request_can_be_cancelled(caller: Caller, local_service: RunningService) -> None:
    job = caller.running(sampling(config={"max_seq_len": 4096}, model_name="Qwen/Qwen3-8B"))
    endless = {"prompts": [[5]] * 64, "sampling_params": {"max_tokens": 4000, "ignore_eos": True}}
    running = job.call("POST", "/generate", json=endless)
    queued = job.call("POST", "/generate", json={"prompts": ["never sampled"]})
    dropped = job.operation("cancel-request", {"request_id": queued.json()["request_id"]})
    assert dropped.json()["cancelled"] is True
    assert job.poll(queued)["status"] == "cancelled"
    job.operation("cancel-request", {"request_id": running.json()["request_id"]})
    assert job.poll(running)["status"] == "cancelled"
    assert job.generate([[5]], sampling_params={"max_tokens": 2})
    assert [entry["op"] for entry in local_service.execution_log(job.job_id)] == ["generate"]
    assert job.operation("cancel-request", {"request_id": "unknown"}).status_code == 404


def test_requests_of_a_sub_job_run_in_order(caller: Caller, local_service: RunningService) -> None:
    job = caller.running()
    replies = []
    for step in range(4):
        replies.append(job.post_frame(masked_frame(token_batch(8, 64, seed=step))))
        replies.append(job.call("POST", "/step", json={}))
    replies.append(job.call("POST", "/save", json={}))
    assert [job.poll(reply)["status"] for reply in replies] == ["done"] * 9
    operations = [entry["op"] for entry in local_service.execution_log(job.job_id)]
    assert operations == ["forward-backward", "step"] * 4 + ["save"]
    assert [entry["request_id"] for entry in local_service.execution_log(job.job_id)] == [
        reply.json()["request_id"] for reply in replies
    ]


def test_a_generate_sent_after_a_sync_sees_its_weights(caller: Caller) -> None:
    """Though the sync still waits for the training sub-job's earlier work."""
    job = caller.running(training(), sampling())
    payload = {"source_sub_job_id": f"{job.job_id}:training:0", "target_sub_job_ids": [f"{job.job_id}:sampling:0"]}
    asked = {"prompts": [[5, 6, 7]], "sampling_params": {"max_tokens": 12, "temperature": 0}}
    for seed in range(10):
        job.post_frame(masked_frame(token_batch(8, 128, seed=seed)))
        job.call("POST", "/step", json={"learning_rate": 2e-2})
    sync = job.operation("weight-sync", payload)
    sampled = job.call("POST", "/generate", json=asked)
    after = job.done(sampled)["results"]
    assert job.poll(sync)["status"] == "done"
    assert job.generate(**asked) == after


def test_states_from_the_beginning_to_idle(start_local_service: ServiceFactory) -> None:
    caller = Caller(start_local_service(timeout_scale=0.01, gpus=1, placing_seconds=0.5).url)
    job = RunningJob(caller, caller.create(idle_timeout_seconds=300).json()["job_id"])
    seen: list[str] = []
    while not seen or seen[-1] != "running":
        state = job.describe()["status"]
        if not seen or seen[-1] != state:
            seen.append(state)
    assert seen == ["placing", "initializing", "running"]
    waiting = RunningJob(caller, caller.create(pending_timeout_seconds=300, hardware="H200").json()["job_id"])
    never_idle = caller.running(idle_timeout_seconds=0, hardware="B200")
    job.done(job.call("POST", "/step", json={}))
    ended = job.wait_for("terminated", "failed", "cancelled")
    assert (ended["status"], ended["reason"]) == ("terminated", "idle_timeout")
    refused = job.call("POST", ":cancel")
    assert (refused.status_code, refused.json()["job_status"]) == (409, "terminated")
    too_big = RunningJob(
        caller, caller.create(training(config={"n_gpus": 2}), pending_timeout_seconds=300).json()["job_id"]
    )
    ended = too_big.wait_for("terminated", "failed", "cancelled")
    assert (ended["status"], ended["reason"]) == ("failed", "pending_timeout")
    assert too_big.call("POST", ":cancel").status_code == 409
    assert too_big.describe()["gpu_seconds"] == 0
    assert waiting.describe()["status"] in ("running", "terminated", "failed")
    assert never_idle.describe()["status"] == "running"


def test_a_model_that_cannot_start_fails_the_job(caller: Caller) -> None:
    lora = {"peft_type": "Lora", "target_modules": ["no_such_module"]}
    created = caller.create(training(config={"peft_config": lora}))
    job = RunningJob(caller, created.json()["job_id"])
    failed = job.wait_for("running", "failed")
    assert failed["status"] == "failed"
    assert "no_such_module" in failed["reason"]


def test_models_of_the_services_table_run_on_a_stand_in(caller: Caller, contrary: Caller) -> None:
    job = caller.running(training(model_name="Qwen/Qwen3-8B", config={"max_seq_len": 2048}))
    described = job.describe()
    assert "Qwen/Qwen3-8B" in described["reason"]
    assert described["sub_jobs"][0]["model_name"] == "Qwen/Qwen3-8B"
    job.forward_backward(masked_frame(token_batch(1, 1500)))
    refused = contrary.create(training(model_name="Qwen/Qwen3-8B"))
    assert refused.status_code == 400
    assert "--model ID=PATH" in refused.json()["message"]


def test_a_given_folder_is_a_model(contrary: Caller) -> None:
    job = contrary.running(training(model_name="acme/own"))
    assert job.describe()["reason"] == ""
    refused = contrary.create(training(model_name="acme/own", config={"max_seq_len": 513}))
    assert refused.status_code == 400
    assert "max_seq_len" in refused.json()["message"]


def test_logs_are_read_page_by_page(caller: Caller) -> None:
    job = caller.running()
    for seed in range(5):
        job.forward_backward(masked_frame(token_batch(seed=seed)))
    pages, cursor = [], "0"
    while True:
        page = job.operation("tail-logs", {"cursor": cursor, "max_lines": 2}).json()
        pages.append(page["entries"])
        cursor = page["next_cursor"]
        if page["eof"]:
            break
    messages = [entry["message"] for entries in pages for entry in entries]
    assert len(messages) == 6
    assert sum(message.startswith("forward-backward done loss") for message in messages) == 5
    assert job.operation("tail-logs", {"cursor": cursor}).json() == {"entries": [], "next_cursor": cursor, "eof": True}
    assert [entry["message"] for entry in job.operation("tail-logs", {"max_lines": 3}).json()["entries"]] == messages[
        :3
    ]
    for payload in ({"cursor": "x"}, {"cursor": "999"}, {"max_lines": 0}, {"max_lines": "2"}):
        assert job.operation("tail-logs", payload).status_code == 400


def test_logs_are_served_while_placing_and_nothing_else_is(start_local_service: ServiceFactory) -> None:
    caller = Caller(start_local_service(placing_seconds=60).url)
    job = RunningJob(caller, caller.create().json()["job_id"])
    job.wait_for("placing")
    assert job.operation("tail-logs", {}).json()["entries"] == []
    refused = job.call("POST", "/step", json={})
    assert (refused.status_code, refused.json()["job_status"]) == (409, "placing")
    job.call("POST", ":cancel")
    assert job.describe()["status"] == "cancelled"


@pytest.mark.parametrize(
    ("hints", "status"),
    [
        ({"sub_job_type": "sampling"}, 200),
        ({"sub_job_id": "{job}:sampling:0"}, 200),
        ({"sub_job_id": "{job}:sampling:0", "sub_job_type": "sampling"}, 200),
        ({}, 200),
        ({"sub_job_id": "{job}:training:0", "sub_job_type": "sampling"}, 400),
        ({"sub_job_id": "{job}:sampling:7"}, 400),
        ({"sub_job_type": "log_prob"}, 400),
        ({"sub_job_type": "everything"}, 400),
        ({"sub_job_type": "training"}, 400),
    ],
)
def test_operations_are_routed_by_hints(caller: Caller, hints: dict[str, str], status: int) -> None:
    job = caller.running(training(), sampling())
    filled = {name: value.format(job=job.job_id) for name, value in hints.items()}
    reply = job.operation("reset-prefix-cache", {"drain": True, "timeout_s": 30, "retry_interval_s": 0.1}, **filled)
    assert reply.status_code == status, reply.text


def test_memory_is_reported_when_asked_for(caller: Caller) -> None:
    job = caller.running(training(config={"step_peak_memory_log": True, "training_memory_telemetry": True}))
    job.forward_backward(masked_frame(token_batch()))
    peak = job.step()["peak_memory"]
    assert peak["gpu_peak"] > 100_000_000
    assert peak["cpu_peak"] > 100_000_000
    entries = [entry for entry in job.operation("tail-logs", {}).json()["entries"] if "memory" in entry]
    assert [entry["event"] for entry in entries] == ["fwd_bwd_end", "step_start", "step_end"]
    assert all(entry["memory"]["gpu_peak"] > 100_000_000 for entry in entries)
    assert "peak_memory" not in caller.running().step()
