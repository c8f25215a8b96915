"""generate-stream: results as events, which a poll takes away."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest

from cortex_training import wire
from tests.conftest import RunningService
from tests.local.api import Caller, RunningJob, sampling, training

ASKED: dict[str, Any] = {
    "prompts": [[5], [6], "seven", [8]],
    "sampling_params": [{"max_tokens": count, "temperature": 0, "ignore_eos": True} for count in (9, 3, 6, 1)],
}
OCTETS = {"content-type": "application/octet-stream"}


@pytest.fixture
def job(caller: Caller) -> RunningJob:
    return caller.running(sampling(config={"max_seq_len": 40}))


def drained(job: RunningJob, reply: Any, max_events: int = 64) -> list[dict[str, Any]]:
    """All events of a stream, and the end of its request."""
    assert reply.status_code == 200, reply.text
    events: list[dict[str, Any]] = []
    states = []
    while True:
        path = f"/requests/{reply.json()['request_id']}"
        page = job.call("GET", path, params={"max_events": max_events}).json()
        states.append(page["status"])
        assert len(page["events"]) <= max_events
        events += page["events"]
        if page["status"] not in ("pending", "streaming"):
            assert page["status"] == "done", page
            assert job.call("GET", path).json()["events"] == []
            return events


def test_events_tell_each_result_and_the_end(job: RunningJob) -> None:
    reply = job.call("POST", "/generate-stream", data=json.dumps(ASKED).encode(), headers=OCTETS)
    assert reply.json()["count"] == 4
    events = drained(job, reply, max_events=1)
    assert events[-1] == {"type": "done", "completed": 4, "failed": 0}
    results = {event["index"]: event["result"] for event in events if event["type"] == "result"}
    assert [results[index] for index in range(4)] == job.generate(**ASKED)
    # The shortest sample is there first.
    assert events[0]["index"] == 3


def test_a_frame_asks_for_framed_events(job: RunningJob) -> None:
    options = {"response_options": {"format": "dssst1", "delivery": "chunked"}}
    events = drained(job, job.post_frame(wire.dumps(ASKED, metadata=options), path="/generate-stream"))
    expected = job.generate(**ASKED)
    for event in events[:-1]:
        envelope = event["result"]
        assert (envelope["wire_format"], envelope["encoding"]) == ("DSSST1", "base64")
        result = wire.loads(base64.b64decode(envelope["payload_b64"]), framework="torch")
        assert result["token_ids"].tolist() == expected[event["index"]]["token_ids"]


def test_one_bad_prompt_does_not_spoil_the_others(job: RunningJob) -> None:
    asked = {"prompts": [[5], [6] * 40, [7]], "sampling_params": {"max_tokens": 2, "ignore_eos": True}}
    events = drained(job, job.call("POST", "/generate-stream", json=asked))
    assert {event["index"]: event["type"] for event in events[:-1]} == {0: "result", 1: "error", 2: "result"}
    assert "40 tokens" in next(event["error"] for event in events if event["type"] == "error")
    assert events[-1] == {"type": "done", "completed": 2, "failed": 1}


def test_a_stream_can_be_cancelled(caller: Caller) -> None:
    job = caller.running(sampling(config={"max_seq_len": 4096}, model_name="Qwen/Qwen3-8B"))
    asked = {
        "prompts": [[5]] * 65,
        "sampling_params": [{"max_tokens": 1}] + [{"max_tokens": 4000, "ignore_eos": True}] * 64,
    }
    reply = job.call("POST", "/generate-stream", json=asked)
    request_id = reply.json()["request_id"]
    assert job.operation("cancel-request", {"request_id": request_id}).status_code == 200
    page = job.poll(reply)
    assert page["status"] == "cancelled"


def test_bad_streams_are_refused(job: RunningJob) -> None:
    for body in (b"", b"{", b"x", b'{"prompts": []}', b'{"prompts": ["a"], "sampling_params": {"n": 3}}'):
        assert job.call("POST", "/generate-stream", data=body, headers=OCTETS).status_code == 400


def test_router_replay_operations(caller: Caller, local_service: RunningService) -> None:
    job = caller.running(training(), sampling())
    ids = {"source_sub_job_id": f"{job.job_id}:sampling:0", "target_sub_job_id": f"{job.job_id}:training:0"}
    connected = job.operation("bootstrap-router-replay", {**ids, "max_cache_bytes": 4096}, sub_job_type="training")
    assert connected.json()["status"] == "ok"
    assert job.operation("bootstrap-router-replay", ids).status_code == 400
    swapped = {"source_sub_job_id": ids["target_sub_job_id"], "target_sub_job_id": ids["source_sub_job_id"]}
    assert job.operation("bootstrap-router-replay", swapped, sub_job_type="training").status_code == 400
    bad = {**ids, "max_cache_bytes": 0}
    assert job.operation("bootstrap-router-replay", bad, sub_job_type="training").status_code == 400

    params = [{"dss_sample_id": f"rl-0-{index}", "max_tokens": 2} for index in range(3)]
    job.generate(["a", "b", "c"], sampling_params=params)
    discard = job.operation("router-replay-discard", {"sample_ids": ["rl-0-0", "rl-0-2", "other"]})
    assert discard.json()["discarded"] == 2
    assert job.operation("router-replay-discard", {"sample_ids": ["rl-0-0"]}).json()["discarded"] == 0
    assert job.operation("router-replay-discard", {"sample_ids": "rl-0-1"}).status_code == 400
    assert job.operation("router-replay-discard", {"sample_ids": []}, sub_job_type="training").status_code == 400


def test_routing_keys_choose_among_sampling_sub_jobs(caller: Caller, local_service: RunningService) -> None:
    job = caller.running(sampling(), sampling())
    for _ in range(2):
        for key in "abcdefgh":
            job.generate(["x"], sampling_params={"max_tokens": 1}, routing_key=key)
    served = [entry["sub_job"] for entry in local_service.execution_log(job.job_id)]
    assert served[:8] == served[8:]
    assert len(set(served)) == 2


def test_token_sequences_end_samples(job: RunningJob) -> None:
    params = {"max_tokens": 12, "temperature": 0, "ignore_eos": True}
    [whole] = job.generate([[5, 6, 7]], sampling_params=params)
    sequence = whole["token_ids"][3:5]
    [cut] = job.generate([[5, 6, 7]], sampling_params={**params, "dss_stop_token_sequences": [sequence]})
    assert cut["finish_reason"] == "stop"
    assert cut["token_ids"][-2:] == sequence
    assert len(cut["token_ids"]) <= 5
