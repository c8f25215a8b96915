"""Forward-backward in chunks, and the other calls on a training sub-job."""

from __future__ import annotations

import json
import uuid
from typing import Any

import numpy as np
import pytest

from cortex_training import wire
from cortex_training.config import CheckpointType
from cortex_training.errors import (
    ChunkGroupConflictError,
    ChunkGroupRestartError,
    ConfigurationError,
    OutcomeUnknown,
    ProtocolError,
    SendRefused,
)
from cortex_training.protocol import chunks, training
from cortex_training.protocol.messages import Kind

FRAME = wire.dumps({"args": (), "kwargs": {"input_ids": np.arange(4000, dtype=np.int64)}}, {"op": "x"})
RESTART = {"detail": {"code": "chunk_group_restart_required", "message": "restart from chunk 0", "chunk_group_id": "g"}}


def described(request: Any) -> dict[str, Any]:
    return wire.read_byte_chunk_metadata(request.body) or {}


def call(**options: Any) -> chunks.ChunkedCall:
    arguments = {
        "path": "/j/forward-backward",
        "operation": "fwd-bwd",
        "job_id": "j",
        "frame": memoryview(FRAME),
        "group_id": "group-1",
        "final_kind": Kind.IDEMPOTENT,
        "max_bytes": 16 * 1024,
    }
    return chunks.ChunkedCall(**{**arguments, **options})


def test_a_small_frame_is_wrapped_in_one_chunk_that_names_the_operation(world: Any, say: Any) -> None:
    group = str(uuid.uuid4())
    request_id = world.run(training.forward_backward(world.context, "j", FRAME, chunk_group_id=group), [say.accepted])
    assert request_id == "r"
    assert world.sent == ["POST /j/forward-backward"]
    assert world.requests[0].content_type == "application/octet-stream"
    descriptor = described(world.requests[0])
    assert (descriptor["chunk_group_id"], descriptor["operation"], descriptor["total_chunks"]) == (group, "fwd-bwd", 1)
    assert wire.decode_byte_chunks([world.requests[0].body], kind="request") == FRAME


def test_without_an_id_each_call_is_a_new_operation(world: Any, say: Any) -> None:
    for _ in range(2):
        world.run(training.forward_backward(world.context, "j", FRAME), [say.accepted])
    first, second = (described(request)["chunk_group_id"] for request in world.requests)
    assert first != second
    uuid.UUID(first)


def test_the_same_frame_and_id_are_the_same_bytes_in_every_process(world: Any, say: Any) -> None:
    for _ in range(2):
        world.run(training.forward_backward(world.context, "j", FRAME, chunk_group_id="g"), [say.accepted])
    assert world.requests[0].body == world.requests[1].body


def test_a_large_frame_is_posted_in_order_under_one_id(world: Any, say: Any) -> None:
    answers = [say.cached] * 3 + [say.accepted]
    assert world.run(chunks.send_chunks(world.context, call()), answers) == "r"
    assert [described(request)["chunk_idx"] for request in world.requests] == [0, 1, 2, 3]
    assert {described(request)["chunk_group_id"] for request in world.requests} == {"group-1"}
    assert wire.decode_byte_chunks([request.body for request in world.requests]) == FRAME


def test_a_lost_chunk_reply_is_posted_again_byte_for_byte(world: Any, say: Any) -> None:
    cached, done = say.cached, say.accepted
    assert (
        world.run(chunks.send_chunks(world.context, call()), [cached, say.lost, cached, cached, say.lost, done]) == "r"
    )
    bodies = [request.body for request in world.requests]
    assert bodies[1] == bodies[2]
    assert bodies[4] == bodies[5]


def test_a_required_restart_replays_the_same_bytes_and_id_once(world: Any, say: Any) -> None:
    cached, done = say.cached, say.accepted
    answers = [cached, cached, say.reply(RESTART, 409), cached, cached, cached, done]
    assert world.run(chunks.send_chunks(world.context, call()), answers) == "r"
    bodies = [request.body for request in world.requests]
    assert bodies[:3] == bodies[3:6]


def test_a_second_restart_is_the_callers_to_see(world: Any, say: Any) -> None:
    cached = say.cached
    with pytest.raises(ChunkGroupRestartError):
        world.run(
            chunks.send_chunks(world.context, call()),
            [cached, say.reply(RESTART, 409), cached, say.reply(RESTART, 409)],
        )


def test_a_conflict_is_an_error_after_one_post(world: Any, say: Any) -> None:
    detail = {"detail": {"code": "chunk_group_conflict", "chunk_group_id": "g", "message": "other frame"}}
    with pytest.raises(ChunkGroupConflictError) as caught:
        world.run(training.forward_backward(world.context, "j", FRAME), [say.reply(detail, 409)])
    assert caught.value.detail["message"] == "other frame"
    assert len(world.requests) == 1


def test_a_request_id_before_the_last_chunk_breaks_the_protocol(world: Any, say: Any) -> None:
    with pytest.raises(ProtocolError, match="chunk 0 of fwd-bwd on job j unexpectedly"):
        world.run(chunks.send_chunks(world.context, call()), [say.accepted])


def test_the_last_chunk_must_bring_a_request_id(world: Any, say: Any) -> None:
    with pytest.raises(ProtocolError, match="without a request_id"):
        world.run(training.forward_backward(world.context, "j", FRAME), [say.reply({"job_id": "j"})])


