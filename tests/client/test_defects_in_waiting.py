"""Where the public client 0.0.3 waits for ever, busily, or for the wrong thing; both transports, over HTTP."""

from __future__ import annotations

import base64
import hashlib
import logging
import time
from typing import Any

import numpy as np
import pytest

from cortex_training import wire
from cortex_training.errors import (
    ApiError,
    ConflictError,
    DeadlineExceeded,
    JobFailed,
    ProtocolError,
    RequestFailed,
    TransportError,
)
from cortex_training.protocol.results import checkpoint_id

VALUE = {"avg_loss": 1.5, "logprobs": np.arange(3000, dtype=np.float64)}


@pytest.fixture
def says(scripted: Any) -> Any:
    return scripted


def result_pages() -> list[dict[str, Any]]:
    """`VALUE` as the events of a large result."""
    chunks = wire.encode_result_chunks(VALUE, 8192 + 6000)
    assert len(chunks) > 3
    return [
        {
            "type": "result_chunk",
            "payload_b64": base64.b64encode(chunk).decode(),
            "payload_sha256": hashlib.sha256(chunk).hexdigest(),
        }
        for chunk in chunks
    ]


def envelope(value: Any) -> dict[str, Any]:
    payload = base64.b64encode(wire.dumps(value)).decode()
    return {"encoding": "base64", "wire_format": "DSSST1", "payload_b64": payload}


def assert_is_value(result: Any) -> None:
    assert result["avg_loss"] == VALUE["avg_loss"]
    assert np.array_equal(np.asarray(result["logprobs"]), VALUE["logprobs"])


def paged(says: Any, page_of: Any) -> Any:
    """A script that answers a poll with the page after its cursor: events and the next cursor."""

    def script(seen: Any) -> Any:
        cursor = seen.query.get("cursor", [""])[0]
        events, following = page_of(int(cursor or 0))
        return says.Reply(body={"status": "done", "events": events, "next_cursor": following})

    return script


# Cursors and chunks


def test_a_cursor_that_stays_makes_no_busy_loop(client: Any, weather: Any, says: Any) -> None:
    """The public client asks 690 times a second."""
    weather.sequence(says.Reply(body={"status": "running", "next_cursor": "c"}))
    with pytest.raises(DeadlineExceeded, match="running"):
        client.poll_request("j", "r", timeout_s=1.5)
    assert len(weather.seen) < 40


def test_a_finished_request_whose_cursor_stays_still_has_its_result(client: Any, weather: Any, says: Any) -> None:
    weather.sequence(says.Reply(body={"status": "done", "next_cursor": "c", "result": {"global_steps": 3}}))
    assert client.poll_request("j", "r", timeout_s=20) == {"global_steps": 3}
    assert len(weather.seen) < 10


def test_a_cursor_that_stays_after_the_last_chunk_ends_the_wait(client: Any, weather: Any, says: Any) -> None:
    weather.sequence(says.Reply(body={"status": "done", "next_cursor": "c", "events": result_pages()}))
    assert_is_value(client.poll_request("j", "r", timeout_s=20))


def test_a_page_delivered_twice_counts_once(client: Any, weather: Any, says: Any) -> None:
    """The public client loses the whole result."""
    pages = result_pages()
    weather.script = paged(
        says, lambda at: (pages[max(at - 1, 0) : at + 1], str(at + 1) if at + 1 < len(pages) else "")
    )
    assert_is_value(client.poll_request("j", "r", timeout_s=20))


def test_pages_in_any_order_make_the_result(client: Any, weather: Any, says: Any) -> None:
    pages = result_pages()[::-1]
    weather.script = paged(says, lambda at: ([pages[at]], str(at + 1) if at + 1 < len(pages) else ""))
    assert_is_value(client.poll_request("j", "r", timeout_s=20))


def test_chunks_repeated_while_the_request_runs_make_no_busy_loop(client: Any, weather: Any, says: Any) -> None:
    weather.sequence(says.Reply(body={"status": "running", "events": result_pages()[:1]}))
    with pytest.raises(DeadlineExceeded):
        client.poll_request("j", "r", timeout_s=1.5)
    assert len(weather.seen) < 40


def test_a_damaged_page_is_read_again_and_refused_if_it_stays_so(client: Any, weather: Any, says: Any) -> None:
    pages = result_pages()
    damaged = [{**pages[0], "payload_sha256": "0" * 64}, *pages[1:]]
    weather.sequence(
        says.Reply(body={"status": "done", "events": damaged}), says.Reply(body={"status": "done", "events": pages})
    )
    assert_is_value(client.poll_request("j", "r", timeout_s=20))
    weather.sequence(says.Reply(body={"status": "done", "events": damaged}))
    with pytest.raises(ProtocolError, match="SHA-256"):
        client.poll_request("j", "r", timeout_s=20)


