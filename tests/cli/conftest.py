"""The command line in this process, against a scripted service."""

from __future__ import annotations

import fcntl
import http.server
import json
import os
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from cortex_training.cli import main


@dataclass
class Outcome:
    code: int
    out: str
    err: str

    @property
    def document(self) -> Any:
        """The one JSON document on standard output; anything else there fails the test."""
        return json.loads(self.out)


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> pytest.MonkeyPatch:
    """Nothing from the machine the tests run on: no variables, no login, no profiles."""
    import os

    for name in list(os.environ):
        if name.startswith(("CORTEX_TRAINING_", "SNOWFLAKE_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("HOME", str(tmp_path))
    return monkeypatch


@pytest.fixture
def run(environment: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Outcome]:
    def run(*arguments: str) -> Outcome:
        capsys.readouterr()
        code = main(list(arguments))
        captured = capsys.readouterr()
        return Outcome(code, captured.out, captured.err)

    return run


@dataclass
class Call:
    method: str
    path: str
    query: dict[str, list[str]]
    headers: Any
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


class Service:
    """Answers by (method, last part of the path); `answers` maps them to (status, body)."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.answers: dict[tuple[str, str], Any] = {}
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def log_message(self, *arguments: Any) -> None:
                return None

            def _serve(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                parts = urlsplit(self.path)
                path = parts.path.partition("/cortex-training")[2]
                outer.calls.append(Call(self.command, path, parse_qs(parts.query), self.headers, body))
                status, answer = outer.answer(self.command, path)
                data = b"" if answer is None else json.dumps(answer).encode()
                self.send_response(status)
                self.send_header("x-snowflake-request-id", "req-42")
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            do_GET = do_POST = do_DELETE = _serve

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()

    def answer(self, method: str, path: str) -> tuple[int, Any]:
        for (wanted, end), answer in self.answers.items():
            if wanted == method and path.endswith(end):
                answer = answer() if callable(answer) else answer
                status_and_body: tuple[int, Any] = answer if isinstance(answer, tuple) else (200, answer)
                return status_and_body
        if "/requests/" in path:
            return 200, {"status": "done", "result": {"ok": True}}
        return 200, {"request_id": "r-1", "job_id": "job-1"}

    def answer_in_turn(self, method: str, end: str, answers: list[Any]) -> None:
        """Give these answers one after another, the last one for ever."""
        remaining = list(answers)
        self.answers[method, end] = lambda: remaining.pop(0) if len(remaining) > 1 else remaining[0]

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def service(environment: pytest.MonkeyPatch) -> Iterator[Service]:
    server = Service()
    environment.setenv("CORTEX_TRAINING_BASE_URL", server.url)
    environment.setenv("CORTEX_TRAINING_DATABASE", "DB")
    yield server
    server.stop()


class Terminal:
    """A person at a command: what it says on its terminal, and its standard output, which is a pipe."""

    def __init__(self, *arguments: str) -> None:
        self._own, other = os.openpty()

        def take_terminal() -> None:
            os.setsid()
            fcntl.ioctl(0, termios.TIOCSCTTY, 0)

        command = [str(Path(sys.executable).with_name("cortex-training")), *arguments]
        self._process = subprocess.Popen(
            command, stdin=other, stderr=other, stdout=subprocess.PIPE, preexec_fn=take_terminal
        )
        os.close(other)
        self.said = ""

    def answer(self, prompt: str, text: str) -> None:
        """Wait for `prompt`, then type."""
        deadline = time.monotonic() + 60
        while prompt not in self.said:
            assert time.monotonic() < deadline, self.said
            self.said += os.read(self._own, 4096).decode()
        self.said = self.said.partition(prompt)[2]
        os.write(self._own, f"{text}\n".encode())

    def end(self) -> tuple[int, str]:
        out, _ = self._process.communicate(timeout=60)
        try:
            while said := os.read(self._own, 4096):
                self.said += said.decode()
        except OSError:  # the other side is closed
            pass
        os.close(self._own)
        return self._process.returncode, out.decode()


@pytest.fixture
def at_terminal(environment: pytest.MonkeyPatch) -> type[Terminal]:
    """Runs `cortex-training` with these arguments in a process of its own, at a terminal."""
    environment.setenv("TERM", "xterm")
    return Terminal
