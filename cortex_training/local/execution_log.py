"""One JSON line for each operation that was really executed: what tests compare a client's story with."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

_PAGE_BYTES = 1024 * 1024


class ExecutionLog:
    """Appends lines to a file; without a path it remembers nothing."""

    def __init__(self, path: Path | None) -> None:
        self._descriptor: int | None = None
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o600)

    def record(self, entry: dict[str, Any]) -> None:
        """One write a line: a service killed at any moment leaves whole lines, at most the last one torn."""
        if self._descriptor is not None:
            line = json.dumps({**entry, "time": time.time()}) + "\n"
            os.write(self._descriptor, line.encode())

    def read(self, offset: int) -> tuple[list[dict[str, Any]], int]:
        """Entries from a byte `offset` on, 1 MiB of them at most, and the offset after them."""
        if self._descriptor is None:
            return [], offset
        lines = os.pread(self._descriptor, _PAGE_BYTES, offset).rpartition(b"\n")[0]
        if not lines:
            return [], offset
        return [json.loads(line) for line in lines.split(b"\n") if _is_whole(line)], offset + len(lines) + 1

    def close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def _is_whole(line: bytes) -> bool:
    """False for a line that a killed service left torn, and for an offset in the middle of one."""
    try:
        return isinstance(json.loads(line), dict)
    except ValueError:
        return False
