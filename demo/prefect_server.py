"""A Prefect server of its own for a demo or a test: its files in one folder, its port its own, nothing left when it
stops.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from types import TracebackType

from demo.processes import clean_environment, stop_group

START_TIMEOUT_S = 240.0
"""A first start runs every migration on an empty SQLite file: 20 to 30 s when nothing else runs, minutes on a machine
that does other things.
"""


class PrefectServer:
    """``prefect server start`` on a free loopback port, with `home` as its ``PREFECT_HOME``.

    The process gets a session of its own, so that stopping it reaches whatever it started in turn.

        with PrefectServer(Path("prefect-home")) as server:
            subprocess.run([sys.executable, "my_flow.py"], env=server.environment())
    """

    def __init__(self, home: Path, *, port: int | None = None) -> None:
        self.home = home.resolve()
        self.port = port or _free_port()
        self._process: subprocess.Popen[str] | None = None

    @property
    def url(self) -> str:
        """Address of the user interface and the server."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def api_url(self) -> str:
        """The value of ``PREFECT_API_URL`` for clients."""
        return f"{self.url}/api"

    @property
    def log(self) -> Path:
        """What the server printed."""
        return self.home / "server.log"

    def settings(self) -> dict[str, str]:
        """The Prefect settings of a client of this server, by their environment names."""
        return {
            "PREFECT_HOME": str(self.home),
            "PREFECT_API_URL": self.api_url,
            "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
            "PREFECT_CLOUD_ENABLE_ORCHESTRATION_TELEMETRY": "false",
            "DO_NOT_TRACK": "1",
        }

    def environment(self) -> dict[str, str]:
        """This process's environment, pointed at the server and at nothing of the user's own Prefect."""
        inherited = {name: value for name, value in clean_environment().items() if not name.startswith("PREFECT_")}
        return inherited | self.settings()

    def start(self, *, timeout_s: float = START_TIMEOUT_S, ui: bool = False) -> PrefectServer:
        """Start and wait until the server answers; raises RuntimeError with the end of its log when it does not."""
        if self._process is not None:
            raise RuntimeError(f"the Prefect server on {self.url} was started already")
        self.home.mkdir(parents=True, exist_ok=True)
        with self.log.open("a") as log:
            self._process = subprocess.Popen(
                self._command(ui),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                text=True,
                # Its own API address would make the server talk to itself through settings meant for clients. The pages
                # of the user interface need it, or they look for the server on the default port.
                env={name: value for name, value in self.environment().items() if name != "PREFECT_API_URL"}
                | {"PREFECT_SERVER_UI_API_URL": self.api_url},
                start_new_session=True,
            )
        try:
            self._wait_until_healthy(time.monotonic() + timeout_s, timeout_s)
        except BaseException:
            self.stop()
            raise
        return self

    def stop(self) -> None:
        """End the server and everything it started; harmless when it does not run."""
        process, self._process = self._process, None
        if process is not None:
            stop_group(process)

    def kill(self) -> None:
        """End the server and everything it started as a crash would; `start` brings it back with what it had stored."""
        process, self._process = self._process, None
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def __enter__(self) -> PrefectServer:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _command(self, ui: bool) -> list[str]:
        arguments = ["server", "start", "--host", "127.0.0.1", "--port", str(self.port)]
        return [sys.executable, "-m", "prefect", *arguments, "--ui" if ui else "--no-ui"]

    def _wait_until_healthy(self, deadline: float, timeout_s: float) -> None:
        assert self._process is not None
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                raise RuntimeError(
                    f"the Prefect server ended with status {self._process.returncode} before it answered on "
                    f"{self.url}; the end of {self.log}:\n{self._end_of_log()}"
                )
            if self._is_healthy():
                return
            time.sleep(0.2)
        raise RuntimeError(
            f"the Prefect server did not answer on {self.url} within {timeout_s:.0f} s; "
            f"the end of {self.log}:\n{self._end_of_log()}"
        )

    def _is_healthy(self) -> bool:
        # Not through the environment's proxy: the server is on this machine.
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(f"{self.api_url}/health", timeout=2) as reply:
                return bool(reply.status == 200)
        except (urllib.error.URLError, OSError):
            return False

    def _end_of_log(self) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-20:])


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