@pytest.mark.parametrize("field", ["chunk_idx", "total_chunks", "frame_sha256", "frame_size_bytes"])
def test_a_chunk_of_wrong_types_is_a_protocol_error(client: Any, weather: Any, says: Any, field: str) -> None:
    payload = np.frombuffer(wire.dumps({"x": 1}), dtype=np.uint8)
    description = {"chunk_idx": 0, "total_chunks": 1, "frame_sha256": "0" * 64, "frame_size_bytes": len(payload)}
    for wrong in ({}, [], "many", None, -1, 1.5):
        chunk = wire.dumps({"payload": payload}, {"result_chunk": {**description, field: wrong}})
        event = {"type": "result_chunk", "payload_b64": base64.b64encode(chunk).decode()}
        weather.sequence(says.Reply(body={"status": "done", "events": [event]}))
        with pytest.raises(ProtocolError):
            client.poll_request("j", "r", timeout_s=20)


@pytest.mark.parametrize(
    "frame",
    [
        b"\x80\x04\x95pickle",
        b"PK\x03\x04zip",
        b"",
        wire.dumps({"x": 1})[:-4],
        wire.dumps({"x": 1}).replace(b"DSSST1", b"DSSST2"),
        wire.dumps({"x": 1}).replace(b'[\\"j\\"', b'[\\"q\\"'),
    ],
)
def test_a_result_that_is_no_frame_is_a_protocol_error(client: Any, weather: Any, says: Any, frame: bytes) -> None:
    result = {**envelope({}), "payload_b64": base64.b64encode(frame).decode()}
    weather.sequence(says.Reply(body={"status": "done", "result": result}))
    with pytest.raises(ProtocolError):
        client.poll_request("j", "r")


def test_hostile_nesting_in_a_result_is_a_protocol_error(client: Any, weather: Any, says: Any) -> None:
    tree = '["d", [["k", ' * 50_000 + '["j", 1]' + "]]]" * 50_000
    header = b'{"__metadata__":{"dss":' + _quoted('{"v": "DSSST1", "tree": ' + tree + "}") + b"}}"
    header += b" " * (-len(header) % 8)
    frame = len(header).to_bytes(8, "little") + header
    weather.sequence(
        says.Reply(body={"status": "done", "result": {**envelope({}), "payload_b64": base64.b64encode(frame).decode()}})
    )
    with pytest.raises(ProtocolError):
        client.poll_request("j", "r")


def _quoted(text: str) -> bytes:
    return b'"' + text.replace("\\", "\\\\").replace('"', '\\"').encode() + b'"'


# States and deadlines


@pytest.mark.parametrize("state", ["terminated", "JOB_STATE_TERMINATED", "cancelled", "canceled", "failed", "done"])
def test_a_wait_ends_with_a_job_that_ended(client: Any, weather: Any, says: Any, state: str) -> None:
    weather.sequence(says.Reply(body={"status": state, "reason": "idle_timeout"}))
    with pytest.raises(JobFailed, match="idle_timeout"):
        client.wait_for_job("j", timeout_s=20)
    assert len(weather.seen) == 1


def test_a_request_ends_with_its_job(client: Any, weather: Any, says: Any) -> None:
    job = {"status": "terminated", "reason": "preempted"}
    weather.script = lambda seen: (
        says.Reply(409, {"message": "the job does not run"}) if "requests" in seen.path else says.Reply(body=job)
    )
    with pytest.raises(JobFailed, match="preempted"):
        client.poll_request("j", "r", timeout_s=20)


@pytest.mark.parametrize("state", [None, 7, "", "evaporated", ["done"], {}, True])
def test_a_state_that_nobody_knows_is_waited_out(client: Any, weather: Any, says: Any, state: Any) -> None:
    """The public client raises an AttributeError for numbers and null."""
    weather.sequence(says.Reply(body={"status": state}), says.Reply(body={"status": "done", "result": {"ok": 1}}))
    assert client.poll_request("j", "r", timeout_s=20) == {"ok": 1}
    weather.sequence(says.Reply(body={"status": state}), says.Reply(body={"status": "running"}))
    assert client.wait_for_job("j", timeout_s=20)["status"] == "running"


def test_a_deadline_covers_a_storm(client: Any, weather: Any, says: Any) -> None:
    """The public client's timeout of one second ends after 69, with another exception."""
    weather.sequence(says.Reply(503, {"message": "storm"}))
    for wait in (lambda: client.poll_request("j", "r", timeout_s=1.0), lambda: client.wait_for_job("j", timeout_s=1.0)):
        began = time.monotonic()
        with pytest.raises(DeadlineExceeded, match="1 s"):
            wait()
        assert time.monotonic() - began < 20
    assert isinstance(DeadlineExceeded("x"), TimeoutError)


