"""A proxy that puts the network's faults between a client and the local service, and records what passed."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from aiohttp import ClientError, ClientSession, ClientTimeout, web

DROP_BEFORE = "drop-before"
DROP_AFTER = "drop-after"
ANSWER = "answer"
HOLD = "hold"
TWICE = "twice"
LATE = "late"

_SESSION = web.AppKey("session", ClientSession)


@dataclass
class Rule:
    """What to do with the `times` requests after the first `skip` whose ``METHOD path`` matches `pattern`."""

    pattern: str
    action: str
    skip: int = 0
    times: int = 1
    status: int = 503
    headers: dict[str, str] = field(default_factory=dict)
    body: dict[str, Any] = field(default_factory=dict)
    released: threading.Event = field(default_factory=threading.Event)
    holding: threading.Event = field(default_factory=threading.Event)
    seen: int = 0
    before: Callable[[], None] | None = None
    after: Callable[[dict[str, Any]], None] | None = None
    delay_s: float = 1.0

    def applies(self, line: str) -> bool:
        if not re.search(self.pattern, line):
            return False
        self.seen += 1
        return self.skip < self.seen <= self.skip + self.times


class FaultProxy:
    """Forwards to `upstream` (a base URL) from a free loopback port; runs in a thread of its own.

    ``drop-before`` closes the connection unforwarded, ``drop-after`` once the service has executed the request,
    ``answer`` replies with `status` unforwarded, ``hold`` executes and keeps the reply back until `released` is set,
    ``twice`` forwards the request a second time behind the first, ``late`` closes the connection and forwards the
    request `delay_s` seconds later. `before` is called before the request is forwarded, `after` with the service's
    JSON answer before the client gets it. `upstream` may be changed at any time, and so may `token`: the one credential
    that is let through, while there is one.
    """

    def __init__(self, upstream: str) -> None:
        self.upstream = upstream
        self.rules: list[Rule] = []
        self.lines: list[str] = []
        self.token: str | None = None
        self.base_url = ""
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self._done = asyncio.Event()
        self._late: set[asyncio.Task[None]] = set()
        self._thread = threading.Thread(target=self._loop.run_until_complete, args=(self._serve(),), daemon=True)

    def __enter__(self) -> FaultProxy:
        self._thread.start()
        if not self._ready.wait(10):
            raise RuntimeError("the proxy did not start")
        return self

    def __exit__(self, *_: object) -> None:
        for rule in self.rules:
            rule.released.set()
        self._loop.call_soon_threadsafe(self._done.set)
        self._thread.join(10)

    def add(self, pattern: str, action: str, **fields: Any) -> Rule:
        rule = Rule(pattern, action, **fields)
        self.rules.append(rule)
        return rule

    def count(self, pattern: str) -> int:
        return sum(1 for line in self.lines if re.search(pattern, line))

    async def _serve(self) -> None:
        async with ClientSession(timeout=ClientTimeout(total=600), auto_decompress=False) as session:
            app = web.Application(client_max_size=256 * 1024 * 1024)
            app[_SESSION] = session
            app.router.add_route("*", "/{path:.*}", self._forward)
            runner = web.AppRunner(app, shutdown_timeout=0.5)
            await runner.setup()
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            port = site._server.sockets[0].getsockname()[1]  # type: ignore[union-attr]
            self.base_url = f"http://127.0.0.1:{port}"
            self._ready.set()
            await self._done.wait()
            await asyncio.gather(*self._late)
            await runner.cleanup()

    async def _forward(self, request: web.Request) -> web.StreamResponse:
        line = f"{request.method} {request.path}"
        self.lines.append(line)
        body = await request.read()
        if self.token is not None and self.token not in request.headers.get("Authorization", ""):
            return web.json_response({"code": "390303", "message": "Invalid OAuth access token."}, status=401)
        rule = next((r for r in self.rules if r.applies(line)), None) or Rule("", "forward")
        if rule.before is not None:
            await self._aside(rule.before)
        if rule.action == DROP_BEFORE:
            return _hang_up(request)
        if rule.action == LATE:
            task = self._loop.create_task(self._send_late(request, body, rule.delay_s))
            self._late.add(task)
            task.add_done_callback(self._late.discard)
            return _hang_up(request)
        if rule.action == ANSWER:
            return web.json_response(rule.body, status=rule.status, headers=rule.headers)
        try:
            status, payload, headers = await self._send(request, body)
            if rule.action == TWICE:
                await self._send(request, body)
        except ClientError:
            # The service is down or went down: what a gateway's client sees is a dead connection.
            return _hang_up(request)
        if rule.after is not None:
            await self._aside(lambda: rule.after(json.loads(payload)))
        if rule.action == DROP_AFTER:
            return _hang_up(request)
        if rule.action == HOLD:
            rule.holding.set()
            await self._aside(lambda: rule.released.wait(120))
        return web.Response(status=status, body=payload, headers=headers)

    async def _send(self, request: web.Request, body: bytes) -> tuple[int, bytes, dict[str, str]]:
        headers = {
            k: v for k, v in request.headers.items() if k.lower() not in ("host", "content-length", "connection")
        }
        session = request.app[_SESSION]
        async with session.request(
            request.method, self.upstream + request.path_qs, data=body or None, headers=headers, allow_redirects=False
        ) as answer:
            payload = await answer.read()
            kept = {k: v for k, v in answer.headers.items() if k.lower() not in ("transfer-encoding", "content-length")}
        return answer.status, payload, kept

    async def _send_late(self, request: web.Request, body: bytes, delay_s: float) -> None:
        await asyncio.sleep(delay_s)
        with contextlib.suppress(ClientError):
            await self._send(request, body)

    async def _aside(self, work: Callable[[], Any]) -> None:
        await asyncio.get_running_loop().run_in_executor(None, work)


def _hang_up(request: web.Request) -> web.StreamResponse:
    if request.transport is not None:
        request.transport.abort()
    return web.Response()
