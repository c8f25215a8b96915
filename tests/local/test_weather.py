"""Each kind of bad weather over plain HTTP: what the caller sees, and what was executed all the same."""

from __future__ import annotations

import base64
import hashlib
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import requests

from cortex_training.local.control_client import ServiceControl
from tests.local.api import Caller, RunningJob, chunks_of, masked_frame, sampling, token_batch, training

LOST = (requests.ConnectionError, requests.exceptions.ChunkedEncodingError)


@pytest.fixture
def job(weathered: Caller) -> Iterator[RunningJob]:
    job = weathered.running(training(), sampling())
    yield job
    job.call("POST", ":cancel")


def steps(control: ServiceControl, job: RunningJob) -> int:
    """How many steps the job really made."""
    return sum(entry["op"] == "step" for entry in control.executions(job.job_id))


def post_step(job: RunningJob, timeout_s: float = 30.0) -> requests.Response:
    return requests.post(f"{job.caller.url}/{job.job_id}/step", json={}, timeout=timeout_s, allow_redirects=False)


def test_drop_before_leaves_nothing_behind(job: RunningJob, control: ServiceControl) -> None:
    control.add("drop", on="step", job_id=job.job_id)
    with pytest.raises(LOST):
        post_step(job)
    assert job.step()["global_steps"] == 1


@pytest.mark.parametrize("when", ["after", "executed"])
def test_drop_after_leaves_what_was_asked(job: RunningJob, control: ServiceControl, when: str) -> None:
    control.add("drop", on="step", when=when, skip=1)
    job.step()
    with pytest.raises(LOST):
        post_step(job)
    if when == "executed":
        assert steps(control, job) == 2
    assert job.step()["global_steps"] == 3


def test_an_answer_in_the_place_of_the_service(job: RunningJob, control: ServiceControl) -> None:
    control.add("answer", on="step", status=429, retry_after=7, body={"code": "390100", "message": "slow down"})
    control.add("answer", on="step", skip=1, status=503, body="busy", headers={"X-From": "gateway"})
    control.add("answer", on="step", skip=2, status=502, when="executed")
    throttled, busy, lost = post_step(job), post_step(job), post_step(job)
    assert (throttled.status_code, throttled.headers["retry-after"]) == (429, "7")
    assert throttled.json()["message"] == "slow down"
    assert (busy.status_code, busy.text, busy.headers["x-from"]) == (503, "busy", "gateway")
    assert lost.status_code == 502
    assert all(answer.headers["x-snowflake-request-id"] for answer in (throttled, busy, lost))
    assert steps(control, job) == 1


def test_a_redirect_is_not_executed(job: RunningJob, control: ServiceControl) -> None:
    control.add("redirect", on="step", location="https://elsewhere.example/step", status=308)
    answer = post_step(job)
    assert (answer.status_code, answer.headers["location"]) == (308, "https://elsewhere.example/step")
    assert steps(control, job) == 0


def test_a_delay_takes_at_least_its_time(job: RunningJob, control: ServiceControl) -> None:
    control.add("delay", on="step", seconds=0.3)
    began = time.monotonic()
    assert post_step(job).status_code == 200
    assert time.monotonic() - began >= 0.3


def test_a_hang_gives_no_answer_until_it_is_released(job: RunningJob, control: ServiceControl) -> None:
    rule = control.add("hang", on="step", when="after", times=2)
    with pytest.raises(requests.ReadTimeout):
        post_step(job, timeout_s=0.3)
    ended: list[type] = []
    waiting = threading.Thread(target=lambda: ended.append(_error_of(lambda: post_step(job))))
    waiting.start()
    control.wait_until_holding(rule)
    assert control.release(rule) == 1
    waiting.join(10)
    assert issubclass(ended[0], LOST)
    assert job.step()["global_steps"] == 3


def _error_of(call: Any) -> type:
    try:
        call()
    except requests.RequestException as error:
        return type(error)
    return type(None)


