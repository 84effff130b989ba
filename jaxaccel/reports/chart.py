"""Line charts as inline SVG, without a plotting library."""

from __future__ import annotations

import dataclasses
import html
import math
from collections.abc import Sequence


WIDTH, HEIGHT = 560, 280
_LEFT, _RIGHT, _TOP, _BOTTOM = 62, 14, 14, 36
_MOST_POINTS = 400
NUM_COLOURS = 6


@dataclasses.dataclass(frozen=True, kw_only=True)
class Line:
    """One curve.

    Attributes:
      label: shown in the legend and on hover.
      points: (step, value), by step; values that are not finite break the curve.
      slot: index of the colour, so that a run keeps its colour in every chart; `None`
        for a reference line such as a baseline: dashed, and grey.
    """

    label: str
    points: Sequence[tuple[float, float]]
    slot: int | None = 0

    @property
    def style(self) -> str:
        """Its CSS class."""
        return "level" if self.slot is None else f"s{self.slot % NUM_COLOURS}"


def chart(title: str, unit: str, lines: Sequence[Line]) -> str:
    """Draws curves over the step.

    Args:
      title: what is shown.
      unit: of the values.
      lines: the curves; ones without a finite value are left out.

    Returns:
      A `<figure>` element, or "" if nothing can be drawn.
    """
    lines = [line for line in lines if any(math.isfinite(v) for _, v in line.points)]
    if not lines:
        return ""
    finite = [(x, y) for line in lines for x, y in line.points if math.isfinite(y)]
    x_ticks = ticks(min(x for x, _ in finite), max(x for x, _ in finite))
    y_ticks = ticks(min(y for _, y in finite), max(y for _, y in finite))
    x_of = _scale(x_ticks[0], x_ticks[-1], _LEFT, WIDTH - _RIGHT)
    y_of = _scale(y_ticks[0], y_ticks[-1], HEIGHT - _BOTTOM, _TOP)
    parts = [_axes(x_ticks, y_ticks, x_of, y_of)]
    parts += [_curve(line, x_of, y_of) for line in lines]
    caption = html.escape(f"{title} ({unit})" if unit else title)
    legend = "".join(
        f'<span class="key {line.style}">{html.escape(line.label)}</span>'
        for line in lines
    )
    return (
        f"<figure><figcaption><b>{caption}</b> {legend}</figcaption>"
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{caption}">'
        f"{''.join(parts)}</svg></figure>"
    )


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Round numbers at equal distances that span [low, high]."""
    if high <= low:
        pad = abs(low) * 0.1 or 1.0
        low, high = low - pad, high + pad
    raw = (high - low) / count
    magnitude = 10.0 ** math.floor(math.log10(raw))
    step = next(m * magnitude for m in (1, 2, 2.5, 5, 10) if m * magnitude >= raw)
    first, last = math.floor(low / step), math.ceil(high / step)
    return [round(index * step, 12) for index in range(first, last + 1)]


def short(value: float) -> str:
    """A number for an axis: 1200000 -> 1.2M."""
    for limit, suffix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= limit:
            return f"{value / limit:.4g}{suffix}"
    return f"{value:.4g}"


def _scale(low: float, high: float, start: float, end: float):
    return lambda value: start + (value - low) / (high - low) * (end - start)


def _axes(x_ticks, y_ticks, x_of, y_of) -> str:
    right, bottom = WIDTH - _RIGHT, HEIGHT - _BOTTOM
    parts = []
    for y in y_ticks:
        at = f"{y_of(y):.1f}"
        parts.append(
            f'<line class="grid" x1="{_LEFT}" x2="{right}" y1="{at}" y2="{at}"/>'
        )
        parts.append(
            f'<text class="tick" x="{_LEFT - 6}" y="{at}" dy="0.32em" '
            f'text-anchor="end">{short(y)}</text>'
        )
    for x in x_ticks:
        parts.append(
            f'<text class="tick" x="{x_of(x):.1f}" y="{bottom + 16}" '
            f'text-anchor="middle">{short(x)}</text>'
        )
    parts.append(
        f'<text class="tick" x="{right}" y="{HEIGHT - 4}" text-anchor="end">step</text>'
    )
    return "".join(parts)


def _curve(line: Line, x_of, y_of) -> str:
    """The line, and a mark that can be hovered at each point where there are few."""
    points = _thin(line.points)
    path, pen_up = [], True
    for x, y in points:
        if math.isfinite(y):
            path.append(f"{'M' if pen_up else 'L'}{x_of(x):.1f} {y_of(y):.1f}")
        pen_up = not math.isfinite(y)
    parts = [f'<path class="curve {line.style}" d="{"".join(path)}"/>']
    if line.slot is not None and len(points) <= 60:
        for x, y in points:
            if math.isfinite(y):
                note = html.escape(f"{line.label}: {y:.5g} at step {x:g}")
                parts.append(
                    f'<circle class="dot {line.style}" cx="{x_of(x):.1f}" '
                    f'cy="{y_of(y):.1f}" r="2.5"><title>{note}</title></circle>'
                )
    return "".join(parts)


def _thin(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """At most `_MOST_POINTS`: the lowest and the highest of each stretch stay."""
    if len(points) <= _MOST_POINTS:
        return list(points)
    stretch = math.ceil(2 * len(points) / _MOST_POINTS)
    kept = []
    for start in range(0, len(points), stretch):
        part = points[start : start + stretch]
        kept += sorted({min(part, key=lambda p: p[1]), max(part, key=lambda p: p[1])})
    return kept
