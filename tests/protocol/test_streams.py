"""Events of a streamed generation, each delivered once."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cortex_training.errors import DeadlineExceeded, RequestFailed, TransportError
from cortex_training.protocol.streams import EventStream


def read(world: Any, answers: Any, **options: Any) -> list[Any]:
    found: list[Any] = []

    def everything() -> Any:
        stream = EventStream(world.context, "j", "r", **options)
        while (events := (yield from stream.next_events())) is not None:
            found.extend(events)
        return found

    world.run(everything(), answers)
    return found


def page(say: Any, state: str, *events: Any, **fields: Any) -> Any:
    return say.reply({"status": state, "events": list(events), **fields})


def test_events_come_in_the_order_of_their_pages_and_results_are_opened(world: Any, say: Any) -> None:
    first = {"type": "result", "index": 1, "result": say.envelope({"token_ids": np.array([7])})}
    pages = [
        page(say, "streaming", first),
        page(say, "streaming"),
        page(say, "done", {"type": "error", "index": 0, "error": "too long"}, {"type": "done", "completed": 1}),
        page(say, "done"),
    ]
    events = read(world, pages)
    assert [event["type"] for event in events] == ["result", "error", "done"]
    assert events[0]["result"] == {"token_ids": [7]}
    assert dict(world.requests[0].query) == {"max_events": "512"}


def test_a_lost_page_ends_the_reading(world: Any, say: Any) -> None:
    with pytest.raises(TransportError):
        read(world, [page(say, "streaming", {"type": "result"}), say.lost])


def test_a_failed_stream_raises_after_its_events(world: Any, say: Any) -> None:
    with pytest.raises(RequestFailed, match="engine died"):
        read(world, [page(say, "failed", {"type": "result"}), page(say, "failed", error="engine died")])


def test_a_stream_that_does_not_end_is_given_up_at_its_deadline(world: Any, say: Any) -> None:
    with pytest.raises(DeadlineExceeded):
        read(world, lambda sent: page(say, "streaming"), timeout_s=30)
    assert world.now - 1000 <= 31


def test_a_service_that_cannot_be_reached_is_tried_until_the_readers_deadline(world: Any, say: Any) -> None:
    with pytest.raises(DeadlineExceeded, match="not seen"):
        read(world, lambda sent: say.never_sent, timeout_s=5)
    assert world.now - 1000 <= 5


def test_a_slow_reader_gets_what_came_meanwhile(world: Any, say: Any) -> None:
    stream = EventStream(world.context, "j", "r", timeout_s=5)
    world.run(stream.next_events(), [page(say, "streaming", {"type": "result", "index": 0})])
    world.now += 60
    assert world.run(stream.next_events(), [page(say, "streaming", {"type": "result", "index": 1})])
    with pytest.raises(DeadlineExceeded):
        world.run(stream.next_events(), lambda sent: page(say, "streaming"))
