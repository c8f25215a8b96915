"""What a person sees while an engine works: its tasks as they change, and the steps as they are made."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any


class Steps:
    """Follows the metrics files of the runs below a folder, and says every new step."""

    def __init__(self, runs: Path, steps: int, say: Callable[[str], None]) -> None:
        self._runs = runs
        self._steps = steps
        self._say = say
        self._seen: dict[Path, int] = {}

    def look(self) -> None:
        for path in sorted(self._runs.glob("*/exec/*/metrics.jsonl")):
            lines = path.read_text(encoding="utf-8").splitlines()
            for line in lines[self._seen.get(path, 0) :]:
                row: dict[str, Any] = json.loads(line)
                self._say(f"step {row['step']}/{self._steps}, loss {row['loss']:.4f}")
            self._seen[path] = len(lines)


class States:
    """Says every task's state when it changes; states that last a moment and mean nothing to a reader are left out."""

    _DULL = frozenset({None, "none", "scheduled", "queued", "removed", "PENDING", "SCHEDULED"})

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._last: dict[str, str | None] = {}

    def look(self, states: Mapping[str, str | None]) -> None:
        for task, state in states.items():
            if state not in self._DULL and self._last.get(task) != state:
                self._say(f"{task}: {state}")
                self._last[task] = state
