"""A loss curve as SVG text: a picture that needs no plotting library and is a few kilobytes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any
from xml.sax.saxutils import escape

_WIDTH, _HEIGHT = 960, 540
_LEFT, _RIGHT, _TOP, _BOTTOM = 80, 24, 48, 56
_POINTS = 600
_TICKS = 5
_FONT = 'font-family="sans-serif" font-size="15" fill="#333"'


def loss_chart(rows: Sequence[Mapping[str, Any]], title: str) -> str:
    """Draw the `loss` of every row over its `step`; rows are those of `cortex_training.training.metrics.read_metrics`.

    Of a long run the mean of neighbouring steps is drawn. Raises ValueError when no row has a finite loss.
    """
    points = [(float(row["step"]), float(row["loss"])) for row in rows if _is_finite(row.get("loss"))]
    if not points:
        raise ValueError("no row has a finite loss")
    points = _thinned(points)
    steps, losses = [x for x, _ in points], [y for _, y in points]
    low, high = _range(losses)
    first, last = min(steps), max(max(steps), min(steps) + 1.0)

    def x(step: float) -> float:
        return _LEFT + (step - first) / (last - first) * (_WIDTH - _LEFT - _RIGHT)

    def y(loss: float) -> float:
        return _TOP + (high - loss) / (high - low) * (_HEIGHT - _TOP - _BOTTOM)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" '
        f'height="{_HEIGHT}">',
        '<rect width="100%" height="100%" fill="#fff"/>',
        f'<text x="{_LEFT}" y="30" {_FONT} font-weight="bold">{escape(title)}</text>',
    ]
    for loss in _round_values(low, high):
        parts.append(f'<path d="M{_LEFT} {y(loss):.1f}H{_WIDTH - _RIGHT}" stroke="#ddd"/>')
        parts.append(f'<text x="{_LEFT - 8}" y="{y(loss) + 5:.1f}" {_FONT} text-anchor="end">{loss:.4g}</text>')
    for step in _round_values(first, last):
        if step == int(step):
            place = f'x="{x(step):.1f}" y="{_HEIGHT - _BOTTOM + 24}"'
            parts.append(f'<text {place} {_FONT} text-anchor="middle">{int(step)}</text>')
    parts.append(f'<text x="{_WIDTH / 2:.0f}" y="{_HEIGHT - 10}" {_FONT} text-anchor="middle">optimizer step</text>')
    line = " ".join(f"{x(step):.1f},{y(loss):.1f}" for step, loss in points)
    parts.append(f'<polyline points="{line}" fill="none" stroke="#1f6feb" stroke-width="2"/>')
    parts.append(f'<circle cx="{x(steps[-1]):.1f}" cy="{y(losses[-1]):.1f}" r="4" fill="#1f6feb"/>')
    return "".join([*parts, "</svg>"])


def _is_finite(loss: Any) -> bool:
    return isinstance(loss, int | float) and math.isfinite(loss)


def _thinned(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    size = math.ceil(len(points) / _POINTS)
    groups = [points[start : start + size] for start in range(0, len(points), size)]
    return [(sum(x for x, _ in group) / len(group), sum(y for _, y in group) / len(group)) for group in groups]


def _round_values(low: float, high: float) -> list[float]:
    """Some round numbers between two, a step of 1, 2 or 5 times a power of ten apart."""
    wanted = (high - low) / _TICKS
    power = 10.0 ** math.floor(math.log10(wanted))
    apart = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= wanted)
    return [number * apart for number in range(math.ceil(low / apart), math.floor(high / apart) + 1)]


def _range(losses: list[float]) -> tuple[float, float]:
    """Lowest and highest value of the axis, with some air; never equal."""
    low, high = min(losses), max(losses)
    air = (high - low) * 0.05 or max(abs(high) * 0.05, 0.5)
    return low - air, high + air
