"""Metrics of a run: one row per optimizer step, under the attempt that made it.

On a directory an attempt appends to one file, ``metrics.jsonl``. A bucket can't append: there the rows go into parts,
``metrics-<first step>.jsonl``, and a driver that is killed takes the rows of the last half minute with it (the losses
are in the journal).
"""

from __future__ import annotations

import json
import os
import time
from typing import Any, Protocol

from cortex_training.publication.store import PosixStore, Store
from cortex_training.training.root import open_existing_root

_PART_S = 30.0


class Metrics(Protocol):
    """Where the rows of an attempt go. Blocking."""

    def append(self, row: dict[str, Any]) -> None:
        """Keep a row."""

    def close(self) -> None:
        """Write what is not written yet."""


def open_metrics(store: Store, attempt: str) -> Metrics:
    folder = f"exec/{attempt}"
    if isinstance(store, PosixStore):
        return MetricsFile(store.locate(f"{folder}/metrics.jsonl"))
    return MetricsParts(store, folder)


class MetricsFile:
    """One file that grows by a line per row."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._opened = False

    def append(self, row: dict[str, Any]) -> None:
        if not self._opened:
            os.makedirs(os.path.dirname(self._path), exist_ok=True)
            self._opened = True
        # One write of one line: a reader that follows the file never sees half a row.
        with open(self._path, "a", encoding="utf-8") as file:
            file.write(_line(row))

    def close(self) -> None:
        return None


class MetricsParts:
    """Objects of a bucket, a new one every half minute."""

    def __init__(self, store: Store, folder: str) -> None:
        self._store = store
        self._folder = folder
        self._rows: list[dict[str, Any]] = []
        self._began = 0.0

    def append(self, row: dict[str, Any]) -> None:
        if not self._rows:
            self._began = time.monotonic()
        self._rows.append(row)
        if time.monotonic() - self._began > _PART_S:
            self.close()

    def close(self) -> None:
        if self._rows:
            name = f"{self._folder}/metrics-{self._rows[0]['step']:020d}-{self._rows[0]['segment']}.jsonl"
            self._store.write(name, "".join(map(_line, self._rows)).encode())
            self._rows = []


def read_metrics(root: str, credentials: str | None = None) -> list[dict[str, Any]]:
    """One row per step over all attempts of the run in `root`, in step order; a replayed step counts as its last
    attempt saw it.

    A line that a crash tore is passed over.
    """
    rows: dict[int, dict[str, Any]] = {}
    for row in _rows(open_existing_root(root, credentials)):
        known = rows.get(row["step"])
        if known is None or (row["epoch"], row["at"]) >= (known["epoch"], known["at"]):
            rows[row["step"]] = row
    return [rows[step] for step in sorted(rows)]


def _rows(store: Store) -> list[dict[str, Any]]:
    found = []
    for attempt in store.listing("exec").folders:
        for name in store.names(f"exec/{attempt}"):
            if not (name.startswith("metrics") and name.endswith(".jsonl")):
                continue
            for line in store.read(f"exec/{attempt}/{name}").splitlines():
                try:
                    row = json.loads(line)
                    found.append({**row, "step": int(row["step"]), "epoch": int(row["epoch"]), "at": float(row["at"])})
                except (ValueError, TypeError, KeyError):
                    continue
    return found


def _line(row: dict[str, Any]) -> str:
    return json.dumps(row, sort_keys=True) + "\n"