def test_every_chunk_asks_for_permission(world: Any, say: Any) -> None:
    asked: list[int] = []

    def permit() -> None:
        asked.append(len(world.requests))
        if len(asked) == 3:
            raise SendRefused("too late")

    with pytest.raises(SendRefused, match="too late"):
        world.run(chunks.send_chunks(world.context, call(permit=permit)), lambda sent: say.cached)
    assert asked == [0, 1, 2]
    assert len(world.requests) == 2


def test_the_last_chunk_of_an_at_most_once_call_is_not_repeated(world: Any, say: Any) -> None:
    cached = say.cached
    with pytest.raises(OutcomeUnknown):
        world.run(
            chunks.send_chunks(world.context, call(final_kind=Kind.AT_MOST_ONCE)),
            [say.lost, cached, cached, cached, say.lost],
        )


@pytest.mark.parametrize("frame", [b"", b"opaque bytes", "text", None, {"kwargs": {}}, FRAME[:40], b"\x80\x04pickle"])
def test_what_is_no_frame_is_refused_before_anything_is_sent(world: Any, frame: Any) -> None:
    with pytest.raises(ConfigurationError, match="forward_backward"):
        world.run(training.forward_backward(world.context, "j", frame))
    assert world.requests == []


def test_frames_of_any_bytes_type_are_accepted(world: Any, say: Any) -> None:
    padded = np.frombuffer(FRAME + b"\0" * (-len(FRAME) % 8), dtype=np.int64)
    for frame in (bytearray(FRAME), memoryview(FRAME), memoryview(padded)[: len(FRAME) // 8]):
        world.run(training.forward_backward(world.context, "j", frame), [say.accepted])
        sent = wire.decode_byte_chunks([world.requests[-1].body])
        assert sent == FRAME[: len(sent)]


def test_step(world: Any, say: Any) -> None:
    assert world.run(training.step(world.context, "j"), [say.accepted]) == "r"
    assert world.body == {}
    world.run(training.step(world.context, "j", 2e-5), [say.accepted])
    assert world.body == {"learning_rate": 2e-5}
    assert world.requests[-1].kind is Kind.AT_MOST_ONCE


@pytest.mark.parametrize("rate", ["x", -1, float("nan"), float("inf"), True, [1e-4]])
def test_step_refuses_a_rate_that_is_none(world: Any, rate: Any) -> None:
    with pytest.raises(ConfigurationError, match="learning_rate"):
        world.run(training.step(world.context, "j", rate))


def test_a_step_reply_without_request_id_leaves_the_outcome_unknown(world: Any, say: Any) -> None:
    with pytest.raises(OutcomeUnknown, match="without a request_id"):
        world.run(training.step(world.context, "j"), [say.reply({"job_id": "j"})])


def test_save(world: Any, say: Any) -> None:
    world.run(training.save(world.context, "j"), [say.accepted])
    assert world.body == {}
    world.run(training.save(world.context, "j", "tag", "Weights-Only"), [say.accepted])
    assert world.body == {"checkpoint_id": "tag", "checkpoint_type": "weights-only"}
    world.run(training.save(world.context, "j", checkpoint_type=CheckpointType.RESUMABLE), [say.accepted])
    assert world.body == {"checkpoint_type": "resumable"}


@pytest.mark.parametrize("kind", ["full", "", 5])
def test_save_refuses_an_unknown_type(world: Any, kind: Any) -> None:
    with pytest.raises(ConfigurationError, match="checkpoint_type"):
        world.run(training.save(world.context, "j", checkpoint_type=kind))


def test_load(world: Any, say: Any) -> None:
    world.run(training.load(world.context, "j", "cp"), [say.accepted])
    assert world.body == {"checkpoint_id": "cp"}
    world.run(training.load(world.context, "j", "cp", "source", target_sub_job_id=""), [say.accepted])
    assert world.body == {"checkpoint_id": "cp", "source_job_id": "source", "target_sub_job_id": ""}
    with pytest.raises(ConfigurationError, match="checkpoint_id"):
        world.run(training.load(world.context, "j", ""))


def test_weight_sync_is_routed_to_its_source(world: Any, say: Any) -> None:
    world.run(
        training.weight_sync(world.context, "j", "j:training:0", ("j:sampling:0",), weight_format="lora"),
        [say.lost, say.accepted],
    )
    assert world.body == {
        "operation_type": "weight-sync",
        "sub_job_id": "j:training:0",
        "sub_job_type": "training",
        "payload": {
            "source_sub_job_id": "j:training:0",
            "target_sub_job_ids": ["j:sampling:0"],
            "weight_format": "lora",
        },
    }
    assert world.sent == ["POST /j/operation"] * 2


@pytest.mark.parametrize(
    "options",
    [
        {"target_sub_job_ids": "j:sampling:0"},
        {"target_sub_job_ids": []},
        {"target_sub_job_ids": [""]},
        {"target_sub_job_ids": {"a": 1}},
        {"weight_format": "gguf"},
        {"bucket_size": 0},
        {"bucket_size": True},
        {"source_sub_job_id": ""},
    ],
)
def test_weight_sync_refuses_what_would_sync_something_else(world: Any, options: dict[str, Any]) -> None:
    arguments = {"source_sub_job_id": "s", "target_sub_job_ids": ["t"], **options}
    with pytest.raises(ConfigurationError, match=next(iter(options))):
        world.run(training.weight_sync(world.context, "j", **arguments))


def test_a_request_body_is_json_without_nan(world: Any, say: Any) -> None:
    world.run(training.step(world.context, "j", 1e-05), [say.accepted])
    assert json.loads(world.requests[-1].body) == {"learning_rate": 1e-05}
    assert world.requests[-1].content_type == "application/json"