def test_a_deadline_covers_a_service_that_hangs(client: Any, weather: Any, says: Any) -> None:
    weather.sequence(says.Hang())
    began = time.monotonic()
    with pytest.raises(DeadlineExceeded):
        client.wait_for_job("j", timeout_s=0.5)
    assert time.monotonic() - began < 20


def test_a_steady_request_is_noticed_soon_after_it_ended(client: Any, weather: Any, says: Any) -> None:
    """The public schedule may be 6 s late; after two of these, ours looks when the third is due."""
    finished: dict[str, float] = {}

    def script(seen: Any) -> Any:
        if seen.method == "POST":
            request = f"r{len(finished)}"
            finished[request] = time.monotonic() + 0.4
            return says.Reply(body={"request_id": request})
        done = time.monotonic() >= finished[seen.path.rsplit("/", 1)[1]]
        return says.Reply(body={"status": "done" if done else "running"})

    weather.script = script
    for _ in range(4):
        client.poll_request("j", client.step("j"))
    looks = [seen for seen in weather.seen if seen.method == "GET"]
    assert len(looks) < 80


# Results


def test_samples_are_lists_for_whoever_polls(clients: Any, weather: Any, says: Any) -> None:
    """The public client gives lists to the object that submitted the request, once, and tensors to all others."""
    samples = {"results": [{"text": "x", "token_ids": np.array([1, 2]), "logprobs": np.array([0.5, 1.0])}]}
    weather.script = lambda seen: says.Reply(
        body={"request_id": "r"} if seen.method == "POST" else {"status": "done", "result": envelope(samples)}
    )
    own, other = clients(weather.url), clients(weather.url)
    request = own.generate("j", ["x"])
    for polled in (own, own, other):
        assert polled.poll_request("j", request)["results"] == [
            {"text": "x", "token_ids": [1, 2], "logprobs": [0.5, 1.0]}
        ]


def test_requests_that_nobody_polls_are_forgotten(client: Any, weather: Any, says: Any) -> None:
    weather.script = lambda seen: says.Reply(body={"request_id": f"r{len(weather.seen)}"})
    context = client._context
    bound = 8192
    for number in range(bound + 100):
        context.remember_request("j", f"old-{number}", "step")
    client.step("j")
    assert len(context.submitted) <= bound
    assert len(context.fresh) <= bound


