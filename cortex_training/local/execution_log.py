"""One JSON line for each operation that was really executed: what tests compare a client's story with."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any


class ExecutionLog:
    """Appends lines to a file; without a path it remembers nothing."""

    def __init__(self, path: Path | None) -> None:
        self._descriptor: int | None = None
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)

    def record(self, entry: dict[str, Any]) -> None:
        """One write a line: a service killed at any moment leaves whole lines, at most the last one torn."""
        if self._descriptor is not None:
            line = json.dumps({**entry, "time": time.time()}) + "\n"
            os.write(self._descriptor, line.encode())

    def close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
