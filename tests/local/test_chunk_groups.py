"""A forward-backward is executed at most once per group id, however its chunks arrive."""

from __future__ import annotations

import base64
import json
from concurrent.futures import ThreadPoolExecutor

import pytest
import requests

from cortex_training import wire
from tests.conftest import RunningService
from tests.local.api import Caller, RunningJob, chunks_of, masked_frame, result_of, sampling, token_batch

SMALL = 8192 + 1024
"""Chunk size that cuts the test's frames into several."""


def executed(service: RunningService, job: RunningJob) -> list[str]:
    return [entry["chunk_group"] for entry in service.execution_log(job.job_id) if entry["op"] == "forward-backward"]


def group_error(reply: requests.Response) -> dict[str, object]:
    """The worker's own answer, out of the gateway's message."""
    assert reply.status_code == 409, reply.text
    body = reply.json()
    assert body["code"] == "517604"
    return dict(json.loads(body["message"].partition("zone returned 409: ")[2])["detail"])


def test_a_repeated_group_is_executed_once(caller: Caller, local_service: RunningService) -> None:
    job = caller.running()
    parts = chunks_of(masked_frame(token_batch()), group_id="g-1", max_bytes=SMALL)
    assert len(parts) > 1
    for part in parts[:-1]:
        reply = job.post_frame(part)
        assert (reply.status_code, reply.json()["chunk_cached"]) == (200, True)
        assert "request_id" not in reply.json()
    first = job.post_frame(parts[-1])
    expected = job.poll(first)
    again = job.post_frame(parts[-1])
    assert again.json()["request_id"] != first.json()["request_id"]
    assert result_of(job.poll(again)) == result_of(expected)
    replies = [job.post_frame(part) for part in parts]
    assert result_of(job.poll(replies[-1])) == result_of(expected)
    assert executed(local_service, job) == ["g-1"]
    assert job.step()["metrics"] == lone_step(caller, masked_frame(token_batch()))


def lone_step(caller: Caller, frame: bytes) -> object:
    other = caller.running()
    other.forward_backward(frame)
    return other.step()["metrics"]


def test_replays_at_the_same_moment_share_one_execution(caller: Caller, local_service: RunningService) -> None:
    job = caller.running()
    [only] = chunks_of(masked_frame(token_batch(16, 128)), group_id="g-1")
    with ThreadPoolExecutor(8) as threads:
        replies = list(threads.map(lambda _: job.post_frame(only), range(16)))
    results = [result_of(job.poll(reply)) for reply in replies]
    assert all(result == results[0] for result in results)
    assert len({reply.json()["request_id"] for reply in replies}) == 16
    assert executed(local_service, job) == ["g-1"]


def test_the_log_names_the_frame(caller: Caller, local_service: RunningService) -> None:
    job = caller.running()
    frame = masked_frame(token_batch())
    loss = job.forward_backward(frame, group_id="g-1")["avg_loss"]
    job.step()
    forward, step = local_service.execution_log(job.job_id)
    assert forward["frame_sha256"] == wire.frame_sha256(frame)
    assert (forward["op"], forward["loss"], forward["global_steps"]) == ("forward-backward", loss, 0)
    assert (step["op"], step["global_steps"], step["chunk_group"]) == ("step", 1, None)
    assert step["sub_job"] == f"{job.job_id}:training:0"
    assert forward["time"] <= step["time"]


def test_an_unknown_group_starts_at_chunk_0(caller: Caller, local_service: RunningService) -> None:
    job = caller.running()
    parts = chunks_of(masked_frame(token_batch()), group_id="g-1", max_bytes=SMALL)
    detail = group_error(job.post_frame(parts[1]))
    assert detail["code"] == "chunk_group_restart_required"
    assert (detail["chunk_group_id"], detail["received_chunk"], detail["expected_start_chunk"]) == ("g-1", 1, 0)
    for part in parts:
        last = job.post_frame(part)
    job.done(last)
    assert executed(local_service, job) == ["g-1"]


def test_a_missing_chunk_is_asked_for(caller: Caller) -> None:
    job = caller.running()
    parts = chunks_of(masked_frame(token_batch(8)), group_id="g-1", max_bytes=SMALL)
    assert len(parts) > 2
    job.post_frame(parts[0])
    detail = group_error(job.post_frame(parts[-1]))
    assert detail["code"] == "chunk_group_missing_chunks"
    assert detail["message"] == "request chunk group is missing chunks"
    for part in parts[1:]:
        last = job.post_frame(part)
    job.done(last)


