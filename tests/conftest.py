"""Fixtures that every package's tests share: a real local service in a process of its own."""

from __future__ import annotations

import ctypes
import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from cortex_training.local.control_client import ServiceControl

_START_S, _STOP_S = 60.0, 10.0


@dataclass
class RunningService:
    """A `cortex-training serve` process; any database and schema are accepted."""

    base_url: str
    data_dir: Path
    process: subprocess.Popen[str]
    log_path: Path
    stderr_path: Path
    endpoint: str = "cortex-training"
    database: str = "TESTS"
    schema: str = "PUBLIC"
    ready: dict[str, Any] = field(default_factory=dict)

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def control(self) -> ServiceControl:
        """The control port of a service that was started with `faults`."""
        return ServiceControl.of(self.ready)

    @property
    def url(self) -> str:
        """The prefix of every call."""
        return f"{self.base_url}/api/v2/databases/{self.database}/schemas/{self.schema}/{self.endpoint}"

    def execution_log(self, job_id: str | None = None) -> list[dict[str, Any]]:
        """What the service really executed so far, in order; of one job, or of all."""
        if not self.log_path.exists():
            return []
        entries = [json.loads(line) for line in self.log_path.read_text().splitlines()]
        return [entry for entry in entries if job_id is None or entry["job_id"] == job_id]

    def kill(self) -> None:
        """End it as a crash would."""
        self.process.kill()
        self.process.wait()

    def stop(self) -> int:
        """End it with SIGTERM. Returns its exit code."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            self.kill()
            raise AssertionError(
                f"the service outlived SIGTERM by {_STOP_S} s:\n{self.stderr_path.read_text()}"
            ) from None


ServiceFactory = Callable[..., RunningService]


def start_service(folder: Path, **options: Any) -> RunningService:
    """Start `serve` with options named as on the command line; True is a bare flag, a list a repeated option.

    `faults` may be the rules themselves, also none of them, instead of a file; it gives the service a `control`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if isinstance(options.get("faults"), list):
        rules, options["faults"] = options["faults"], folder / "faults.json"
        options["faults"].write_text(json.dumps({"rules": rules}))
    log_path = Path(options.pop("execution_log", folder / "executions.jsonl"))
    stderr_path = folder / f"serve-{time.monotonic_ns()}.log"
    settings = {"port": 0, "data_dir": folder / "data", "placing_seconds": 0, **options}
    command = [sys.executable, "-m", "cortex_training.local", "serve", "--json-ready", "--execution-log", str(log_path)]
    for name, value in settings.items():
        for one in value if isinstance(value, list) else [value]:
            command += [f"--{name.replace('_', '-')}"] if one is True else [f"--{name.replace('_', '-')}", str(one)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    # Without bytecode files each process compiles transformers anew, for ten seconds.
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    with stderr_path.open("w") as stderr:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=stderr, text=True, env=environment, preexec_fn=_die_with_parent
        )
    line = _first_line(process)
    if not line:
        process.kill()
        process.wait()
        raise AssertionError(f"the service did not start:\n{stderr_path.read_text()}")
    ready = json.loads(line)
    return RunningService(ready["base_url"], Path(ready["data_dir"]), process, log_path, stderr_path, ready=ready)


def _die_with_parent() -> None:
    """A test run that is killed leaves no service behind (where the kernel can do that)."""
    if sys.platform == "linux":
        set_parent_death_signal = 1
        ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)


def _first_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        return process.stdout.readline() if selector.select(_START_S) else ""


@pytest.fixture(scope="session")
def local_service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningService]:
    """One local service for the whole session, for tests that leave it as they found it: use fresh job ids."""
    service = start_service(tmp_path_factory.mktemp("local_service"), gpus=4096)
    yield service
    service.stop()


@pytest.fixture
def start_local_service(tmp_path: Path) -> Iterator[ServiceFactory]:
    """A function that starts a service of the test's own: `start_local_service(gpus=8, assume=["…"])`.

    Options are those of `cortex-training serve`; `faults` may be a list of rules. Called again, it starts another one
    with the same data and execution log unless told otherwise, as after a crash.
    """
    started: list[RunningService] = []

    def start(**options: Any) -> RunningService:
        service = start_service(tmp_path / "service", **options)
        started.append(service)
        return service

    yield start
    for service in started:
        service.stop()
