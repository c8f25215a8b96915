"""A PostgreSQL server of its own for the live tests, from the binaries that a Debian package leaves on a machine."""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

BINARIES = Path(os.environ.get("POSTGRES_BIN", "/usr/lib/postgresql/15/bin"))
_START_S, _STOP_S = 60.0, 30.0


@contextlib.contextmanager
def postgres(folder: Path) -> Iterator[str]:
    """Serve an empty database on a free loopback port while the context is open; gives its SQLAlchemy URL.

    PostgreSQL refuses to run as root; there it runs as the user ``postgres``, who must exist and reach `folder`.
    """
    data = folder / "data"
    data.mkdir(parents=True)
    user = _unprivileged(data)
    port = _free_port()
    _run(["initdb", "-D", str(data), "-U", "airflow", "--auth=trust", "--encoding=UTF8", "--no-sync"], user)
    with open(folder / "postgres.log", "wb") as log:
        server = subprocess.Popen(
            # Durability of the database itself is not what is tried here.
            [BINARIES / "postgres", "-D", data, "-p", str(port), "-h", "127.0.0.1", "-k", "", "-c", "fsync=off"],
            stdout=log,
            stderr=log,
            user=user,
            cwd="/",
        )
    try:
        _wait_until_ready(server, port, folder / "postgres.log")
        _run(["createdb", "-h", "127.0.0.1", "-p", str(port), "-U", "airflow", "airflow"], user)
        yield f"postgresql+psycopg2://airflow@127.0.0.1:{port}/airflow"
    finally:
        # Fast shutdown: sessions are ended, not waited for.
        server.send_signal(signal.SIGINT)
        try:
            server.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()


def _unprivileged(data: Path) -> str | None:
    if os.getuid() != 0:
        return None
    owner = pwd.getpwnam("postgres")
    for folder in data.parents:
        # pytest's folders are closed to other users; the server has to pass through them.
        if folder.stat().st_uid == 0 and folder.is_relative_to(Path(os.environ.get("TMPDIR", "/tmp"))):
            folder.chmod(folder.stat().st_mode | 0o011)
    shutil.chown(data, owner.pw_uid, owner.pw_gid)
    return "postgres"


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