@pytest.mark.parametrize("finished", [True, False], ids=["after it ran", "before it ran"])
def test_a_group_id_belongs_to_one_frame(caller: Caller, local_service: RunningService, finished: bool) -> None:
    job = caller.running()
    parts = chunks_of(masked_frame(token_batch()), group_id="g-1", max_bytes=SMALL)
    for part in parts if finished else parts[:1]:
        reply = job.post_frame(part)
    if finished:
        job.done(reply)
    other_frame = chunks_of(masked_frame(token_batch(seed=1)), group_id="g-1", max_bytes=SMALL)
    other_count = chunks_of(masked_frame(token_batch()), group_id="g-1")
    for conflicting in (other_frame[0], other_count[0], with_other_payload(parts[0])):
        assert group_error(job.post_frame(conflicting))["code"] == "chunk_group_conflict"
    for part in parts:
        last = job.post_frame(part)
    job.done(last)
    assert executed(local_service, job) == ["g-1"]


def with_other_payload(chunk: bytes) -> bytes:
    return chunk[:-1] + bytes([chunk[-1] ^ 1])


def test_a_frame_that_is_not_what_its_chunks_say(caller: Caller, local_service: RunningService) -> None:
    job = caller.running()
    parts = chunks_of(masked_frame(token_batch()), group_id="g-1", max_bytes=SMALL)
    job.post_frame(with_other_payload(parts[0]))
    for part in parts[1:]:
        last = job.post_frame(part)
    assert last.status_code == 400
    for part in parts:
        last = job.post_frame(part)
    job.done(last)
    assert executed(local_service, job) == ["g-1"]


def test_the_same_group_id_in_another_job_is_another_group(caller: Caller) -> None:
    one, two = caller.running(), caller.running()
    assert one.forward_backward(masked_frame(token_batch()), group_id="g") == {
        **two.forward_backward(masked_frame(token_batch()), group_id="g"),
        "job_id": one.job_id,
    }


def test_a_failed_execution_keeps_answering_so(caller: Caller, local_service: RunningService) -> None:
    job = caller.running()
    [broken] = chunks_of(masked_frame(token_batch() + 600), group_id="g-1")
    errors = {job.poll(job.post_frame(broken))["error"] for _ in range(2)}
    assert len(errors) == 1
    assert "vocabulary" in errors.pop()
    assert executed(local_service, job) == []


def test_a_bare_frame_is_executed_each_time(caller: Caller, local_service: RunningService) -> None:
    job = caller.running()
    for _ in range(2):
        job.done(job.post_frame(masked_frame(token_batch())))
    assert executed(local_service, job) == [None, None]


def test_partial_groups_are_forgotten_when_there_is_no_room(contrary: Caller) -> None:
    job = contrary.running()
    groups = {
        f"g-{n}": chunks_of(masked_frame(token_batch(seed=n)), group_id=f"g-{n}", max_bytes=SMALL) for n in range(60)
    }
    for parts in groups.values():
        assert job.post_frame(parts[0]).status_code == 200
    assert group_error(job.post_frame(groups["g-0"][1]))["code"] == "chunk_group_restart_required"
    assert job.post_frame(groups["g-59"][1]).status_code == 200


def test_large_results_come_in_chunks(contrary: Caller) -> None:
    job = contrary.running(sampling(config={"max_seq_len": 400}))
    options = {"response_options": {"format": "dssst1", "delivery": "chunked"}}
    asked = {"prompts": [[5, 6, 7]] * 30, "sampling_params": {"max_tokens": 100, "ignore_eos": True}}
    request_id = job.poll(job.post_frame(wire.dumps(asked, metadata=options), path="/generate"))["request_id"]
    received, cursor = [], ""
    while True:
        page = job.call("GET", f"/requests/{request_id}", params={"max_events": 2, "cursor": cursor}).json()
        assert page["result"] is None
        assert 0 < len(page["events"]) <= 2
        received += [base64.b64decode(event["payload_b64"]) for event in page["events"]]
        if not page["next_cursor"]:
            break
        cursor = page["next_cursor"]
    assert len(received) > 3
    assert max(map(len, received)) <= 10_000
    results = wire.decode_result_chunks(received, framework="torch")["results"]
    assert [len(result["token_ids"]) for result in results] == [100] * 30
    for bad in ({"cursor": "-1"}, {"cursor": "999"}, {"cursor": "x"}, {"max_events": "0"}, {"max_events": "many"}):
        assert job.call("GET", f"/requests/{request_id}", params=bad).status_code == 400
