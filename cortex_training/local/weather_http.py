"""Bad weather for HTTP: replies that are late, lost, held back or wrong."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Iterable
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import Request as StarletteRequest
from starlette.routing import Match, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cortex_training.local.bodies import read_body
from cortex_training.local.http_limits import bounded_protocol
from cortex_training.local.jobs import Job
from cortex_training.local.refusals import Refusal
from cortex_training.local.requests import Request
from cortex_training.local.weather import Active, Meeting, Weather
from cortex_training.local.weather_jobs import JobWeather
from cortex_training.local.weather_rules import BEFORE, ONCE_EXECUTED

_API = "/api/"
_TRANSPORT: ContextVar[asyncio.Transport] = ContextVar("transport")


def hangable_protocol() -> type[asyncio.Protocol]:
    """uvicorn's HTTP protocol, whose requests can close their connection without an answer."""
    base: Any = bounded_protocol()

    class HangableProtocol(base):  # type: ignore[misc]
        def connection_made(self, transport: asyncio.Transport) -> None:
            self._own_transport = transport
            super().connection_made(transport)

        def data_received(self, data: bytes) -> None:
            # The request's task is made in here, with a copy of this context.
            _TRANSPORT.set(self._own_transport)
            super().data_received(data)

    return HangableProtocol


class _HungUp(Exception):
    """The caller gets no answer: the connection was closed, or the caller closed it."""


@dataclass
class _Reply:
    """An answer that was given and has not been sent."""

    status: int
    headers: list[tuple[bytes, bytes]]
    body: bytes
    cut_at: int | None = None
    """Close the connection after so many bytes of the body."""

    def document(self) -> Any:
        """The body if it is JSON, else None."""
        try:
            return json.loads(self.body)
        except ValueError:
            return None

    def replace(self, document: Any) -> None:
        self.body = json.dumps(document, separators=(",", ":")).encode()


@dataclass
class _Arrival:
    """A request as it came in, with its body."""

    scope: Scope
    body: bytes
    receive: Receive
    meeting: Meeting

    @property
    def authorization(self) -> str | None:
        return _header(self.scope, b"authorization")


@dataclass
class _Handling:
    """One passage of a request through the service, its reply caught."""

    app: ASGIApp
    arrival: _Arrival
    _start: Message = field(default_factory=dict)
    _parts: list[bytes] = field(default_factory=list)
    _told: bool = False

    async def reply(self) -> _Reply:
        # The router writes into the scope.
        await self.app({**self.arrival.scope}, self._receive, self._send)
        return _Reply(self._start["status"], list(self._start.get("headers", [])), b"".join(self._parts))

    async def _receive(self) -> Message:
        if not self._told:
            self._told = True
            return {"type": "http.request", "body": self.arrival.body, "more_body": False}
        await asyncio.Event().wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._start = message
        else:
            self._parts.append(message.get("body", b""))


