"""Drivers that begin in a moment: real processes, forked from one that has imported everything already.

Importing costs more CPU than the rest of a short driver's life. A nursery imports once and then does nothing but fork,
in a single thread, so its children are what a fresh interpreter would be at that point: processes with a pid, signals,
limits and an exit status of their own. Each nursery has one child at a time.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

_REPOSITORY = Path(__file__).parents[2]
_MOST_BYTES = 65536
_idle: list[_Nursery] = []


class _Nursery:
    """A process that forks drivers when it is told to; it ends when its socket is closed, and so with this process."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        environment = {**os.environ, "PYTHONPATH": str(_REPOSITORY), "NURSERY": str(theirs.fileno())}
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.faults.nursery"],
            pass_fds=[theirs.fileno()],
            env=environment,
            cwd=_REPOSITORY,
            stdin=subprocess.DEVNULL,
        )
        theirs.close()
        self.socket = ours

    def tell(self, order: dict[str, object], descriptors: list[int]) -> None:
        socket.send_fds(self.socket, [json.dumps(order).encode()], descriptors)

    def hear(self) -> int | None:
        """The next number it says; None when it is gone."""
        said = self.socket.recv(_MOST_BYTES)
        return int(said) if said else None


class Child:
    """A driver's process, with the part of `subprocess.Popen` that the suite uses."""

    def __init__(self, arguments: list[str], environment: dict[str, str]) -> None:
        self._nursery = _idle.pop() if _idle else _Nursery()
        self._texts = ["", ""]
        pipes = [os.pipe(), os.pipe()]
        self._nursery.tell({"arguments": arguments, "environment": environment}, [write for _, write in pipes])
        for _, write in pipes:
            os.close(write)
        pid = self._nursery.hear()
        if pid is None:
            raise RuntimeError(f"the nursery ended with {self._nursery.process.wait()} before it had a child")
        self.pid = pid
        self.returncode: int | None = None
        self._threads = [
            *(threading.Thread(target=self._read, args=(n, read), daemon=True) for n, (read, _) in enumerate(pipes)),
            threading.Thread(target=self._reap, daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def _read(self, number: int, descriptor: int) -> None:
        with open(descriptor, encoding="utf-8", errors="replace") as pipe:
            self._texts[number] = pipe.read()

    def _reap(self) -> None:
        code = self._nursery.hear()
        self.returncode = code if code is not None else -signal.SIGKILL
        if code is not None:
            _idle.append(self._nursery)

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Raises `subprocess.TimeoutExpired`."""
        self._threads[-1].join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired("driver", timeout or 0.0)
        return self.returncode

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """What it wrote to stdout and stderr, once it has ended. Raises `subprocess.TimeoutExpired`."""
        self.wait(timeout)
        for thread in self._threads:
            thread.join()
        return self._texts[0], self._texts[1]

    def send_signal(self, number: int) -> None:
        if self.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def is_frozen(self) -> bool:
        """Whether it was stopped by SIGSTOP and not woken yet."""
        try:
            return Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
        except (FileNotFoundError, ProcessLookupError):
            return False

    def wait_until_frozen(self, timeout_s: float) -> bool:
        """False when it ended instead. Raises `subprocess.TimeoutExpired`."""
        until = time.monotonic() + timeout_s
        while time.monotonic() < until:
            if self.is_frozen():
                return True
            if self.returncode is not None:
                return False
            time.sleep(0.01)
        raise subprocess.TimeoutExpired("driver", timeout_s)


def _fork_when_told(ours: socket.socket) -> int:
    """In the nursery: an order, a child, its pid, and when it ended its exit code. Returns only in a child."""
    while True:
        told, descriptors, _, _ = socket.recv_fds(ours, _MOST_BYTES, 2)
        if not told:
            os._exit(0)
        order = json.loads(told)
        pid = os.fork()
        if pid == 0:
            ours.close()
            for target, descriptor in enumerate(descriptors, start=1):
                os.dup2(descriptor, target)
                os.close(descriptor)
            os.environ.update(order["environment"])
            sys.argv = order["arguments"]
            return 0
        for descriptor in descriptors:
            os.close(descriptor)
        ours.send(str(pid).encode())
        ours.send(str(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])).encode())


def main() -> int:
    # What `train` imports on its way; a child that needs more imports it itself.
    for name in (
        "cortex_training.aio",
        "cortex_training.cli",
        "cortex_training.training.loop",
        "numpy.ma",
        "tests.faults.mistakes",
    ):
        importlib.import_module(name)
    from tests.faults import driver

    if threading.active_count() != 1:
        raise RuntimeError("an import started a thread, which a fork would lose")
    # A child's collector would go through everything imported and copy every page of it, which is up to half its CPU.
    gc.freeze()
    _fork_when_told(socket.socket(fileno=int(os.environ.pop("NURSERY"))))
    return driver.main()


if __name__ == "__main__":
    sys.exit(main())
