"""What `serve` prints for a person: settings that work when they are pasted, and a line for each request."""

from __future__ import annotations

import ast
import json
import os
import pty
import re
import select
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import requests

from airflow_cortex_training.connection import ConnectionSettings, Target
from cortex_training import CortexTrainingClient
from cortex_training.auth import PatAuth
from cortex_training.cli.greeting import greeting
from cortex_training.local.settings import ServiceSettings

_URL = "http://127.0.0.1:8484"


def told(tmp_path: Path, **options: object) -> dict[str, str]:
    """The greeting's lines by what they are for."""
    text = greeting(_URL, ServiceSettings(tmp_path, **options), None)  # type: ignore[arg-type]
    return dict(re.findall(r"^  (\S[\w ]*?)  +(.*)$", text, re.MULTILINE))


def test_what_is_pasted_names_the_service(tmp_path: Path) -> None:
    lines = told(tmp_path, endpoint="other", token="s3cret")
    assert lines["status page"] == f"{_URL}/"
    [_, assignment] = shlex.split(lines["airflow"])
    connection = json.loads(assignment.partition("=")[2])
    read = ConnectionSettings.read(
        Target("cortex_training_default"),
        host=connection["host"],
        port=None,
        schema=connection["schema"],
        password=connection["password"],
        extra=connection["extra"],
    )
    assert (read.base_url, read.database, read.schema, read.endpoint) == (_URL, "LOCAL", "PUBLIC", "other")
    [call] = [node for node in ast.walk(ast.parse(lines["prefect"])) if isinstance(node, ast.Call) and node.keywords]
    block = {keyword.arg: ast.literal_eval(keyword.value) for keyword in call.keywords}
    assert (block["host"], block["database"], block["endpoint"]) == (_URL, "LOCAL", "other")
    assert dict(one.split("=") for one in shlex.split(lines["cli"])[1:])["CORTEX_TRAINING_BASE_URL"] == _URL
    assert "s3cret" not in str(lines)


def test_the_token_that_is_pasted_is_one(tmp_path: Path) -> None:
    """Where the service takes any, what stands in the lines has to pass for one."""
    lines = told(tmp_path)
    [_, assignment] = shlex.split(lines["airflow"])
    [call] = [node for node in ast.walk(ast.parse(lines["prefect"])) if isinstance(node, ast.Call) and node.keywords]
    block = {keyword.arg: ast.literal_eval(keyword.value) for keyword in call.keywords}
    for token in (json.loads(assignment.partition("=")[2])["password"], block["pat"]):
        assert PatAuth(token).headers()["Authorization"].endswith(token)


@pytest.fixture
def terminal(tmp_path: Path) -> Iterator[tuple[int, subprocess.Popen[bytes]]]:
    """A service whose output goes to a terminal; the terminal's other end."""
    ours, its = pty.openpty()
    command = [sys.executable, "-m", "cortex_training.local", "serve", "--port", "0", "--simulate", "0"]
    process = subprocess.Popen(
        [*command, "--data-dir", str(tmp_path)], stdin=its, stdout=its, stderr=its, env={**os.environ, "TERM": "xterm"}
    )
    os.close(its)
    yield ours, process
    process.terminate()
    process.wait(10)
    os.close(ours)


def read_until(terminal: int, wanted: str) -> str:
    """What the terminal shows, without colours."""
    text, deadline = "", time.monotonic() + 60
    while not re.search(wanted, text):
        assert time.monotonic() < deadline, text
        if select.select([terminal], [], [], 1)[0]:
            text += os.read(terminal, 65536).decode()
            text = re.sub(r"\x1b\[[0-9;]*m", "", text)
    return text


def test_a_line_for_each_request(terminal: tuple[int, subprocess.Popen[bytes]]) -> None:
    shown = read_until(terminal[0], "Ctrl-C")
    found = re.search(r"listens on (http://\S+)", shown)
    assert found is not None
    base_url = found[1]
    assert "Waiting for application startup" not in shown
    with CortexTrainingClient(base_url, "LOCAL", "PUBLIC") as client:
        client.list_jobs()
    assert re.search(r"\d\d:\d\d:\d\d  GET     200 +\d+\.\d ms  /cortex-training\r\n", read_until(terminal[0], "ms"))
    requests.get(base_url + "/exports/secret/a%1b%5b31mfile", timeout=60)
    line = read_until(terminal[0], "file")
    assert "GET     403" in line
    # Neither a secret, nor a character that moves the cursor.
    assert "secret" not in line
    assert "\x1b" not in line
