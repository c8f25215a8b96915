"""The generic operations, and checkpoints."""

from __future__ import annotations

import base64
from typing import Any

import pytest

from cortex_training.errors import ConfigurationError, NotFoundError, OutcomeUnknown, ProtocolError, TransportError
from cortex_training.protocol import checkpoints, operations
from cortex_training.protocol.messages import Kind


def test_forward_wraps_bytes_in_the_documented_envelope(world: Any, say: Any) -> None:
    reply = world.run(
        operations.forward(world.context, "j", b"frame", sub_job_id="j:training:0"), [say.reply({"a": 1})]
    )
    assert reply == {"a": 1}
    assert world.body == {
        "operation_type": "forward",
        "sub_job_id": "j:training:0",
        "payload": {"payload_b64": base64.b64encode(b"frame").decode(), "content_type": "application/octet-stream"},
    }
    assert world.requests[0].kind is Kind.AT_MOST_ONCE


def test_forward_can_go_straight_to_the_route(world: Any, say: Any) -> None:
    world.run(operations.forward(world.context, "j", bytearray(b"frame"), route="direct"), [say.accepted])
    assert world.sent == ["POST /j/forward"]
    assert world.requests[0].body == b"frame"
    with pytest.raises(ConfigurationError, match="give bytes"):
        world.run(operations.forward(world.context, "j", {"x": 1}, route="direct"))
    with pytest.raises(ConfigurationError, match="route"):
        world.run(operations.forward(world.context, "j", {"x": 1}, route="elsewhere"))


def test_a_forward_beyond_the_limit_is_refused(world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operations, "MAX_REQUEST_BYTES", 4)
    with pytest.raises(ConfigurationError, match="never cut into chunks"):
        world.run(operations.forward(world.context, "j", b"frame"))


def test_a_lost_forward_is_not_repeated(world: Any, say: Any) -> None:
    with pytest.raises(OutcomeUnknown, match="forward on job j"):
        world.run(operations.forward(world.context, "j", {"x": 1}), [say.lost])


def test_bootstrap_router_replay(world: Any, say: Any) -> None:
    world.run(
        operations.bootstrap_router_replay(world.context, "j", "j:sampling:0", "j:training:0", max_cache_bytes=4096),
        [say.lost, say.reply({})],
    )
    assert world.body == {
        "operation_type": "bootstrap-router-replay",
        "payload": {
            "source_sub_job_id": "j:sampling:0",
            "target_sub_job_id": "j:training:0",
            "max_cache_bytes": 4096,
        },
    }


def test_router_replay_discard_lets_extra_win(world: Any, say: Any) -> None:
    world.run(operations.router_replay_discard(world.context, "j", ["a"], extra={"x": 1}), [say.reply({})])
    assert world.body["payload"] == {"sample_ids": ["a"], "x": 1}
    world.run(operations.router_replay_discard(world.context, "j", ["a"], extra={"sample_ids": ["b"]}), [say.reply({})])
    assert world.body["payload"] == {"sample_ids": ["b"]}
    with pytest.raises(ConfigurationError, match="sample_ids"):
        world.run(operations.router_replay_discard(world.context, "j", "abc"))


def test_reset_prefix_cache_lets_extra_win(world: Any, say: Any) -> None:
    world.run(operations.reset_prefix_cache(world.context, "j"), [say.reply({})])
    assert world.body == {
        "operation_type": "reset-prefix-cache",
        "sub_job_type": "sampling",
        "payload": {"drain": True, "timeout_s": 60.0, "retry_interval_s": 0.1},
    }
    world.run(operations.reset_prefix_cache(world.context, "j", extra={"drain": False}), [say.reply({})])
    assert world.body["payload"]["drain"] is False


def test_cancel_request(world: Any, say: Any) -> None:
    world.run(operations.cancel_request(world.context, "j", "r"), [say.lost, say.reply({"ok": True})])
    assert world.body == {"operation_type": "cancel-request", "payload": {"request_id": "r"}}


def test_list_checkpoints(world: Any, say: Any) -> None:
    answer = say.reply({"checkpoints": [{"checkpoint_id": "cp_1"}, None]})
    assert world.run(checkpoints.list_checkpoints(world.context, "j"), [answer]) == [{"checkpoint_id": "cp_1"}]
    assert world.run(checkpoints.list_checkpoints(world.context, "j"), [say.reply({})]) == []
    with pytest.raises(ProtocolError):
        world.run(checkpoints.list_checkpoints(world.context, "j"), [say.reply({"checkpoints": "x"})])


def test_export_is_repeated_after_a_lost_reply(world: Any, say: Any) -> None:
    answers = [say.lost, say.reply({"files": []})]
    assert world.run(checkpoints.export_checkpoint(world.context, "j", "cp_1"), answers) == {"files": []}
    assert world.sent[-1] == "POST /j/checkpoints/cp_1:export"


def test_a_missing_checkpoint_cannot_be_deleted(world: Any, say: Any) -> None:
    with pytest.raises(NotFoundError):
        world.run(checkpoints.delete_checkpoint(world.context, "j", "cp_1"), [say.reply({}, 404)])
    assert len(world.requests) == 1


def test_a_checkpoint_that_is_gone_after_our_own_lost_delete_was_deleted(world: Any, say: Any) -> None:
    assert world.run(checkpoints.delete_checkpoint(world.context, "j", "cp_1"), [say.lost, say.reply({}, 404)]) is None
    assert world.run(checkpoints.delete_checkpoint(world.context, "j", "cp_2"), [say.reply(None, 204)]) is None


def test_a_drain_is_asked_for_again_no_longer_than_it_may_take(world: Any, say: Any) -> None:
    with pytest.raises(TransportError):
        world.run(operations.reset_prefix_cache(world.context, "j", timeout_s=5.0), lambda sent: say.never_sent)
    assert len(world.requests) > 1
    assert world.now - 1000 <= 5