class WeatherDoor:
    """Stands between the front door and the routes."""

    def __init__(self, app: ASGIApp, routes: Iterable[Any], job_weather: JobWeather, max_body_bytes: int) -> None:
        self._app = app
        self._routes = [route for route in routes if isinstance(route, Route)]
        self._job_weather = job_weather
        self._weather: Weather = job_weather.weather
        self._max_body_bytes = max_body_bytes
        self._late: set[asyncio.Task[None]] = set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            self._check_token(scope)
            if not self._weather.rules:
                await self._app(scope, receive, send)
                return
            arrival = await self._arrival(scope, receive)
            await _send_reply(await self._reply(arrival, self._weather.requested(arrival.meeting)), send)
        except Refusal as refusal:
            await _send_reply(_refused(refusal), send)
        except _HungUp:
            return

    def _check_token(self, scope: Scope) -> None:
        """Raises Refusal (401). Logins and their renewal come by other paths, and can always be had."""
        authorization = _header(scope, b"authorization")
        if authorization is not None and scope["path"].startswith(_API):
            self._job_weather.tokens.check(authorization)

    async def _arrival(self, scope: Scope, receive: Receive) -> _Arrival:
        """Read the request to its end: who sent all of it cannot tell what became of it.

        Raises Refusal (413) when it is too long, _HungUp when the caller goes away meanwhile.
        """
        try:
            body = await read_body(StarletteRequest(scope, receive), self._max_body_bytes)
        except Refusal as refusal:
            if refusal.status == 413:
                raise
            raise _HungUp from None
        names, job_id = self._names(scope, body)
        query = scope.get("query_string", b"").decode("latin-1")
        line = f"{scope['method']} {scope['path']}" + (f"?{query}" if query else "")
        return _Arrival(scope, body, receive, Meeting(names, line, job_id))

    def _names(self, scope: Scope, body: bytes) -> tuple[tuple[str, ...], str | None]:
        """What the request is called in rules, and the job it is about."""
        for route in self._routes:
            match, found = route.matches(scope)
            if match == Match.FULL:
                names = (route.name.replace("_", "-"),)
                job_id = found.get("path_params", {}).get("job_id")
                if names == ("operation",):
                    names += tuple(re.findall(r'"operation_type"\s*:\s*"([a-z-]+)"', body.decode("latin-1"))[:1])
                if names == ("create-job",):
                    job_id = _created_job_id(body)
                return names, job_id
        return (), None

    async def _reply(self, arrival: _Arrival, fired: list[Active]) -> _Reply:
        """What the caller gets. Raises _HungUp when it gets nothing."""
        for active in fired:
            if active.rule.when == BEFORE:
                reply = await self._before(active, arrival)
                if reply is not None:
                    return reply
        reply = await _Handling(self._app, arrival).reply()
        for active in fired:
            if active.rule.when != BEFORE:
                if active.rule.when == ONCE_EXECUTED:
                    await self._until_executed(arrival.meeting.job_id, reply)
                reply = await self._after(active, arrival, reply)
        return reply

    async def _before(self, active: Active, arrival: _Arrival) -> _Reply | None:
        """Let the fault happen before the request is handled. A reply means that it is not handled."""
        if active.rule.act.action == "late":
            task = asyncio.get_running_loop().create_task(self._handle_late(active.seconds(), arrival))
            self._late.add(task)
            task.add_done_callback(self._late.discard)
            await _hang_up(arrival.receive)
        if active.rule.act.action == "redirect":
            location = active.rule.act["location"].encode()
            return _Reply(active.rule.act["status"], [(b"location", location)], b"")
        return await self._anywhen(active, arrival)

    async def _after(self, active: Active, arrival: _Arrival, reply: _Reply) -> _Reply:
        """Let the fault happen to a reply."""
        act = active.rule.act
        change = _CHANGES.get(act.action)
        if change is not None:
            change(act, arrival, reply)
            return reply
        if act.action == "repeat":
            await _Handling(self._app, arrival).reply()
            return reply
        return await self._anywhen(active, arrival) or reply

    async def _anywhen(self, active: Active, arrival: _Arrival) -> _Reply | None:
        act = active.rule.act
        match act.action:
            case "delay":
                await asyncio.sleep(active.seconds())
            case "hold":
                await _while_connected(arrival.receive, self._weather.hold(active))
            case "hang":
                await _while_connected(arrival.receive, self._weather.hold(active))
                await _hang_up(arrival.receive)
            case "drop":
                await _hang_up(arrival.receive)
            case "answer":
                return _answer(act)
            case _:
                job = self._job_weather.lifecycle.jobs.get(arrival.meeting.job_id or "")
                self._job_weather.happen(active, job, arrival.authorization)
                if active.rule.when == BEFORE:
                    # A token that has just expired is refused already.
                    self._check_token(arrival.scope)
        return None

    async def _handle_late(self, seconds: float, arrival: _Arrival) -> None:
        await asyncio.sleep(seconds)
        await _Handling(self._app, arrival).reply()

    async def _until_executed(self, job_id: str | None, reply: _Reply) -> None:
        """Return when the request that the reply names is over; at once when it names none."""
        request = _request_named_by(self._job_weather.lifecycle.jobs.get(job_id or ""), reply)
        if request is not None and not request.execution.is_over:
            over = asyncio.Event()
            request.execution.when_over.append(over.set)
            await over.wait()


def _request_named_by(job: Job | None, reply: _Reply) -> Request | None:
    document = reply.document()
    if job is None or not isinstance(document, dict):
        return None
    return job.requests.get(document.get("request_id", ""))


async def _hang_up(receive: Receive) -> None:
    """Close the connection under the request. Raises _HungUp."""
    _TRANSPORT.get().abort()
    # uvicorn answers for an application that returns without an answer, unless it knows that nobody is there.
    while (await receive())["type"] != "http.disconnect":
        pass
    raise _HungUp


async def _while_connected(receive: Receive, waiting: Any) -> None:
    """Await something for a caller that may go away meanwhile. Raises _HungUp when it does."""

    async def gone() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    waits, leaves = asyncio.ensure_future(waiting), asyncio.ensure_future(gone())
    try:
        await asyncio.wait([waits, leaves], return_when=asyncio.FIRST_COMPLETED)
        if not waits.done():
            raise _HungUp
    finally:
        for task in (waits, leaves):
            task.cancel()


