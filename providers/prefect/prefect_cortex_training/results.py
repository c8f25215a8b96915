"""What a flow run shows when a training run is done: its steps as a table, its losses as a picture."""

from __future__ import annotations

import asyncio
import base64
import json
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from prefect_cortex_training.artifacts import KeptArtifact
from prefect_cortex_training.labels import RunLabels, root_digest
from prefect_cortex_training.loss_chart import loss_chart

TABLE_ROWS = 50
SHOW_S = 20.0
_COLUMNS = {
    "step": "step",
    "loss": "loss",
    "learning_rate": "learning rate",
    "tokens": "tokens",
    "seconds": "seconds",
    "remote_s": "remote seconds",
    "segment": "segment",
}


async def show_results(
    labels: RunLabels,
    root: str,
    root_credentials: str | None,
    result: Mapping[str, Any],
    logger: logging.Logger | logging.LoggerAdapter[Any],
) -> None:
    """Make the two artifacts from what the run in `root` measured, or update them; `result` is the training's. Showing
    may fail; what was trained stays trained.
    """
    from cortex_training.training.metrics import read_metrics

    try:
        async with asyncio.timeout(SHOW_S):
            rows = await asyncio.to_thread(read_metrics, root, root_credentials)
            if not rows:
                return
            name = root.rstrip("/").rpartition("/")[2]
            digest = root_digest(root)
            table = KeptArtifact(labels, f"training-{digest}-steps", "table")
            await table.show(json.dumps(steps_table(rows)), f"Steps of {name}{_which(rows)}")
            page = KeptArtifact(labels, f"training-{digest}-loss", "markdown")
            await page.show(loss_page(name, rows, result), f"Loss of {name}, {len(rows)} steps")
    except Exception as error:
        logger.warning("the results of %s could not be shown: %s: %s", root, type(error).__name__, error)


def steps_table(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """At most 50 of the rows, evenly, the first and the last among them."""
    if len(rows) > TABLE_ROWS:
        rows = [rows[round(number * (len(rows) - 1) / (TABLE_ROWS - 1))] for number in range(TABLE_ROWS)]
    return [{shown: _short(row[name]) for name, shown in _COLUMNS.items() if row.get(name) is not None} for row in rows]


def loss_page(name: str, rows: Sequence[Mapping[str, Any]], result: Mapping[str, Any]) -> str:
    """Markdown: ids of what came out, and the loss curve.

    The picture is in the page, as its own address: an image artifact is an address that somebody has to serve.
    """
    facts = ("job_id", "checkpoint_id", "global_steps", "segments", "epoch")
    lines = [f"| {fact} | `{result[fact]}` |" for fact in facts if result.get(fact) is not None]
    picture = base64.b64encode(loss_chart(rows, _title(name, rows)).encode()).decode()
    return "\n".join(["| | |", "| --- | --- |", *lines, "", f"![loss](data:image/svg+xml;base64,{picture})", ""])


def _short(value: Any) -> Any:
    return float(f"{value:.6g}") if isinstance(value, float) else value


def _which(rows: Sequence[Mapping[str, Any]]) -> str:
    return f", {TABLE_ROWS} of {len(rows)}" if len(rows) > TABLE_ROWS else ""


def _title(name: str, rows: Sequence[Mapping[str, Any]]) -> str:
    losses = [row["loss"] for row in rows if "loss" in row]
    return f"{name}: loss {losses[0]:.4g} → {losses[-1]:.4g}" if losses else name
