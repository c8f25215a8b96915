"""The loss of a run as a picture, from the metrics that its attempts left."""

from __future__ import annotations

from cortex_training.errors import ConfigurationError
from cortex_training.training.metrics import read_metrics


def draw_losses(root: str, out: str, credentials: str | None = None) -> str:
    """Write the loss curve of the run in `root` as a PNG; needs the extra ``plot``. Returns the path."""
    rows = [row for row in read_metrics(root, credentials) if "loss" in row]
    if not rows:
        raise ConfigurationError.of("root", root, "no step of a run has been measured there yet")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), dpi=120, layout="constrained")
    axes = figure.subplots()
    axes.plot([r["step"] for r in rows], [r["loss"] for r in rows], linewidth=1.5)
    axes.set_xlabel("optimizer step")
    axes.set_ylabel("mean loss of the step's batches (nats per token)")
    axes.set_title(f"{root.rstrip('/').rpartition('/')[2]}: {rows[0]['loss']:.3f} → {rows[-1]['loss']:.3f}")
    axes.grid(alpha=0.3)
    figure.savefig(out)
    return out