def test_a_reply_is_held_back_until_it_is_released(job: RunningJob, control: ServiceControl) -> None:
    rule = control.add("hold", on="step", when="executed")
    answers: list[requests.Response] = []
    waiting = threading.Thread(target=lambda: answers.append(post_step(job)))
    waiting.start()
    control.wait_until_holding(rule)
    assert (steps(control, job), answers) == (1, [])
    assert control.rules()[rule]["holding"] == 1
    assert control.release(rule) == 1
    waiting.join(10)
    assert job.done(answers[0])["global_steps"] == 1
    assert (control.rules()[rule]["holding"], control.release(rule)) == (0, 0)


def test_a_caller_that_is_killed_is_held_no_longer(job: RunningJob, control: ServiceControl) -> None:
    rule = control.add("hold", on="step")
    with pytest.raises(requests.ReadTimeout):
        post_step(job, timeout_s=0.3)
    until = time.monotonic() + 10
    while control.rules()[rule]["holding"]:
        assert time.monotonic() < until
    assert job.step()["global_steps"] == 2


def test_removing_a_rule_lets_go(job: RunningJob, control: ServiceControl) -> None:
    rule = control.add("hold", on="step", times=0)
    answers: list[int] = []
    waiting = threading.Thread(target=lambda: answers.append(post_step(job).status_code))
    waiting.start()
    control.wait_until_holding(rule)
    control.remove(rule)
    waiting.join(10)
    assert answers == [200]


def test_late_is_executed_behind_the_callers_back(job: RunningJob, control: ServiceControl) -> None:
    control.add("late", on="step", seconds=0.3)
    with pytest.raises(LOST):
        post_step(job)
    assert job.step()["global_steps"] == 1
    until = time.monotonic() + 10
    while steps(control, job) < 2:
        assert time.monotonic() < until
        time.sleep(0.02)
    assert job.step()["global_steps"] == 3


def test_repeat_is_executed_twice(job: RunningJob, control: ServiceControl) -> None:
    control.add("repeat", on="step")
    assert job.step()["global_steps"] == 1
    assert job.step()["global_steps"] == 3


def test_a_repeated_chunk_group_is_executed_once(job: RunningJob, control: ServiceControl) -> None:
    control.add("repeat", on="forward-backward")
    job.forward_backward(masked_frame(token_batch()))
    assert [entry["op"] for entry in control.executions(job.job_id)] == ["forward-backward"]


def test_a_cut_reply_ends_too_early(job: RunningJob, control: ServiceControl) -> None:
    control.add("cut", on="get-job", job_id=job.job_id, bytes=20)
    with pytest.raises(LOST):
        job.call("GET", "")
    assert job.describe()["status"] == "running"


def test_a_corrupt_export_has_one_bit_wrong(job: RunningJob, control: ServiceControl) -> None:
    checkpoint = job.save("weights-only")
    before = job.exported(checkpoint)
    control.add("corrupt", path=r"^GET /exports/.*\.safetensors", byte=3)
    after = job.exported(checkpoint)
    [name] = [name for name in before if before[name] != after[name]]
    assert [a ^ b for a, b in zip(before[name], after[name], strict=True) if a != b] == [1]


def test_a_patch_changes_a_reply(job: RunningJob, control: ServiceControl) -> None:
    control.add("patch", on="get-job", body={"status": "hibernating", "hardware": None, "sub_jobs": [], "x": {"y": 1}})
    described = job.describe()
    assert (described["status"], described["sub_jobs"], described["x"]) == ("hibernating", [], {"y": 1})
    assert "hardware" not in described
    assert job.describe()["status"] == "running"


def logprobs_frame() -> bytes:
    """A forward whose result takes several chunks of 10,000 bytes."""
    return masked_frame(token_batch(64, 128), processing={"post": ["compute_logprobs"]})


def pages_of(job: RunningJob, reply: requests.Response, most: int = 50) -> list[dict[str, Any]]:
    """The pages of a finished request, one chunk each, by their cursors."""
    request = f"/requests/{reply.json()['request_id']}?max_events=1"
    job.poll(reply)
    pages = [job.call("GET", request).json()]
    while pages[-1]["next_cursor"] and len(pages) < most:
        pages.append(job.call("GET", f"{request}&cursor={pages[-1]['next_cursor']}").json())
    return pages


