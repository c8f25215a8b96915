"""What the demo shows at its end: a plot of the loss, and one screen of numbers, samples and places to look."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from demo.heldout import Comparison

REQUIRED_FALL = 0.10
REQUIRED_STANDARD_ERRORS = 3.0
"""A demo whose held-out loss falls by less, in relation to what it was or to its error, has not shown that anything
was learned."""

_TRAINING, _HELD_OUT, _MUTED, _GRID = "#2563eb", "#c2410c", "#52525b", "#e4e4e7"
_SAMPLE_CHARACTERS = 220


@dataclass(frozen=True)
class StepLoss:
    """The training loss of one optimizer step, in nats a token, over the batches of that step before it was taken."""

    step: int
    loss: float


@dataclass(frozen=True)
class Sample:
    """One prompt and its greedy completion before and after; `wanted` is what the row says."""

    prompt: str
    wanted: str
    before: str
    after: str


@dataclass(frozen=True)
class Facts:
    """Everything the report says. `look_at` holds pairs of a name and an address, path or command."""

    engine: str
    model: str
    rows: int
    losses: Sequence[StepLoss]
    held_out: Comparison
    samples: Sequence[Sample]
    entry: str
    gpu_seconds: float
    worker_slot_s: float | None
    seconds: float
    plot: Path
    look_at: Sequence[tuple[str, str]] = ()


def shortfall(held_out: Comparison) -> str | None:
    """Why the held-out result is not good enough, or None when it is."""
    change = held_out.relative_change
    if change > -REQUIRED_FALL:
        moved = f"fell by {-change:.1%}" if change < 0 else f"rose by {change:.1%}"
        return f"held-out loss {moved}; it has to fall by {REQUIRED_FALL:.0%} or more"
    if held_out.standard_errors <= REQUIRED_STANDARD_ERRORS:
        return (
            f"held-out loss fell by {held_out.standard_errors:.2f} standard errors; more than "
            f"{REQUIRED_STANDARD_ERRORS:.0f} are required"
        )
    return None


def draw_losses(facts: Facts) -> Path:
    """Draw the training loss by step, with the held-out loss before and after, into the PNG `facts.plot`."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib.figure import Figure

    steps = [point.step for point in facts.losses]
    losses = [point.loss for point in facts.losses]
    held_out = facts.held_out
    figure = Figure(figsize=(8, 4.5), dpi=144, layout="constrained")
    axes: Any = figure.subplots()
    axes.plot(steps, losses, color=_TRAINING, linewidth=1.8, label="training, each step")
    axes.plot(
        [0, steps[-1]],
        [held_out.before, held_out.after],
        color=_HELD_OUT,
        linestyle="none",
        marker="o",
        markersize=6,
        label=f"held out, {held_out.rows} rows, before and after",
    )
    end_above = held_out.after >= losses[-1]
    for x, y, color, offset in (
        (steps[0], losses[0], _TRAINING, (8, 2)),
        (0, held_out.before, _HELD_OUT, (-34, -4)),
        (steps[-1], losses[-1], _TRAINING, (8, -13 if end_above else 4)),
        (steps[-1], held_out.after, _HELD_OUT, (8, 4 if end_above else -13)),
    ):
        axes.annotate(f"{y:.2f}", (x, y), xytext=offset, textcoords="offset points", color=color)
    axes.set_xlim(-0.07 * steps[-1], steps[-1] * 1.07)
    axes.set_ylim(0, 1.12 * max(*losses, held_out.before, held_out.after))
    axes.set_xlabel("optimizer step", color=_MUTED)
    axes.set_ylabel("loss, nats per token", color=_MUTED)
    axes.set_title(
        f"{facts.model}: held-out loss {held_out.relative_change:+.0%} in {steps[-1]} steps", loc="left", fontsize=13
    )
    axes.grid(axis="y", color=_GRID)
    axes.set_axisbelow(True)
    axes.tick_params(colors=_MUTED, length=0)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.legend(frameon=False, loc="upper right", labelcolor=_MUTED)
    facts.plot.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(facts.plot)
    return facts.plot


def print_summary(facts: Facts, console: Console | None = None) -> None:
    """Print the closing screen."""
    (console or Console()).print(
        Panel(
            Group(_numbers(facts), "", *_samples(facts.samples), _places(facts)),
            title=f"[bold]{facts.model}, fine-tuned by {facts.engine} in {_duration(facts.seconds)}",
            border_style="green" if shortfall(facts.held_out) is None else "red",
            padding=(0, 2),
        )
    )


def _numbers(facts: Facts) -> Table:
    first, last = facts.losses[0], facts.losses[-1]
    held_out = facts.held_out
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("loss, nats per token")
    table.add_column("before", justify="right")
    table.add_column("after", justify="right")
    table.add_column("change", justify="right")
    table.add_column("")
    table.add_row(
        f"training, step {first.step} → {last.step}",
        f"{first.loss:.3f}",
        f"{last.loss:.3f}",
        f"{(last.loss - first.loss) / first.loss:+.1%}",
        "",
    )
    problem = shortfall(held_out)
    table.add_row(
        f"held out, {held_out.rows} rows",
        f"{held_out.before:.3f}",
        f"{held_out.after:.3f}",
        f"{held_out.relative_change:+.1%}",
        f"{held_out.difference:+.3f} ± {held_out.standard_error:.3f}, {held_out.standard_errors:.0f} standard errors",
        style="bold green" if problem is None else "bold red",
    )
    if problem is not None:
        table.add_row("", "", "", "", problem, style="red")
    return table


def _samples(samples: Sequence[Sample]) -> list[RenderableType]:
    shown: list[RenderableType] = []
    for sample in samples:
        grid = Table.grid(padding=(0, 2, 0, 0))
        grid.add_column(style="dim", no_wrap=True)
        grid.add_column(overflow="fold")
        grid.add_row("prompt", Text(_shortened(sample.prompt), style="cyan"))
        grid.add_row("before", Text(_shortened(sample.before)))
        grid.add_row("after", Text(_shortened(sample.after), style="bold"))
        grid.add_row("docstring", Text(_shortened(sample.wanted), style="dim"))
        shown += [grid, ""]
    return shown


def _places(facts: Facts) -> Table:
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(overflow="fold")
    grid.add_row("trained on", f"{facts.rows:,} rows")
    grid.add_row("published", Text(facts.entry))
    grid.add_row("GPU-seconds", f"{facts.gpu_seconds:.1f}, counted by the service")
    if facts.worker_slot_s is not None:
        grid.add_row("worker slots", f"{facts.worker_slot_s:.1f} s held by {facts.engine}")
    grid.add_row("loss plot", Text(str(facts.plot)))
    for name, place in facts.look_at:
        grid.add_row(name, Text(place))
    return grid


def _shortened(text: str) -> str:
    """One line of at most 220 characters; a model that repeats itself fills the screen otherwise."""
    line = " ".join(text.split()) or "(nothing)"
    return line if len(line) <= _SAMPLE_CHARACTERS else line[: _SAMPLE_CHARACTERS - 1] + "…"


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"
