"""The forms of answers that clients have met, each behind a switch."""

from __future__ import annotations

from tests.conftest import ServiceFactory
from tests.local.api import Caller, masked_frame, sampling, token_batch, training


def test_enum_names_floats_and_missing_fields(start_local_service: ServiceFactory) -> None:
    service = start_local_service(
        assume=["state-names=enum", "config-numbers=floats", "zero-fields=omitted", "submitter=absent"], gpus=2
    )
    caller = Caller(service.url)
    job_id = caller.create(training(seed=3), sampling()).json()["job_id"]
    while (job := caller.call("GET", f"/{job_id}").json())["status"] != "JOB_STATE_RUNNING":
        assert job["status"].startswith("JOB_STATE_")
    assert "reason" not in job
    assert "submitted_by" not in job
    config = job["sub_jobs"][0]["training_config"]
    assert (repr(config["max_seq_len"]), repr(job["sub_jobs"][0]["seed"])) == ("128.0", "3.0")
    assert job["sub_jobs"][0]["status"] == "JOB_STATE_RUNNING"
    reply = caller.call(
        "POST",
        f"/{job_id}/forward-backward",
        data=masked_frame(token_batch()),
        headers={"content-type": "application/octet-stream"},
    )
    path = f"/{job_id}/requests/{reply.json()['request_id']}"
    while (page := caller.call("GET", path).json())["status"] != "REQUEST_STATE_DONE":
        assert page["status"] in ("REQUEST_STATE_PENDING", "REQUEST_STATE_RUNNING")
        assert "result" not in page
    assert page["result"]
    assert "error" not in page
    assert "next_cursor" not in page
    assert "available_gpus" not in caller.call("GET", "/capacity", params={"hardware": "H200"}).json()


def test_an_account_without_gpus_answers_with_nothing(start_local_service: ServiceFactory) -> None:
    caller = Caller(start_local_service(assume="zero-fields=omitted", gpus=0).url)
    assert caller.call("GET", "/capacity").json() == {}


def test_a_state_that_nobody_lists_comes_as_a_number(start_local_service: ServiceFactory) -> None:
    caller = Caller(start_local_service(assume="unlisted-states=numbered").url)
    job = caller.running(sampling(config={"max_seq_len": 4096}, model_name="Qwen/Qwen3-8B"))
    asked = {"prompts": [[5]] * 256, "sampling_params": {"max_tokens": 4000, "ignore_eos": True}}
    reply = job.call("POST", "/generate", json=asked)
    while job.call("GET", f"/requests/{reply.json()['request_id']}").json()["status"] != "running":
        pass
    job.call("POST", ":cancel")
    seen = {job.describe()["status"]}
    while "cancelled" not in seen:
        seen.add(job.describe()["status"])
    assert seen <= {8, "cancelled"}