def test_a_large_result_is_not_written_out_for_a_log_that_nobody_reads(
    client: Any, weather: Any, says: Any, large_result: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Four seconds of five, for 18 MB in the public client; and here not even if the log is read."""
    weather.sequence(says.Reply(body=large_result))
    with caplog.at_level(logging.DEBUG):
        client.poll_request("j", "r")
    assert max((len(record.getMessage()) for record in caplog.records), default=0) < 2000


@pytest.mark.parametrize(
    ("saved", "found"),
    [
        ({"checkpoint_id": "global_step3"}, "global_step3"),
        ({"stage_path": "s3://b/x/checkpoints/cp_7f/global_step1/", "checkpoint_tag": "global_step1"}, "cp_7f"),
        ({"stage_path": "s3://b/x/"}, None),
    ],
)
def test_the_checkpoint_of_a_save_is_found(client: Any, weather: Any, says: Any, saved: Any, found: Any) -> None:
    """Neither is the caller's wish honoured, nor does each result name the id."""
    weather.script = lambda seen: says.Reply(
        body={"request_id": "r"} if seen.method == "POST" else {"status": "done", "result": saved}
    )
    assert checkpoint_id(client.poll_request("j", client.save("j", "my-name"))) == found


def test_events_of_a_stream_are_not_asked_for_again_after_a_lost_answer(client: Any, weather: Any, says: Any) -> None:
    """The service forgets what it delivered: repeating the look would lose samples in silence."""
    weather.script = lambda seen: (
        says.Reply(body={"request_id": "r", "count": 2}) if seen.method == "POST" else says.Drop()
    )
    request = client.generate_stream("j", ["a", "b"])["request_id"]
    weather.seen.clear()
    with pytest.raises(TransportError):
        list(client.stream_request("j", request))
    assert len(weather.seen) == 1


def test_a_port_that_nobody_listens_on_is_tried_until_the_callers_deadline(clients: Any, scripted: Any) -> None:
    """Not for the client's own retry budget: then the connection's error would come, two minutes later."""
    gone = scripted.Weather()
    gone.stop()
    client = clients(gone.url)
    waits = (
        lambda: client.poll_request("j", "r", timeout_s=0.5),
        lambda: client.wait_for_job("j", timeout_s=0.5),
        lambda: list(client.stream_request("j", "r", timeout_s=0.5)),
    )
    for wait in waits:
        with pytest.raises(DeadlineExceeded, match="not seen"):
            wait()
    with pytest.raises(TransportError):
        client.reset_prefix_cache("j", timeout_s=0.5)


def test_errors_of_a_stream_are_seen(client: Any, weather: Any, says: Any) -> None:
    """The public client's wait ignores them."""
    events = [
        {"type": "result", "index": 0, "result": {"text": "ok"}},
        {"type": "error", "index": 1, "error": "too long"},
        {"type": "done", "completed": 1, "failed": 1},
    ]
    weather.sequence(
        says.Reply(body={"status": "running", "events": events}), says.Reply(body={"status": "done", "result": {}})
    )
    assert client.poll_request("j", "r", timeout_s=20)["events"] == events
    weather.sequence(
        says.Reply(body={"status": "running", "events": [{"type": "error", "error": "engine died"}]}),
        says.Reply(body={"status": "done"}),
    )
    with pytest.raises(RequestFailed, match="engine died"):
        client.poll_request("j", "r", timeout_s=20)


# Logs


def lines(says: Any, cursor: Any, *texts: str, eof: bool = False) -> Any:
    return says.Reply(body={"entries": list(texts), "next_cursor": cursor, "eof": eof})


def test_reading_logs_ends_even_if_their_end_is_never_announced(client: Any, weather: Any, says: Any) -> None:
    weather.sequence(lines(says, "1", "a"), lines(says, "1"))
    assert list(client.stream_logs("j", follow=False)) == ["a"]


def test_an_empty_cursor_does_not_start_over(client: Any, weather: Any, says: Any) -> None:
    weather.sequence(lines(says, "1", "a"), lines(says, ""), lines(says, ""))
    assert list(client.stream_logs("j", follow=False)) == ["a"]
    assert [seen.json["payload"].get("cursor") for seen in weather.seen] == [None, "1"]


def test_following_logs_ends_with_the_job(client: Any, weather: Any, says: Any) -> None:
    pages = [lines(says, "1", "a"), lines(says, "1"), lines(says, "2", "last words"), lines(says, "2")]
    weather.script = lambda seen: (
        says.Reply(body={"status": "failed"}) if seen.method == "GET" else pages.pop(0) if len(pages) > 1 else pages[0]
    )
    assert list(client.stream_logs("j", follow=True)) == ["a", "last words"]


@pytest.mark.parametrize("status", [400, 404, 409, 410])
def test_following_logs_ends_with_a_job_whose_logs_are_refused_from_then_on(
    client: Any, weather: Any, says: Any, status: int
) -> None:
    pages = [lines(says, "1", "a"), says.Reply(status, {"message": "the job does not run"})]
    weather.script = lambda seen: (
        says.Reply(body={"status": "cancelled" if len(pages) == 1 else "running"})
        if seen.method == "GET"
        else pages.pop(0)
        if len(pages) > 1
        else pages[0]
    )
    assert list(client.stream_logs("j", follow=True)) == ["a"]


def test_logs_that_are_refused_from_the_start_are_an_error(client: Any, weather: Any, says: Any) -> None:
    weather.script = lambda seen: (
        says.Reply(body={"status": "cancelled"}) if seen.method == "GET" else says.Reply(409, {"message": "too late"})
    )
    with pytest.raises(ConflictError, match="too late"):
        list(client.stream_logs("j", follow=True))


def test_logs_refused_while_the_job_runs_are_an_error(client: Any, weather: Any, says: Any) -> None:
    pages = [lines(says, "1", "a"), says.Reply(400, {"message": "no such sub-job"})]
    weather.script = lambda seen: (
        says.Reply(body={"status": "running"}) if seen.method == "GET" else pages.pop(0) if len(pages) > 1 else pages[0]
    )
    with pytest.raises(ApiError, match="no such sub-job"):
        list(client.stream_logs("j", follow=True))


# The connection


def test_a_call_on_a_service_that_never_answers_ends(clients: Any, weather: Any, says: Any) -> None:
    """The public client has no timeouts at all."""
    client = clients(weather.url, request_timeout=(1.0, 0.3), retry_budget_s=0.0)
    weather.sequence(says.Hang())
    for call in (client.list_jobs, client.get_capacity, lambda: client.tail_logs("j")):
        with pytest.raises(TransportError):
            call()


def test_a_wait_survives_a_service_that_comes_back(client: Any, weather: Any, says: Any) -> None:
    weather.sequence(
        says.Drop(), says.Reply(502), says.Reply(200, b"\xff\xfe", truncated=True), says.Reply(body={"status": "done"})
    )
    assert client.poll_request("j", "r", timeout_s=30) == {}
