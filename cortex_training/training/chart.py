"""The loss of a run as a picture, from the metrics that its attempts left."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from cortex_training.errors import ConfigurationError


def read_metrics(root: str) -> list[dict[str, Any]]:
    """One row per step over all attempts, in step order; a replayed step counts as its last attempt saw it."""
    rows: dict[int, dict[str, Any]] = {}
    for path in Path(root).glob("exec/*/metrics.jsonl"):
        for line in path.read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            if row["step"] not in rows or row["epoch"] >= rows[row["step"]]["epoch"]:
                rows[row["step"]] = row
    return [rows[step] for step in sorted(rows)]


def draw_losses(root: str, out: str) -> str:
    """Write the loss curve of the run in `root` as a PNG; needs the extra ``plot``. Returns the path."""
    rows = read_metrics(root)
    if not rows:
        raise ConfigurationError.of("root", root, "no step of a run has been measured there yet")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), dpi=120, layout="constrained")
    axes = figure.subplots()
    axes.plot([r["step"] for r in rows], [r["loss"] for r in rows], linewidth=1.5)
    axes.set_xlabel("optimizer step")
    axes.set_ylabel("mean loss of the step's batches (nats per token)")
    axes.set_title(f"{Path(root).name}: {rows[0]['loss']:.3f} → {rows[-1]['loss']:.3f}")
    axes.grid(alpha=0.3)
    figure.savefig(out)
    return out