def test_result_chunks_with_a_wrong_hash(job: RunningJob, control: ServiceControl) -> None:
    control.add("wrong-hash", on="poll", path="cursor=1")
    pages = pages_of(job, job.post_frame(logprobs_frame(), path="/forward"))
    right = [
        event["payload_sha256"] == hashlib.sha256(base64.b64decode(event["payload_b64"])).hexdigest()
        for page in pages
        for event in page["events"]
    ]
    assert len(right) > 2
    assert [index for index, one in enumerate(right) if not one] == [1]


def test_duplicated_and_stuck_pages(job: RunningJob, control: ServiceControl) -> None:
    control.add("duplicate-events", on="poll", path="cursor=1")
    reply = job.post_frame(logprobs_frame(), path="/forward")
    pages = pages_of(job, reply)
    assert [len(page["events"]) for page in pages[:3]] == [1, 2, 1]
    assert pages[1]["events"][0] == pages[1]["events"][1]
    control.add("stuck-cursor", on="poll", path="cursor=2", times=0)
    stuck = pages_of(job, reply, most=20)
    assert [page["next_cursor"] for page in stuck[:2]] == ["1", "2"]
    assert {page["next_cursor"] for page in stuck[2:]} == {"2"}
    assert len(stuck) == 20


def test_stream_events_that_are_lost_with_their_reply(job: RunningJob, control: ServiceControl) -> None:
    reply = job.call("POST", "/generate-stream", json={"prompts": ["a", "b"]})
    job.call("GET", f"/requests/{reply.json()['request_id']}?max_events=1")
    until = time.monotonic() + 10
    while not control.busy(job.job_id)["operations"].get("generate-stream"):
        assert time.monotonic() < until
    control.add("drop", on="poll", when="after")
    with pytest.raises(LOST):
        requests.get(f"{job.caller.url}/{job.job_id}/requests/{reply.json()['request_id']}", timeout=30)
    assert job.poll(reply)["events"] == []


def test_operations_are_known_by_what_they_ask(job: RunningJob, control: ServiceControl) -> None:
    control.add("answer", on="weight-sync", status=500)
    control.add("answer", on="tail-logs", status=503)
    sync = {"source_sub_job_id": f"{job.job_id}:training:0", "target_sub_job_ids": [f"{job.job_id}:sampling:0"]}
    assert job.operation("weight-sync", sync).status_code == 500
    assert job.operation("tail-logs", {}).status_code == 503
    assert job.operation("weight-sync", sync).status_code == 200


def test_a_request_that_creates_has_the_id_it_asks_for(weathered: Caller, control: ServiceControl) -> None:
    control.add("drop", on="create-job", when="after", job_id="night-7")
    assert weathered.create(job_id="night-6").status_code == 200
    with pytest.raises(LOST):
        weathered.create(job_id="night-7")
    assert weathered.create(job_id="night-7").status_code == 409
    for name in ("night-6", "night-7"):
        weathered.call("POST", f"/{name}:cancel")


def test_several_faults_meet_one_request_in_their_order(job: RunningJob, control: ServiceControl) -> None:
    control.add("delay", on="get-job", seconds=0.2, when="after")
    control.add("patch", on="get-job", body={"reason": "late"})
    control.add("answer", on="get-job", status=500, skip=1)
    began = time.monotonic()
    assert job.describe()["reason"] == "late"
    assert time.monotonic() - began >= 0.2
    assert job.call("GET", "").status_code == 500


def test_a_long_body_is_refused_before_it_is_read(weathered: Caller, control: ServiceControl) -> None:
    control.add("delay", on="forward-backward", seconds=0)
    answer = weathered.call("POST", "/none/forward-backward", data=iter([b"x" * 2**20] * 90))
    assert answer.status_code == 413


def test_chunks_are_requests_of_their_own(job: RunningJob, control: ServiceControl) -> None:
    control.add("drop", on="forward-backward", when="after", skip=1)
    chunks = chunks_of(masked_frame(token_batch(16, 64)), group_id="g", max_bytes=18_000)
    assert len(chunks) > 1
    assert job.post_frame(chunks[0]).json()["chunk_cached"] is True
    with pytest.raises(LOST):
        job.post_frame(chunks[1])
    assert job.post_frame(chunks[1]).status_code == 200
