"""Waiting for a request, in every kind of weather."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np
import pytest

from cortex_training.errors import (
    ConfigurationError,
    ConflictError,
    DeadlineExceeded,
    JobFailed,
    NotFoundError,
    ProtocolError,
    RequestFailed,
    TransportError,
)
from cortex_training.protocol import generation, polling, training
from cortex_training.protocol.messages import Kind

VALUE = {"metrics": {"loss": 1.5}, "logits": np.arange(30_000, dtype=np.float32)}


def poll(world: Any, answers: Any, **options: Any) -> Any:
    return world.run(polling.poll_request(world.context, "j", "r", **options), answers)


def status(say: Any, state: Any, **fields: Any) -> Any:
    return say.reply({"request_id": "r", "status": state, **fields})


def cursors(world: Any) -> list[str | None]:
    return [dict(request.query).get("cursor") for request in world.requests]


@pytest.mark.parametrize("state", ["done", "completed", "succeeded", "REQUEST_STATE_DONE", " Done "])
def test_every_spelling_of_success_ends_the_wait(world: Any, say: Any, state: str) -> None:
    assert poll(world, [status(say, "pending"), status(say, state, result={"global_steps": 3})]) == {"global_steps": 3}


@pytest.mark.parametrize("result", [None, {}, "", [], 0])
def test_no_result_is_an_empty_object(world: Any, say: Any, result: Any) -> None:
    assert poll(world, [status(say, "done", result=result)]) == {}


@pytest.mark.parametrize("state", ["failed", "cancelled", "canceled", "REQUEST_STATE_FAILED"])
def test_a_failed_request_raises_with_the_services_words(world: Any, say: Any, state: str) -> None:
    with pytest.raises(RequestFailed) as caught:
        poll(world, [status(say, state, error="CUDA out of memory")])
    assert caught.value.error == "CUDA out of memory"
    assert caught.value.request_id == "r"
    assert isinstance(caught.value, RuntimeError)


def test_a_structured_error_is_shown(world: Any, say: Any) -> None:
    with pytest.raises(RequestFailed, match='"code": 7'):
        poll(world, [status(say, "failed", error={"code": 7})])


@pytest.mark.parametrize("state", [None, 3, "", "streaming", "zombie", [], {}])
def test_unknown_states_are_in_flight_until_the_deadline(world: Any, say: Any, state: Any) -> None:
    with pytest.raises(DeadlineExceeded) as caught:
        poll(world, lambda sent: status(say, state), timeout_s=20)
    assert isinstance(caught.value, TimeoutError)
    assert world.now - 1000 == pytest.approx(20)
    assert poll(world, [status(say, state), status(say, "done", result={"a": 1})]) == {"a": 1}


def test_an_unknown_state_is_logged_once(world: Any, say: Any, caplog: Any) -> None:
    poll(world, [*[status(say, "zombie")] * 5, status(say, "done")])
    assert caplog.text.count("zombie") == 1


def test_the_deadline_covers_bad_weather(world: Any, say: Any) -> None:
    with pytest.raises(DeadlineExceeded, match="poll the same id again"):
        poll(world, lambda sent: say.reply({}, 503), timeout_s=1)
    assert world.now - 1000 <= 1.01


def test_an_outage_within_the_deadline_is_survived(world: Any, say: Any) -> None:
    def respond(sent: Any) -> Any:
        return say.lost if world.now < 1400 else status(say, "done", result={"ok": True})

    assert poll(world, respond) == {"ok": True}


def test_every_read_has_timeouts_within_the_deadline(world: Any, say: Any) -> None:
    poll(world, [status(say, "running"), status(say, "done")], timeout_s=7)
    assert all(request.timeouts.total_s <= 7 for request in world.requests)
    assert world.requests[1].timeouts.total_s < world.requests[0].timeouts.total_s


def test_a_result_in_an_envelope_is_decoded_and_its_metrics_are_merged(world: Any, say: Any) -> None:
    result = {**say.envelope({"x": np.arange(3), "metrics": {"a": 1, "b": 1}}), "metrics": {"b": 2}}
    value = poll(world, [status(say, "done", result=result)])
    assert value["metrics"] == {"a": 1, "b": 2}
    assert list(np.asarray(value["x"])) == [0, 1, 2]


@pytest.mark.parametrize(
    "change", [{"encoding": "hex"}, {"payload_b64": None}, {"payload_b64": "!!!"}, {"payload_b64": "AAAA"}]
)
def test_an_envelope_that_cannot_be_read_is_a_protocol_error(world: Any, say: Any, change: Any) -> None:
    with pytest.raises(ProtocolError):
        poll(world, [status(say, "done", result={**say.envelope({"x": 1}), **change})])


def test_generated_samples_are_lists_for_whoever_polls(world: Any, say: Any) -> None:
    result = say.envelope({"results": [{"text": "a", "token_ids": np.array([1, 2]), "logprobs": (np.array([0.5]), 1)}]})
    for _ in range(2):
        value = poll(world, [status(say, "done", result=result)])
        assert value["results"] == [{"text": "a", "token_ids": [1, 2], "logprobs": ([0.5], 1)}]


def test_other_results_keep_their_tensors(world: Any, say: Any) -> None:
    value = poll(world, [status(say, "done", result=say.envelope({"logprobs": np.zeros((2, 2))}))])
    assert np.asarray(value["logprobs"]).shape == (2, 2)


def test_result_chunks_are_drained_by_cursor(world: Any, say: Any) -> None:
    events = say.chunk_events(VALUE, 32 * 1024)
    assert len(events) == 5
    pages = [
        status(say, "done", events=events[:2], next_cursor="2"),
        status(say, "done", events=events[2:4], next_cursor="4"),
        status(say, "done", events=events[4:], next_cursor=""),
    ]
    value = poll(world, pages)
    assert np.array_equal(value["logits"], VALUE["logits"])
    assert cursors(world) == [None, "2", "4"]
    assert world.sleeps == []


def test_a_complete_result_ends_the_wait_even_with_a_cursor(world: Any, say: Any) -> None:
    events = say.chunk_events(VALUE, 1024 * 1024)
    assert poll(world, [status(say, "done", events=events, next_cursor="more")])["metrics"] == {"loss": 1.5}


def test_a_redelivered_page_does_no_harm(world: Any, say: Any) -> None:
    events = say.chunk_events(VALUE, 32 * 1024)
    pages = [
        status(say, "done", events=events[:3], next_cursor="3"),
        status(say, "done", events=events[:3], next_cursor="3"),
        status(say, "done", events=events[2:], next_cursor=""),
    ]
    assert np.array_equal(poll(world, pages)["logits"], VALUE["logits"])


def test_chunks_may_arrive_in_any_order(world: Any, say: Any) -> None:
    events = say.chunk_events(VALUE, 32 * 1024)[::-1]
    pages = [status(say, "done", events=[event], next_cursor=str(i)) for i, event in enumerate(events, 1)]
    assert np.array_equal(poll(world, pages)["logits"], VALUE["logits"])


def test_a_cursor_that_never_moves_does_not_make_a_busy_loop(world: Any, say: Any) -> None:
    with pytest.raises(DeadlineExceeded):
        poll(world, lambda sent: status(say, "running", next_cursor="same"), timeout_s=600)
    assert len(world.requests) < 150


def test_a_finished_request_with_a_stuck_cursor_still_returns_its_result(world: Any, say: Any) -> None:
    value = poll(world, lambda sent: status(say, "done", result={"a": 1}, next_cursor="same"), timeout_s=600)
    assert value == {"a": 1}
    assert len(world.requests) <= 6


def test_cursors_that_move_without_content_end_too(world: Any, say: Any) -> None:
    value = poll(world, lambda sent: status(say, "done", result={"a": 1}, next_cursor=str(len(world.requests))))
    assert value == {"a": 1}
    assert len(world.requests) <= 6


def test_chunks_repeated_while_the_request_runs_neither_pile_up_nor_hurry(world: Any, say: Any) -> None:
    events = say.chunk_events(VALUE, 32 * 1024)

    def respond(sent: Any) -> Any:
        return status(say, "running" if world.now < 1100 else "done", events=events)

    assert np.array_equal(poll(world, respond)["logits"], VALUE["logits"])
    assert len(world.requests) < 60


def test_chunks_that_never_complete_are_a_protocol_error(world: Any, say: Any) -> None:
    events = say.chunk_events(VALUE, 32 * 1024)[:4]
    with pytest.raises(ProtocolError, match="only 4 of 5 result chunks"):
        poll(world, lambda sent: status(say, "done", events=events, next_cursor="4"))
    assert len(world.requests) < 10


def test_a_damaged_page_is_read_again(world: Any, say: Any) -> None:
    events = say.chunk_events(VALUE, 32 * 1024)
    damaged = {**events[1], "payload_sha256": "0" * 64}
    pages = [
        status(say, "done", events=[events[0], damaged], next_cursor="2"),
        status(say, "done", events=events[:2], next_cursor="2"),
        status(say, "done", events=events[2:], next_cursor=""),
    ]
    assert np.array_equal(poll(world, pages)["logits"], VALUE["logits"])
    assert cursors(world) == [None, None, "2"]


def test_a_hash_that_is_always_wrong_is_a_protocol_error(world: Any, say: Any) -> None:
    event = {**say.chunk_events(VALUE, 1024 * 1024)[0], "payload_sha256": "0" * 64}
    with pytest.raises(ProtocolError, match="SHA-256"):
        poll(world, lambda sent: status(say, "done", events=[event]))
    assert len(world.requests) < 10


def test_two_different_chunks_in_one_place_are_a_protocol_error(world: Any, say: Any) -> None:
    one = say.chunk_events(VALUE, 32 * 1024)
    other = say.chunk_events({**VALUE, "logits": VALUE["logits"] + 1}, 32 * 1024)
    with pytest.raises(ProtocolError, match="arrived twice"):
        poll(world, [status(say, "done", events=[one[0], other[0]])])


@pytest.mark.parametrize("payload", [None, "", "not base64!", base64.b64encode(b"garbage").decode()])
def test_a_chunk_without_content_is_a_protocol_error(world: Any, say: Any, payload: Any) -> None:
    with pytest.raises(ProtocolError):
        poll(world, lambda sent: status(say, "done", events=[{"type": "result_chunk", "payload_b64": payload}]))


def test_a_job_that_ended_answers_for_its_requests(world: Any, say: Any) -> None:
    refused = say.reply({"message": "job is not running"}, 409)
    with pytest.raises(JobFailed) as caught:
        poll(world, [status(say, "running"), refused, say.reply({"status": "failed", "reason": "node lost"})])
    assert caught.value.reason == "node lost"
    assert isinstance(caught.value.__cause__, ConflictError)


def test_a_request_that_vanished_with_its_job_is_the_jobs_failure(world: Any, say: Any) -> None:
    with pytest.raises(JobFailed):
        poll(world, [say.reply({}, 404), say.reply({"status": "terminated"})])


def test_an_unknown_request_of_a_running_job_is_not_found(world: Any, say: Any) -> None:
    with pytest.raises(NotFoundError):
        poll(world, [say.reply({}, 404), say.reply({"status": "running"})])


def test_a_refusal_while_the_job_comes_back_is_waited_out(world: Any, say: Any) -> None:
    refused, coming = say.reply({"message": "not running"}, 409), say.reply({"status": "initializing"})
    assert poll(world, [refused, coming, refused, coming, status(say, "done", result={"a": 1})]) == {"a": 1}


def test_stream_errors_are_surfaced_beside_the_results(world: Any, say: Any, caplog: Any) -> None:
    events = [
        {"type": "result", "index": 1, "result": say.envelope({"text": "b", "token_ids": np.array([2])})},
        {"type": "error", "index": 0, "error": "prompt too long"},
    ]
    pages = [
        status(say, "streaming", events=events),
        status(say, "done", events=[{"type": "done", "completed": 1, "failed": 1}]),
        status(say, "done"),
    ]
    value = poll(world, pages)
    assert [event["type"] for event in value["events"]] == ["error", "result", "done"]
    assert value["events"][1]["result"] == {"text": "b", "token_ids": [2]}
    assert "prompt too long" in caplog.text


def test_a_stream_error_of_no_prompt_fails_the_request(world: Any, say: Any) -> None:
    with pytest.raises(RequestFailed, match="engine died"):
        poll(world, [status(say, "done", events=[{"type": "error", "error": "engine died"}]), status(say, "done")])


def test_lost_stream_events_are_noticed(world: Any, say: Any) -> None:
    done = {"type": "done", "completed": 3, "failed": 0}
    with pytest.raises(ProtocolError, match="finished 3 prompts and delivered 0"):
        poll(world, [status(say, "done", events=[done]), status(say, "done")])


def test_status_passes_its_arguments_and_opens_stream_results(world: Any, say: Any) -> None:
    events = [{"type": "result", "index": 0, "result": say.envelope({"token_ids": np.array([1])})}, {"type": "x"}, 5]
    answer = world.run(
        polling.get_request_status(world.context, "j", "r", max_events=64), [status(say, "streaming", events=events)]
    )
    assert answer["events"] == [{"type": "result", "index": 0, "result": {"token_ids": [1]}}, {"type": "x"}, 5]
    assert world.requests[0].query == (("max_events", "64"),)
    world.run(polling.get_request_status(world.context, "j", "r", cursor=""), [status(say, "done")])
    assert world.requests[1].query == ()


@pytest.mark.parametrize("max_events", [0, 513, True, "16", 1.0])
def test_status_refuses_an_event_count_out_of_range(world: Any, max_events: Any) -> None:
    with pytest.raises(ConfigurationError, match="max_events"):
        world.run(polling.get_request_status(world.context, "j", "r", max_events=max_events))


def test_a_read_that_drains_events_is_not_repeated_after_a_lost_answer(world: Any, say: Any) -> None:
    with pytest.raises(TransportError):
        world.run(polling.get_request_status(world.context, "j", "r", max_events=8), [say.lost])
    world.run(generation.generate_stream(world.context, "j", ["a"]), [say.reply({"request_id": "s"})])
    with pytest.raises(TransportError):
        world.run(polling.get_request_status(world.context, "j", "s"), [say.lost])
    assert world.requests[-1].kind is Kind.DRAINED
    world.run(polling.get_request_status(world.context, "j", "r"), [say.lost, status(say, "done")])


def run_steps(world: Any, say: Any, durations: list[float], operation: Any = training.step) -> list[tuple[float, int]]:
    """Submit and poll requests that take so long; how late each was noticed, and after how many looks."""
    noticed = []
    for duration in durations:
        request_id = world.run(operation(world.context, "j"), [say.reply({"request_id": f"r{world.now}"})])
        began, before = world.now, len(world.requests)
        world.run(
            polling.poll_request(world.context, "j", request_id),
            lambda sent, began=began, duration=duration: status(
                say, "done" if world.now - began >= duration else "running", result={"a": 1}
            ),
        )
        noticed.append((world.now - began - duration, len(world.requests) - before))
    return noticed


def test_a_steady_step_is_noticed_within_a_twentieth_without_hammering(world: Any, say: Any) -> None:
    learned = run_steps(world, say, [10.0] * 24)[12:]
    assert max(late for late, _ in learned) <= 0.5
    assert max(looks for _, looks in learned) <= 8


def test_a_tiny_request_is_noticed_quickly_from_the_first_one_on(world: Any, say: Any) -> None:
    noticed = run_steps(world, say, [0.2] * 8)
    assert max(late for late, _ in noticed) <= 0.06
    assert max(looks for _, looks in noticed) <= 7


def test_a_change_of_pace_is_learned(world: Any, say: Any) -> None:
    run_steps(world, say, [10.0] * 12)
    slower = run_steps(world, say, [20.0] * 6)
    assert slower[0][0] <= 4.0
    assert max(late for late, _ in slower[2:]) <= 1.0
    faster = run_steps(world, say, [5.0] * 8)
    assert max(late for late, _ in faster[4:]) <= 0.5


def test_a_wait_looks_once_more_shortly_before_its_end(world: Any, say: Any) -> None:
    run_steps(world, say, [10.0] * 12)
    request_id = world.run(training.step(world.context, "j"), [say.reply({"request_id": "last"})])
    began, before = world.now, len(world.requests)
    value = world.run(
        polling.poll_request(world.context, "j", request_id, timeout_s=5),
        lambda sent: status(say, "done" if world.now - began >= 4.2 else "running", result={"a": 1}),
    )
    assert value == {"a": 1}
    assert len(world.requests) - before <= 3


def test_what_is_remembered_is_bounded(world: Any, say: Any) -> None:
    run_steps(world, say, [1.0] * 3)
    assert len(world.context.submitted) == 0
    for number in range(10_000):
        world.context.remember_request(f"job{number}", f"r{number}", "step")
        world.context.durations_of(f"job{number}", "step")
    assert len(world.context.submitted) <= 8192
    assert len(world.context.durations) <= 8192
    assert len(world.context.fresh) <= 1024


def test_explicit_intervals_bound_the_schedule(make_world: Any, say: Any) -> None:
    world = make_world(poll_interval=2.0, poll_max_interval=3.0)
    with pytest.raises(DeadlineExceeded):
        poll(world, lambda sent: status(say, "running"), timeout_s=100)
    assert max(world.sleeps) <= 3.0
    assert all(wait >= 2.0 for wait in world.sleeps[:-4]), "only the looks just before the end may be closer"


def test_an_explicit_multiplier_gives_the_fixed_schedule(make_world: Any, say: Any) -> None:
    world = make_world(poll_interval=1.0, poll_backoff_multiplier=2.0, poll_max_interval=3.0)
    with pytest.raises(DeadlineExceeded):
        poll(world, lambda sent: status(say, "running"), timeout_s=10)
    assert world.sleeps == pytest.approx([1, 2, 3, 3, 1])


def test_the_public_schedule_can_be_had(make_world: Any, say: Any) -> None:
    world = make_world(poll_backoff_multiplier=1.25)
    with pytest.raises(DeadlineExceeded):
        poll(world, lambda sent: status(say, "running"), timeout_s=60)
    assert world.sleeps[:4] == pytest.approx([0.5, 0.625, 0.78125, 0.9765625])
    assert max(world.sleeps) == 6.0
