"""Following logs ends when there is nothing more."""

from __future__ import annotations

from typing import Any

import pytest

from cortex_training.errors import ConfigurationError
from cortex_training.protocol import operations
from cortex_training.protocol.logs import LogStream


def entries(world: Any, stream: LogStream, answers: Any) -> list[Any]:
    found: list[Any] = []

    def everything() -> Any:
        while (page := (yield from stream.next_entries())) is not None:
            found.extend(page)

    world.run(everything(), answers)
    return found


def page(say: Any, lines: list[str], cursor: str | None = None, eof: bool = False) -> Any:
    return say.reply({"entries": lines, "next_cursor": cursor, "eof": eof})


def test_tail_logs_always_sends_a_payload(world: Any, say: Any) -> None:
    world.run(operations.tail_logs(world.context, "j"), [page(say, [])])
    assert world.body == {"operation_type": "tail-logs", "payload": {}}
    world.run(
        operations.tail_logs(world.context, "j", sub_job_id="j:training:0", cursor="c", max_lines=5), [page(say, [])]
    )
    assert world.body == {
        "operation_type": "tail-logs",
        "sub_job_id": "j:training:0",
        "payload": {"cursor": "c", "max_lines": 5},
    }
    with pytest.raises(ConfigurationError, match="max_lines"):
        world.run(operations.tail_logs(world.context, "j", max_lines=0))


def test_without_follow_it_ends_at_the_first_empty_page_even_if_eof_never_comes(world: Any, say: Any) -> None:
    stream = LogStream(world.context, "j", follow=False)
    assert entries(world, stream, [page(say, ["a", "b"], "1"), page(say, ["c"], "2"), page(say, [], "2")]) == [
        "a",
        "b",
        "c",
    ]
    assert world.body["payload"] == {"cursor": "2"}


def test_an_empty_cursor_does_not_start_over(world: Any, say: Any) -> None:
    stream = LogStream(world.context, "j", follow=False)
    assert entries(world, stream, [page(say, ["a"], "1"), page(say, ["b"], "")]) == ["a"]
    assert world.body["payload"] == {"cursor": "1"}


def test_a_service_without_cursors_is_read_once(world: Any, say: Any) -> None:
    stream = LogStream(world.context, "j", follow=False)
    assert entries(world, stream, lambda sent: page(say, ["a"])) == ["a"]


def test_with_follow_it_ends_after_the_jobs_last_lines(world: Any, say: Any) -> None:
    def respond(sent: Any) -> Any:
        if sent.method == "GET":
            return say.reply({"status": "running" if world.now < 1100 else "cancelled"})
        if (sent.body or b"").find(b'"c1"') >= 0:
            return page(say, ["last"], "c2") if world.now > 1100 else page(say, [], "c1")
        return page(say, [], "c2") if b'"c2"' in sent.body else page(say, ["first"], "c1")

    assert entries(world, LogStream(world.context, "j"), respond) == ["first", "last"]
    assert world.now < 1200
    assert len(world.requests) < 60


def test_a_repeating_page_is_not_yielded_again(world: Any, say: Any) -> None:
    def respond(sent: Any) -> Any:
        if sent.method == "GET":
            return say.reply({"status": "running" if world.now < 1060 else "failed"})
        return page(say, ["same"], "c")

    assert entries(world, LogStream(world.context, "j"), respond) == ["same"]