async def _send_reply(reply: _Reply, send: Send) -> None:
    body = reply.body
    headers = [(name, value) for name, value in reply.headers if name.lower() != b"content-length"]
    headers.append((b"content-length", str(len(body)).encode()))
    if reply.status in (204, 304):
        body, headers = b"", headers[:-1]
    await send({"type": "http.response.start", "status": reply.status, "headers": headers})
    if reply.cut_at is not None and reply.cut_at < len(body):
        await send({"type": "http.response.body", "body": body[: reply.cut_at], "more_body": True})
        # What was written is still sent; abort() would throw it away.
        _TRANSPORT.get().close()
        return
    await send({"type": "http.response.body", "body": body})


def _refused(refusal: Refusal) -> _Reply:
    reply = _json_reply(refusal.status, refusal.body())
    if refusal.status == 413:
        reply.headers.append((b"connection", b"close"))
    return reply


def _json_reply(status: int, document: Any) -> _Reply:
    return _Reply(status, [(b"content-type", b"application/json")], json.dumps(document).encode())


def _answer(act: Any) -> _Reply:
    body = act["body"]
    if isinstance(body, str):
        reply = _Reply(act["status"], [(b"content-type", b"text/plain; charset=utf-8")], body.encode())
    else:
        default = {"code": act["status"], "message": "the weather answered in the service's place"}
        reply = _json_reply(act["status"], default if body is None else body)
    if act["retry_after"] is not None:
        reply.headers.append((b"retry-after", f"{act['retry_after']:g}".encode()))
    for name, value in (act["headers"] or {}).items():
        reply.headers.append((name.lower().encode(), value.encode()))
    return reply


def _cut(act: Any, _: _Arrival, reply: _Reply) -> None:
    reply.cut_at = act["bytes"]


def _corrupt(act: Any, _: _Arrival, reply: _Reply) -> None:
    """Flip the lowest bit of one byte, counted round the body."""
    if reply.body:
        body = bytearray(reply.body)
        body[act["byte"] % len(body)] ^= 1
        reply.body = bytes(body)


def _patched(act: Any, _: _Arrival, reply: _Reply) -> None:
    document = reply.document()
    if isinstance(document, dict):
        reply.replace(_merge(document, act["body"]))


def _wrong_hash(_: Any, __: _Arrival, reply: _Reply) -> None:
    """Give result chunks the hash of something else."""
    document = reply.document()
    if isinstance(document, dict):
        for event in document.get("events") or []:
            if "payload_sha256" in event:
                event["payload_sha256"] = event["payload_sha256"][::-1]
        reply.replace(document)


def _duplicate_events(_: Any, __: _Arrival, reply: _Reply) -> None:
    document = reply.document()
    if isinstance(document, dict) and isinstance(document.get("events"), list):
        document["events"] = [event for event in document["events"] for _ in range(2)]
        reply.replace(document)


def _stuck_cursor(_: Any, arrival: _Arrival, reply: _Reply) -> None:
    """Name this page as the next one."""
    document = reply.document()
    if isinstance(document, dict) and "next_cursor" in document:
        asked = re.search(r"[?&]cursor=([^&]*)", arrival.meeting.line)
        document["next_cursor"] = asked[1] if asked and asked[1] else "0"
        reply.replace(document)


_CHANGES: dict[str, Callable[[Any, _Arrival, _Reply], None]] = {
    "cut": _cut,
    "corrupt": _corrupt,
    "patch": _patched,
    "wrong-hash": _wrong_hash,
    "duplicate-events": _duplicate_events,
    "stuck-cursor": _stuck_cursor,
}


def _merge(document: Any, patch: Any) -> Any:
    """A JSON merge patch (RFC 7386): null removes a field, objects are merged, anything else replaces."""
    if not isinstance(patch, dict):
        return patch
    merged = dict(document) if isinstance(document, dict) else {}
    for name, value in patch.items():
        if value is None:
            merged.pop(name, None)
        else:
            merged[name] = _merge(merged.get(name), value)
    return merged


def _created_job_id(body: bytes) -> str | None:
    try:
        document = json.loads(body)
    except ValueError:
        return None
    job_id = document.get("job_id") if isinstance(document, dict) else None
    return job_id if isinstance(job_id, str) else None


def _header(scope: Scope, name: bytes) -> str | None:
    return next((value.decode("latin-1") for key, value in scope["headers"] if key == name), None)
