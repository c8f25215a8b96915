"""A PostgreSQL server of its own for the live tests, from the binaries that a Debian package leaves on a machine."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

BINARIES = Path(os.environ.get("POSTGRES_BIN", "/usr/lib/postgresql/15/bin"))
_START_S, _STOP_S = 60.0, 30.0


@contextlib.contextmanager
def postgres() -> Iterator[str]:
    """Serve an empty database on a free loopback port while the context is open; gives its SQLAlchemy URL.

    PostgreSQL refuses to run as root; there it runs as the user ``postgres``, who must exist. Its folder is none of
    pytest's, which are closed to other users again by every session that starts.
    """
    user = "postgres" if os.getuid() == 0 else None
    with tempfile.TemporaryDirectory(prefix="live-postgres-") as name:
        folder = Path(name)
        if user is not None:
            shutil.chown(folder, user)
        with _server(folder, user) as port:
            _run(["createdb", "-h", "127.0.0.1", "-p", str(port), "-U", "airflow", "airflow"], user)
            yield f"postgresql+psycopg2://airflow@127.0.0.1:{port}/airflow"


@contextlib.contextmanager
def _server(folder: Path, user: str | None) -> Iterator[int]:
    data, log_path, port = folder / "data", folder / "postgres.log", _free_port()
    _run(["initdb", "-D", str(data), "-U", "airflow", "--auth=trust", "--encoding=UTF8", "--no-sync"], user)
    with open(log_path, "wb") as log:
        server = subprocess.Popen(
            # Durability of the database itself is not what is tried here.
            [BINARIES / "postgres", "-D", data, "-p", str(port), "-h", "127.0.0.1", "-k", "", "-c", "fsync=off"],
            stdout=log,
            stderr=log,
            user=user,
            cwd="/",
        )
    try:
        _wait_until_ready(server, port, log_path)
        yield port
    finally:
        # Fast shutdown: sessions are ended, not waited for.
        server.send_signal(signal.SIGINT)
        try:
            server.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()


def _run(command: list[str], user: str | None) -> None:
    done = subprocess.run(
        [BINARIES / command[0], *command[1:]], user=user, cwd="/", capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}: {done.stdout}{done.stderr}")


def _wait_until_ready(server: subprocess.Popen[bytes], port: int, log: Path) -> None:
    deadline = time.monotonic() + _START_S
    while subprocess.run([BINARIES / "pg_isready", "-q", "-h", "127.0.0.1", "-p", str(port)], check=False).returncode:
        if server.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"PostgreSQL does not answer: {log.read_text(errors='replace')[-2000:]}")
        time.sleep(0.2)


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])
