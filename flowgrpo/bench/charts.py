"""Figures of a bench's page as SVG, in the page's colours, each with a title for readers of the screen."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass

Point = tuple[float, float, float, float]  # x, mean, lowest, highest
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 340, 210, 40, 10, 10, 26  # of a panel and its margins
LONGEST = 18  # letters of a bar's label
SECOND = "var(--accent)"
FIRST = "var(--faint)"


@dataclass(frozen=True)
class Curve:
    """Curve with a band, in a CSS colour. dots: mark its points, where x may fall from one to the next."""

    points: Sequence[Point]
    colour: str
    dots: bool = False


@dataclass(frozen=True)
class Frame:
    """Axes of panels that share a scale: the largest x, and the range of y."""

    end: float
    low: float
    high: float

    def x(self, value: float) -> float:
        return LEFT + value / self.end * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        return HEIGHT - BOTTOM - (value - self.low) / (self.high - self.low) * (HEIGHT - BOTTOM - TOP)


def frame(curves: Sequence[Sequence[Point]]) -> Frame:
    """Return axes that hold all curves, with round bounds of y."""
    low = min(point[2] for curve in curves for point in curve)
    high = max(point[3] for curve in curves for point in curve)
    step = tick(high - low)
    bottom, top = math.floor(low / step) * step, math.ceil(high / step) * step
    return Frame(max(point[0] for curve in curves for point in curve) or 1.0, bottom,
                 top if top > bottom else bottom + step)


def tick(span: float) -> float:
    """Return a round distance of ticks, 1, 2 or 5 times a power of ten, about a quarter of the span; 0.1 of none."""
    if span <= 0:
        return 0.1
    power = 10.0 ** math.floor(math.log10(span / 4))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= span / 4 * 0.999)


def panel(curves: Sequence[Curve], axes: Frame, title: str, goal: float | None = None) -> str:
    """Return curves with their bands in axes. title: text for screen readers. goal: dashed line."""
    parts = [*_axes(axes)]
    if goal is not None and axes.low <= goal <= axes.high:
        parts.append(f'<path class="goal" d="M{LEFT} {axes.y(goal):.1f}H{WIDTH - RIGHT}"/>')
    for curve in curves:
        upper = [f"{axes.x(x):.1f},{axes.y(high):.1f}" for x, _, _, high in curve.points]
        lower = [f"{axes.x(x):.1f},{axes.y(low):.1f}" for x, _, low, _ in reversed(curve.points)]
        line = " ".join(f"{axes.x(x):.1f},{axes.y(mean):.1f}" for x, mean, _, _ in curve.points)
        parts.append(f'<polygon points="{" ".join(upper + lower)}" fill="{curve.colour}" opacity="0.18"/>'
                     f'<polyline points="{line}" fill="none" stroke="{curve.colour}" stroke-width="2.2"/>')
        parts += [f'<circle cx="{axes.x(x):.1f}" cy="{axes.y(mean):.1f}" r="3" fill="{curve.colour}"/>'
                  for x, mean, *_ in curve.points if curve.dots]
    return _svg(WIDTH, HEIGHT, title, parts)


def _axes(axes: Frame) -> list[str]:
    step, base = tick(axes.high - axes.low), HEIGHT - BOTTOM
    digits = max(-math.floor(math.log10(step)), 0)
    parts = []
    for number in range(round((axes.high - axes.low) / step) + 1):
        value = axes.low + number * step
        parts.append(f'<path class="grid" d="M{LEFT} {axes.y(value):.1f}H{WIDTH - RIGHT}"/>'
                     f'<text x="{LEFT - 6}" y="{axes.y(value) + 4:.1f}" text-anchor="end">{value:.{digits}f}</text>')
    for share, anchor in ((0, "start"), (0.5, "middle"), (1, "end")):
        parts.append(f'<text x="{axes.x(share * axes.end):.1f}" y="{base + 18}" text-anchor="{anchor}">'
                     f'{count(share * axes.end)}</text>')
    return parts


def count(value: float) -> str:
    """Return a number in short: 20,000 as 20k, 0.1234 as 0.12."""
    return f"{value / 1000:g}k" if value >= 10_000 and value % 100 == 0 else \
        f"{value / 1000:.1f}k" if value >= 1000 else f"{value:.0f}" if value >= 100 else f"{value:.2g}"


def shortened(name: str) -> str:
    """Return a label of at most LONGEST letters: the beginning and the end, where presets joined by + differ."""
    end = (LONGEST - 1) // 2
    return name if len(name) <= LONGEST else f"{name[:LONGEST - 1 - end]}…{name[-end:]}"


def bars(values: Sequence[tuple[str, float | None, str]], title: str, mark: float | None = None,
         whiskers: Sequence[tuple[float, float]] = (), end: float = 0.0, dots: Sequence[float | None] = ()) -> str:
    """Return horizontal bars from 0: (label, value, its text). mark: value of a dashed line, such as the base's.

    whiskers: an interval of each bar. end: value that the axis holds at least. dots: a second value of each bar.
    """
    known = [value for value in (*(value for _, value, _ in values), *dots) if value is not None]
    known += [high for _, high in whiskers]
    end = max([*known, end, 0 if mark is None else mark, 1e-12]) * 1.02
    row, width, label, number = 26, 340, 132, 58
    scale = (width - label - number) / end
    height, parts = row * len(values) + 6, []
    for place, (name, value, text) in enumerate(values):
        top, short = place * row + 4, shortened(name)
        parts.append(f'<text x="{label - 8}" y="{top + 15}" text-anchor="end" class="ink">{html.escape(short)}'
                     f"<title>{html.escape(name)}</title></text>")
        if value is not None:
            parts.append(f'<rect x="{label}" y="{top + 3}" width="{max(value, 0) * scale:.1f}" height="{row - 10}" '
                         f'rx="2" class="bar"/>')
        if whiskers:
            low, high = (label + max(bound, 0) * scale for bound in whiskers[place])
            parts.append(f'<path class="whisker" d="M{low:.1f} {top + 11}H{high:.1f}"/>')
        if dots and (dot := dots[place]) is not None:
            parts.append(f'<circle class="dot" cx="{label + max(dot, 0) * scale:.1f}" cy="{top + 11}" r="4"/>')
        parts.append(f'<text x="{width - 2}" y="{top + 15}" text-anchor="end">{html.escape(text)}</text>')
    if mark is not None:
        parts.append(f'<path class="goal" d="M{label + mark * scale:.1f} 2V{height - 2}"/>')
    return _svg(width, height, title, parts)


def _svg(width: int, height: int, title: str, parts: Sequence[str]) -> str:
    told = html.escape(title, quote=True)
    return f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{told}">{"".join(parts)}</svg>\n'
