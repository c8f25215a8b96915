"""A proxy that puts the network's faults between a client and the local service, and records what passed."""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from aiohttp import ClientSession, ClientTimeout, web

DROP_BEFORE = "drop-before"
DROP_AFTER = "drop-after"
ANSWER = "answer"
HOLD = "hold"

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

    def applies(self, line: str) -> bool:
        if not re.search(self.pattern, line):
            return False
        self.seen += 1
        return self.skip < self.seen <= self.skip + self.times


class FaultProxy:
    """Forwards to `upstream` (a base URL) from a free loopback port; runs in a thread of its own.

    ``drop-before`` closes the connection unforwarded, ``drop-after`` once the service has executed the request, ``answer`` replies
    with `status` unforwarded, ``hold`` executes and keeps the reply back until `released` is set.
    """

    def __init__(self, upstream: str) -> None:
        self.upstream = upstream
        self.rules: list[Rule] = []
        self.lines: list[str] = []
        self.base_url = ""
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self._done = asyncio.Event()
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
            await runner.cleanup()

    async def _forward(self, request: web.Request) -> web.StreamResponse:
        line = f"{request.method} {request.path}"
        self.lines.append(line)
        body = await request.read()
        rule = next((r for r in self.rules if r.applies(line)), None)
        if rule is not None and rule.before is not None:
            await asyncio.get_running_loop().run_in_executor(None, rule.before)
        if rule is not None and rule.action == DROP_BEFORE:
            return _hang_up(request)
        if rule is not None and rule.action == ANSWER:
            return web.json_response(rule.body, status=rule.status, headers=rule.headers)
        headers = {
            k: v for k, v in request.headers.items() if k.lower() not in ("host", "content-length", "connection")
        }
        session = request.app[_SESSION]
        async with session.request(
            request.method, self.upstream + request.path_qs, data=body or None, headers=headers, allow_redirects=False
        ) as answer:
            payload = await answer.read()
            kept = {k: v for k, v in answer.headers.items() if k.lower() not in ("transfer-encoding", "content-length")}
        if rule is not None and rule.action == DROP_AFTER:
            return _hang_up(request)
        if rule is not None and rule.action == HOLD:
            rule.holding.set()
            await asyncio.get_running_loop().run_in_executor(None, rule.released.wait, 120)
        return web.Response(status=answer.status, body=payload, headers=kept)


def _hang_up(request: web.Request) -> web.StreamResponse:
    if request.transport is not None:
        request.transport.abort()
    return web.Response()
