"""A real HTTP server that misbehaves on command, and both clients to send against it."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from cortex_training.aio import AsyncCortexTrainingClient
from cortex_training.client import CortexTrainingClient

PREFIX = "/api/v2/databases/DB/schemas/PUBLIC/cortex-training"


@dataclass
class Seen:
    """One request as it arrived."""

    method: str
    target: str
    headers: dict[str, str]
    body: bytes
    connection: int

    @property
    def path(self) -> str:
        return urlsplit(self.target).path.removeprefix(PREFIX)

    @property
    def query(self) -> dict[str, list[str]]:
        return parse_qs(urlsplit(self.target).query)

    @property
    def json(self) -> Any:
        return json.loads(self.body)


@dataclass
class Reply:
    status: int = 200
    body: Any = None
    headers: dict[str, str] = field(default_factory=dict)
    truncated: bool = False
    """Announce more bytes than are sent, then close."""

    def encoded(self) -> bytes:
        body = (
            b"" if self.body is None else self.body if isinstance(self.body, bytes) else json.dumps(self.body).encode()
        )
        length = len(body) + (10 if self.truncated else 0)
        lines = [f"HTTP/1.1 {self.status} Status", f"Content-Length: {length}"]
        lines += [f"{name}: {value}" for name, value in self.headers.items()]
        return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


class Drop:
    """Close the connection without an answer, after the whole request was read: executed, and the reply lost."""


@dataclass
class Hang:
    """Answer nothing for this many seconds."""

    seconds: float = 30.0


@dataclass
class Trickle:
    """Answer a byte at a time, for ever."""

    every_s: float = 0.05


Script = Callable[[Seen], Any]


class Weather:
    """A server whose `script` says, per request, what happens; `seen` holds every complete request in order."""

    def __init__(self, port: int = 0, tls: ssl.SSLContext | None = None) -> None:
        self._tls = tls
        self.seen: list[Seen] = []
        self.script: Script = lambda seen: Reply(body={})
        self._listener = socket.create_server(("127.0.0.1", port))
        self._stopping = threading.Event()
        self._connections = 0
        self._open: list[socket.socket] = []
        self.port = self._listener.getsockname()[1]
        self.url = f"{'https' if tls else 'http'}://127.0.0.1:{self.port}"
        threading.Thread(target=self._accept, daemon=True).start()

    def sequence(self, *replies: Any) -> None:
        """Answer with these in order, the last one for ever."""
        remaining = list(replies)
        lock = threading.Lock()

        def script(seen: Seen) -> Any:
            with lock:
                reply = remaining.pop(0) if len(remaining) > 1 else remaining[0]
            return reply(seen) if callable(reply) else reply

        self.script = script

    def hang_up(self) -> None:
        """Close every connection, as an idle timeout of the service would."""
        for connection in self._open:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        self._open.clear()

    def stop(self) -> None:
        self._stopping.set()
        # Closing alone does not wake a thread that is in accept().
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.hang_up()

    def _accept(self) -> None:
        while not self._stopping.is_set():
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            self._connections += 1
            self._open.append(connection)
            threading.Thread(target=self._serve, args=(connection, self._connections), daemon=True).start()

    def _serve(self, connection: socket.socket, number: int) -> None:
        if self._tls is not None:
            try:
                connection = self._tls.wrap_socket(connection, server_side=True)
            except OSError:
                return
        with connection, connection.makefile("rb") as stream:
            while True:
                try:
                    seen = _read_request(stream, number)
                    if seen is None:
                        return
                    self.seen.append(seen)
                    if not self._answer(connection, self.script(seen)):
                        return
                except (OSError, ValueError):
                    return

    def _answer(self, connection: socket.socket, reply: Any) -> bool:
        """Carry out one reply; False when the connection is finished."""
        if isinstance(reply, Drop):
            return False
        if isinstance(reply, Hang):
            self._stopping.wait(reply.seconds)
            return False
        if isinstance(reply, Trickle):
            connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n")
            while not self._stopping.is_set():
                connection.sendall(b" ")
                time.sleep(reply.every_s)
            return False
        connection.sendall(reply.encoded())
        return not reply.truncated


def _read_request(stream: Any, number: int) -> Seen | None:
    line = stream.readline()
    if not line:
        return None
    method, target, _ = line.decode().split(" ", 2)
    headers: dict[str, str] = {}
    while (line := stream.readline()) not in (b"\r\n", b""):
        name, _, value = line.decode("latin-1").partition(":")
        headers[name.strip().lower()] = value.strip()
    length = int(headers.get("content-length", "0"))
    body = stream.read(length)
    if len(body) != length:
        raise ValueError("the request was cut off")
    return Seen(method, target, headers, body, number)


@pytest.fixture
def weather() -> Iterator[Weather]:
    server = Weather()
    yield server
    server.stop()


class Blocking:
    """`AsyncCortexTrainingClient` behind the interface of the blocking one, so that one scenario tests both."""

    def __init__(self, client: AsyncCortexTrainingClient, loop: asyncio.AbstractEventLoop) -> None:
        self._client = client
        self._loop = loop

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self._client, name)
        if name in ("close", "aclose"):
            return lambda: self._loop.run_until_complete(self._client.aclose())
        if inspect.isasyncgenfunction(attribute):
            return lambda *args, **kwargs: self._collect(attribute(*args, **kwargs))
        if inspect.iscoroutinefunction(attribute):
            return lambda *args, **kwargs: self._loop.run_until_complete(attribute(*args, **kwargs))
        return attribute

    def _collect(self, entries: Any) -> Iterator[Any]:
        async def everything() -> list[Any]:
            return [entry async for entry in entries]

        return iter(self._loop.run_until_complete(everything()))

    def close(self) -> None:
        self._loop.run_until_complete(self._client.aclose())


class Fleet:
    """Makes clients of one transport and closes them at the end."""

    def __init__(self, transport: str) -> None:
        self.transport = transport
        self._loop = asyncio.new_event_loop() if transport == "aiohttp" else None
        self._made: list[Any] = []

    def __call__(self, base_url: str, **options: Any) -> Any:
        kind: Any = CortexTrainingClient if self._loop is None else AsyncCortexTrainingClient
        return self.adopt(kind(base_url, "DB", "PUBLIC", **options))

    def from_pat(self, host: str, **options: Any) -> Any:
        kind: Any = CortexTrainingClient if self._loop is None else AsyncCortexTrainingClient
        return self.adopt(kind.from_pat(host, "secret-token-value", "DB", "PUBLIC", **options))

    def from_connection_name(self, name: str | None = None, **options: Any) -> Any:
        kind: Any = CortexTrainingClient if self._loop is None else AsyncCortexTrainingClient
        return self.adopt(kind.from_connection_name(name, **options))

    def adopt(self, client: Any) -> Any:
        wrapped = client if self._loop is None else Blocking(client, self._loop)
        self._made.append(wrapped)
        return wrapped

    def expire_idle_connections(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Make every kept connection count as idle for too long, as if that time had passed."""
        from cortex_training import _requests_driver

        if self._loop is None:
            monkeypatch.setattr(_requests_driver, "KEEP_ALIVE_S", -1.0)
        else:
            for wrapped in self._made:
                connector = wrapped._client._driver._own.connector
                monkeypatch.setattr(connector, "_keepalive_timeout", -1.0)

    def close(self) -> None:
        for client in self._made:
            client.close()
        if self._loop is not None:
            self._loop.run_until_complete(self._loop.shutdown_default_executor())
            self._loop.close()


@pytest.fixture(params=["requests", "aiohttp"])
def clients(request: pytest.FixtureRequest) -> Iterator[Fleet]:
    fleet = Fleet(request.param)
    yield fleet
    fleet.close()


@pytest.fixture
def client(clients: Fleet, weather: Weather) -> Any:
    """A client of either transport for `weather`; retries begin for 3 seconds."""
    return clients(weather.url, retry_budget_s=3.0, request_timeout=(2.0, 5.0))


@pytest.fixture
def scripted() -> Any:
    """The vocabulary of scripts, for test modules (which are not imported as a package)."""

    class Vocabulary:
        Reply = Reply
        Drop = Drop
        Hang = Hang
        Trickle = Trickle
        Weather = Weather

    return Vocabulary


@pytest.fixture
def large_result() -> dict[str, Any]:
    """The status of a finished request whose result is a few megabytes."""
    import base64

    import numpy as np

    from cortex_training import wire

    frame = wire.dumps({"x": np.zeros(400_000, dtype=np.float64)})
    result = {"encoding": "base64", "wire_format": "DSSST1", "payload_b64": base64.b64encode(frame).decode()}
    return {"status": "done", "result": result}
