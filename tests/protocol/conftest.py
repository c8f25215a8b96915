"""A world for flows: answers from a script, time that only passes when a flow sleeps or an answer takes its time."""

from __future__ import annotations

import base64
import hashlib
import json
import random
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from cortex_training import wire
from cortex_training.protocol.context import Context, Policy
from cortex_training.protocol.messages import Compute, Request, Response, Sleep, TransportFault

LOST = TransportFault(sent=None, error="connection reset")
NEVER_SENT = TransportFault(sent=False, error="connection refused")


def reply(body: Any = None, status: int = 200, **headers: str) -> Response:
    data = b"" if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
    return Response(status, {name.replace("_", "-"): value for name, value in headers.items()}, data)


def expired(code: str | None = "390112", status: int = 401) -> Response:
    answer = reply({"code": code} if code else {}, status)
    return replace(answer, credential={"Authorization": 'Snowflake Token="old-session-token"'}, renewable=True)


Answer = Response | TransportFault | Callable[[Request], Any]


@dataclass
class World:
    context: Context
    now: float = 1000.0
    takes_s: float = 0.0
    """How long every exchange takes."""
    requests: list[Request] = field(default_factory=list)
    sleeps: list[float] = field(default_factory=list)

    def run(self, flow: Generator[Any, Any, Any], answers: Iterable[Answer] | Callable[[Request], Any] = ()) -> Any:
        """The flow's result; a request that the script has no answer for fails the test."""
        script = iter(()) if callable(answers) else iter(answers)
        try:
            event = next(flow)
            while True:
                try:
                    value = self._perform(event, answers if callable(answers) else None, script)
                except BaseException as error:
                    event = flow.throw(error)
                else:
                    event = flow.send(value)
        except StopIteration as end:
            return end.value

    def _perform(self, event: Any, respond: Callable[[Request], Any] | None, script: Any) -> Any:
        if isinstance(event, Sleep):
            assert event.seconds >= 0
            self.sleeps.append(event.seconds)
            self.now += event.seconds
            return None
        if isinstance(event, Compute):
            return event.function()
        if event.permit is not None:
            event.permit()
        self.requests.append(event)
        self.now += self.takes_s
        if respond is not None:
            return respond(event)
        answer = next(script, None)
        assert answer is not None, f"unexpected {event.method} {event.path}"
        return answer(event) if callable(answer) else answer

    @property
    def sent(self) -> list[str]:
        return [f"{request.method} {request.path.removeprefix('/p')}" for request in self.requests]

    @property
    def body(self) -> Any:
        """The last request's JSON body."""
        return json.loads(self.requests[-1].body or b"null")


@pytest.fixture
def make_world() -> Callable[..., World]:
    def make(**policy: Any) -> World:
        holder: list[World] = []
        context = Context(
            Policy(prefix="/p", **policy),
            clock=lambda: holder[0].now,
            wall=lambda: 1_700_000_000.0 + holder[0].now,
            random=random.Random(7),
        )
        holder.append(World(context))
        return holder[0]

    return make


@pytest.fixture
def world(make_world: Callable[..., World]) -> World:
    return make_world()


def chunk_events(value: Any, max_bytes: int) -> list[dict[str, Any]]:
    """`result_chunk` events as the service sends them."""
    events = []
    for chunk in wire.encode_result_chunks(value, max_bytes):
        events.append(
            {
                "type": "result_chunk",
                "payload_b64": base64.b64encode(chunk).decode(),
                "payload_sha256": hashlib.sha256(chunk).hexdigest(),
            }
        )
    return events


def envelope(value: Any) -> dict[str, Any]:
    return {
        "content_type": "application/octet-stream",
        "encoding": "base64",
        "wire_format": "DSSST1",
        "payload_b64": base64.b64encode(wire.dumps(value)).decode(),
    }


@pytest.fixture
def say() -> Any:
    """The vocabulary of scripts, for test modules (which are not imported as a package)."""

    class Say:
        reply = staticmethod(reply)
        expired = staticmethod(expired)
        chunk_events = staticmethod(chunk_events)
        envelope = staticmethod(envelope)
        accepted = reply({"request_id": "r"})
        cached = reply({"chunk_cached": True})
        lost = LOST
        never_sent = NEVER_SENT

    return Say
