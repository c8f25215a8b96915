"""A Snowflake-compatible server on this machine: fakesnow behind TLS, for the real connector and the unmodified hook.

``python -m demo.snowflake_server --dir D --port P`` serves until it is stopped; port 0 takes a free one.
`SnowflakeServer` runs that as a process of its own. Databases live in the server's memory, shared by every connection
of every process, and end with it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from cortex_training.local.tls import tls_files
from demo.processes import clean_environment
from demo.recipes import DATABASE, SCHEMA

HOST = "127.0.0.1"

_READY_S = 60.0
_STOP_S = 10.0


class SnowflakeServer:
    """The server as a child process; use it as a context manager, or call `start` and `stop`.

    The connector takes the certificates it trusts from the environment alone, so while the server runs
    ``REQUESTS_CA_BUNDLE`` of this process, and of processes it starts, names a bundle of the usual certificates and
    the server's own.
    """

    host = HOST

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.port = 0
        self._process: subprocess.Popen[str] | None = None
        self._trusted_before: str | None = None

    @property
    def ca_bundle(self) -> Path:
        return self.folder / "ca-bundle.pem"

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    def start(self) -> SnowflakeServer:
        """Start and wait until connections are accepted. Raises RuntimeError with the server's last words if it ends
        before."""
        self.folder.mkdir(parents=True, exist_ok=True)
        log = self.folder / "snowflake-server.log"
        command = [sys.executable, "-m", "demo.snowflake_server", "--dir", str(self.folder), "--port", "0"]
        with log.open("w") as errors:
            self._process = subprocess.Popen(
                # The child ends when its standard input does, so that it never outlives a demo that was killed.
                [*command, "--until-stdin-closes"],
                cwd=Path(__file__).parents[1],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env=clean_environment(),
            )
        ready = _first_line(self._process, _READY_S)
        if not ready:
            self.stop()
            raise RuntimeError(f"the Snowflake-compatible server did not start; {log} ends: {log.read_text()[-2000:]}")
        self.port = int(json.loads(ready)["port"])
        self._trusted_before = os.environ.get("REQUESTS_CA_BUNDLE")
        os.environ["REQUESTS_CA_BUNDLE"] = str(self.ca_bundle)
        return self

    def stop(self) -> None:
        if self._process is None:
            return
        process, self._process = self._process, None
        process.terminate()
        try:
            process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()
        if os.environ.get("REQUESTS_CA_BUNDLE") == str(self.ca_bundle):
            if self._trusted_before is None:
                del os.environ["REQUESTS_CA_BUNDLE"]
            else:
                os.environ["REQUESTS_CA_BUNDLE"] = self._trusted_before

    def __enter__(self) -> SnowflakeServer:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def connection_arguments(self, database: str = DATABASE, schema: str = SCHEMA) -> dict[str, Any]:
        """Keyword arguments of ``snowflake.connector.connect``; also of prefect-snowflake's ``get_client``."""
        return {
            "user": "demo",
            "password": "demo",
            "account": "local",
            "host": self.host,
            "port": self.port,
            "database": database,
            "schema": schema,
            # No revocation check: the certificate was made a moment ago and no authority stands behind it.
            "insecure_mode": True,
        }

    def connect(self, database: str = DATABASE, schema: str = SCHEMA) -> Any:
        """A connection of the real Snowflake connector; database and schema are created if need be."""
        import snowflake.connector

        return snowflake.connector.connect(**self.connection_arguments(database, schema))

    def airflow_connection_json(self, database: str = DATABASE, schema: str = SCHEMA) -> str:
        """The value of an ``AIRFLOW_CONN_…`` variable for the Snowflake provider's hook."""
        arguments = self.connection_arguments(database, schema)
        extra = {name: arguments[name] for name in ("account", "database", "host", "port", "insecure_mode")}
        return json.dumps(
            {
                "conn_type": "snowflake",
                "login": arguments["user"],
                "password": arguments["password"],
                "schema": schema,
                "extra": extra,
            }
        )


def _first_line(process: subprocess.Popen[str], timeout_s: float) -> str:
    """The first line the process writes, or "" if it ends, or is silent for `timeout_s` seconds."""
    stdout = process.stdout
    assert stdout is not None
    lines: list[str] = []
    reader = threading.Thread(target=lambda: lines.append(stdout.readline()), daemon=True)
    reader.start()
    reader.join(timeout_s)
    return lines[0] if lines else ""


async def _serve(folder: Path, port: int, until_stdin_closes: bool) -> None:
    import uvicorn
    from fakesnow.server import app

    from cortex_training.local.snowflake_sql import keep_variables_out_of_text

    keep_variables_out_of_text()
    tls = tls_files(folder, HOST)
    listener = socket.create_server((HOST, port))
    server = uvicorn.Server(
        uvicorn.Config(
            app,
            ssl_keyfile=tls.key,
            ssl_certfile=tls.certificate,
            log_level="warning",
            lifespan="off",
            # The connector keeps connections open; a stop must not wait for them.
            timeout_graceful_shutdown=1,
        )
    )
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    while not server.started and not serving.done():  # noqa: ASYNC110, uvicorn has a flag and no event
        await asyncio.sleep(0.02)
    if server.started:
        print(json.dumps({"ready": True, "host": HOST, "port": listener.getsockname()[1]}), flush=True)
    if until_stdin_closes:
        threading.Thread(target=_stop_at_end_of, args=(sys.stdin, server), daemon=True).start()
    await serving


def _stop_at_end_of(stream: IO[str], server: Any) -> None:
    stream.read()
    server.should_exit = True


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m demo.snowflake_server", description=__doc__)
    parser.add_argument("--dir", type=Path, required=True, help="folder for the certificate and the CA bundle")
    parser.add_argument("--port", type=int, default=0, help="0 (the default) takes a free port")
    parser.add_argument(
        "--until-stdin-closes",
        action="store_true",
        help="end when standard input does, as when the parent process dies",
    )
    options = parser.parse_args(arguments)
    options.dir.mkdir(parents=True, exist_ok=True)
    asyncio.run(_serve(options.dir, options.port, options.until_stdin_closes))


if __name__ == "__main__":
    main()
