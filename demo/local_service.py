"""The local service as a process of its own, started and stopped by the demo."""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cortex_training.cli.serve import TOKEN_VARIABLE
from cortex_training.local.control_client import ServiceControl
from demo.processes import clean_environment, stop_group


class LocalService:
    """``cortex-training serve`` on a free loopback port, with its data and execution log in `folder`.

    It accepts one random token, so that a pipeline that loses its credential fails as it would at the real service.
    """

    def __init__(
        self,
        folder: Path,
        *,
        threads: int = 2,
        faults: Sequence[Mapping[str, Any]] | None = None,
        simulate: str | None = None,
    ) -> None:
        """`faults` are rules of bad weather, and, even when there are none, give the service a `control`;
        `simulate` is how long its operations take, without a model.
        """
        self.folder = folder
        self.threads = threads
        self.faults = faults
        self.simulate = simulate
        self._ready: dict[str, Any] = {}
        self.base_url = ""
        self.token = secrets.token_hex(24)
        self._process: subprocess.Popen[str] | None = None

    @property
    def pid(self) -> int:
        if self._process is None:
            raise RuntimeError("the local service is not running")
        return self._process.pid

    def start(self) -> LocalService:
        self.folder.mkdir(parents=True, exist_ok=True)
        with open(self.folder / "service.log", "w") as log:
            self._process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "cortex_training.local", "serve", "--port", "0", "--json-ready"),
                    *("--threads", str(self.threads), "--data-dir", str(self.folder / "data")),
                    *("--execution-log", str(self.folder / "execution.jsonl")),
                    *self._weather_options(),
                ],
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=clean_environment() | {"OMP_NUM_THREADS": str(self.threads), TOKEN_VARIABLE: self.token},
                start_new_session=True,
            )
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            said = (self.folder / "service.log").read_text()[-2000:]
            raise RuntimeError(f"the local service did not start:\n{said}")
        self._ready = json.loads(line)
        self.base_url = self._ready["base_url"]
        return self

    @property
    def control(self) -> ServiceControl:
        """Raises ControlError without `faults`."""
        return ServiceControl.of(self._ready)

    def _weather_options(self) -> list[str]:
        options = [] if self.simulate is None else ["--simulate", self.simulate]
        if self.faults is not None:
            path = self.folder / "faults.json"
            path.write_text(json.dumps({"rules": list(self.faults)}))
            options += ["--faults", str(path)]
        return options

    def execution_log(self) -> list[dict[str, Any]]:
        """What was really executed, one record per operation."""
        path = self.folder / "execution.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def stop(self) -> None:
        if self._process is not None and self._process.poll() is None:
            os.kill(self._process.pid, signal.SIGTERM)
            stop_group(self._process)
        self._process = None
