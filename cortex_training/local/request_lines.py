"""Tells of every request that was answered, for whoever watches the service."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from starlette.types import ASGIApp, Message, Receive, Scope, Send

_LONGEST = 200


@dataclass(frozen=True)
class Answered:
    method: str
    path: str
    """As it was sent, without database and schema, in printable characters."""
    status: int
    """0 when the caller went away without an answer."""
    seconds: float


class RequestLines:
    """An ASGI application around another one."""

    def __init__(self, app: ASGIApp, tell: Callable[[Answered], None]) -> None:
        self._app = app
        self._tell = tell

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began, status = time.monotonic(), 0

        async def sending(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, sending)
        finally:
            self._tell(Answered(_printable(scope["method"]), _shown(scope), status, time.monotonic() - began))


def _shown(scope: Scope) -> str:
    path = scope.get("raw_path", b"").decode("latin-1")
    _, prefix, rest = path.partition("/schemas/")
    shown = "/" + rest.partition("/")[2] if prefix else path
    if shown.startswith("/exports/"):
        # A link is a secret.
        shown = "/exports/…/" + shown.removeprefix("/exports/").partition("/")[2]
    return _printable(shown)


def _printable(text: str) -> str:
    """A caller's text can't move the cursor of the terminal that it is shown on."""
    return "".join(one if one.isprintable() else "?" for one in text[:_LONGEST])
