"""Page of a bench: index.html, one file without scripts, at any width, light and dark. Its figures are SVG in the
page's colours, each with a title for readers of the screen.
"""

import html
import math
import re
import textwrap
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

from flowgrpo.escaped import fill
from flowgrpo.evaluation.pages.figures import COLOURS, FAINT, INK, figure_style, save
from flowgrpo.evaluation.statistics import format_interval
from flowgrpo.tools.bench import table

Point = tuple[float, float, float, float]  # x, mean, lowest, highest
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 340, 210, 40, 10, 10, 26  # of a panel and its margins
COLUMNS = 5  # panels of a figure beside each other
LONGEST = 18  # letters of a bar's label
SECOND, FIRST = "var(--accent)", "var(--faint)"  # colours of a method and of the reference
BELOW = ' style="margin-top: 14px"'  # a table
TEMPLATE = Path(__file__).with_suffix(".html")


class Frame(NamedTuple):
    """Axes of panels that share a scale: the largest x, and the range of y."""

    end: float
    low: float
    high: float

    def x(self, value: float) -> float:
        return LEFT + value / self.end * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        return HEIGHT - BOTTOM - (value - self.low) / (self.high - self.low) * (HEIGHT - BOTTOM - TOP)


def frame(curves: Sequence[Sequence[Point]]) -> Frame:
    """Axes that hold all curves, with round bounds of y."""
    low = min(point[2] for curve in curves for point in curve)
    high = max(point[3] for curve in curves for point in curve)
    step = tick(high - low)
    bottom, top = math.floor(low / step) * step, math.ceil(high / step) * step
    return Frame(max(point[0] for curve in curves for point in curve) or 1.0, bottom,
                 top if top > bottom else bottom + step)


def tick(span: float) -> float:
    """Round distance of ticks, 1, 2 or 5 times a power of ten, about a quarter of the span; 0.1 of none."""
    if span <= 0:
        return 0.1
    power = 10.0 ** math.floor(math.log10(span / 4))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= span / 4 * 0.999)


def count(value: float) -> str:
    """Number in short: 20,000 as 20k, 0.1234 as 0.12."""
    return f"{value / 1000:g}k" if value >= 10_000 and value % 100 == 0 else \
        f"{value / 1000:.1f}k" if value >= 1000 else f"{value:.0f}" if value >= 100 else f"{value:.2g}"


def shorten(name: str) -> str:
    """Label of at most LONGEST letters: the beginning and the end, where presets joined by + differ."""
    end = (LONGEST - 1) // 2
    return name if len(name) <= LONGEST else f"{name[:LONGEST - 1 - end]}…{name[-end:]}"


def bars(values: Sequence[tuple[str, float | None, str]], title: str, mark: float | None = None,
         whiskers: Sequence[tuple[float, float]] = (), end: float = 0.0, dots: Sequence[float | None] = ()) -> str:
    """Horizontal bars from 0: (label, value, its text). mark: value of a dashed line, such as the base's. whiskers: an
    interval of each bar. end: value that the axis holds at least. dots: a second value of each bar."""
    known = [value for value in (*(value for _, value, _ in values), *dots) if value is not None]
    known += [high for _, high in whiskers]
    end = max([*known, end, 0 if mark is None else mark, 1e-12]) * 1.02
    row, width, label, number = 26, 340, 132, 58
    scale = (width - label - number) / end
    height, parts = row * len(values) + 6, []
    for place, (name, value, text) in enumerate(values):
        top, short = place * row + 4, shorten(name)
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


def page(results: dict[str, Any]) -> str:
    first, *rest = (f"<p>{_code(line)}</p>\n" for line in table.notes(results) if line)
    # Bars of every task's accuracy; prompts may have none.
    methods, tasks = table.rank(results), results["base_tasks"]
    highest = max((method["tasks"][task] for method in methods for task in tasks), default=0.0)
    figures = [_bar_figure(task, f"base {base:.3f}, the dashed line", methods,
                           [method["tasks"][task] for method in methods], ".3f", base, highest)
               for task, base in tasks.items()]
    return fill(TEMPLATE, TITLE=html.escape(f"Methods on {results['model']}"), SECTIONS="".join([
        first, _section("Accuracy", _rows(table.accuracies(results)) + _accuracy_bars(results)), *_curves(results),
        _section("Cost", _rows(table.costs(results)) + _cost_bars(results), _code(table.COST)),
        _section("Tasks", _cards(figures)) if figures else "",
        _section("Notes", "".join(rest)) if rest else ""]))


def _code(text: str) -> str:
    return "".join(f"<code>{html.escape(part)}</code>" if number % 2 else html.escape(part)
                   for number, part in enumerate(text.split("`")))


def _section(title: str, content: str, told: str = "") -> str:
    return f"<h2>{title}</h2>\n" + (f'<p class="faint">{told}</p>\n' if told else "") + content


def _rows(rows: table.Rows) -> str:
    heads, body = rows
    head = "".join(f'<th scope="col">{html.escape(text)}</th>' for text in heads)
    lines = []
    for first, *rest in body:
        cells = "".join(f"<td>{html.escape(text)}</td>" for text in rest)
        name = re.sub(r"([_+])", r"\1<wbr>", html.escape(first))  # a name may break there
        lines.append(f'<tr><th scope="row">{name}</th>{cells}</tr>\n')
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>\n{"".join(lines)}</tbody></table></div>\n'


def _figure(title: str, caption: str, svg: str) -> str:
    return (f"<figure><h3>{html.escape(title)}</h3><figcaption>{html.escape(caption)}</figcaption>{svg}</figure>\n")


# --- curves ----------------------------------------------------------------------------------------------------------

ROOT = (" The distance is the square root of the KL to the base per sample, in nats; dots are the measured epochs, "
        "in their order. A curve above and to the left of another gains more for less.")
WITHIN = " Diversity is the distance between the samples of a prompt, as a share of the base's."


def _curves(results: dict[str, Any]) -> list[str]:
    """Sections of a panel per method: its curve over the reference's, in the same axes. Those over the distance to the
    base, where this was measured, have dots at their points, since x may fall from one to the next."""
    unit, sections = results["unit"], []
    for key, y, x, per, note in (("curve", "Accuracy", unit, unit, ""),
                                 ("frontier", "Accuracy", "the distance to the base", "of distance", ROOT),
                                 ("diversities", "Diversity kept", "the distance to the base", "of distance", WITHIN)):
        methods = [method for method in table.rank(results) if len(method[key]) > 1]
        if not methods:
            continue
        axes = frame([method[key] for method in methods])
        reference = next((method for method in methods if method["label"] == results["reference"]), None)
        figures = []
        for method in [method for method in methods if method is not reference] or methods:
            beside = f", {reference['label']} at {reference[key][-1][1]:.3f}" if reference else ""
            (_, base, *_), (end, last, *_) = method[key][0], method[key][-1]
            after = f"{end:,.0f}" if end >= 100 else f"{end:.2g}"
            told = f"{method['label']}: {y.lower()} from {base:.3f} to {last:.3f} after {after} {per}{beside}"
            curves = ([(reference[key], FIRST)] if reference else []) + [(method[key], SECOND)]
            figures.append(_figure(method["label"], f"{base:.3f} to {last:.3f}{beside}",
                                   _panel(curves, axes, told, base, dots=key != "curve")))
        beside = f', <span class="key" style="border-color: {FIRST}"></span>{html.escape(str(results["reference"]))}'
        legend = (f'<span class="key" style="border-color: {SECOND}"></span>the method{beside if reference else ""}; '
                  f"bands are the lowest and the highest seed, the dashed line is the base.{note}")
        sections.append(_section(f"{y} against {html.escape(x)}", _cards(figures), legend))
    return sections


def _panel(curves: Sequence[tuple[Sequence[Point], str]], axes: Frame, title: str, goal: float, dots: bool) -> str:
    """Curves in CSS colours with their bands. title: text for screen readers. goal: dashed line. dots: mark points."""
    step = tick(axes.high - axes.low)
    digits = max(-math.floor(math.log10(step)), 0)
    parts = []
    for number in range(round((axes.high - axes.low) / step) + 1):
        value = axes.low + number * step
        parts.append(f'<path class="grid" d="M{LEFT} {axes.y(value):.1f}H{WIDTH - RIGHT}"/>'
                     f'<text x="{LEFT - 6}" y="{axes.y(value) + 4:.1f}" text-anchor="end">{value:.{digits}f}</text>')
    for share, anchor in ((0, "start"), (0.5, "middle"), (1, "end")):
        parts.append(f'<text x="{axes.x(share * axes.end):.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="{anchor}">'
                     f'{count(share * axes.end)}</text>')
    if axes.low <= goal <= axes.high:
        parts.append(f'<path class="goal" d="M{LEFT} {axes.y(goal):.1f}H{WIDTH - RIGHT}"/>')
    for points, colour in curves:
        upper = [f"{axes.x(x):.1f},{axes.y(high):.1f}" for x, _, _, high in points]
        lower = [f"{axes.x(x):.1f},{axes.y(low):.1f}" for x, _, low, _ in reversed(points)]
        line = " ".join(f"{axes.x(x):.1f},{axes.y(mean):.1f}" for x, mean, _, _ in points)
        parts.append(f'<polygon points="{" ".join(upper + lower)}" fill="{colour}" opacity="0.18"/>'
                     f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2.2"/>')
        parts += [f'<circle cx="{axes.x(x):.1f}" cy="{axes.y(mean):.1f}" r="3" fill="{colour}"/>'
                  for x, mean, *_ in points if dots]
    return _svg(WIDTH, HEIGHT, title, parts)


def draw(results: Mapping[str, Any], path: Path) -> None:
    """Write a figure, as PNG or PDF: a panel for every method with its accuracy over evaluations, as `_panels`."""
    reference = next((method for method in results["methods"] if method["label"] == results["reference"]), None)
    methods = [method for method in results["methods"] if method is not reference] or [reference]
    rows = -(-len(methods) // COLUMNS)
    with figure_style() as pyplot:
        figure, axes = pyplot.subplots(rows, COLUMNS, figsize=(9.5, 1.45 * rows + 0.3), sharex=True, sharey=True,
                                       squeeze=False)
        for number, (axis, method) in enumerate(zip_longest(axes.flat, methods)):
            if method is None:
                axis.axis("off")
                continue
            axis.axhline(results["base"], color=INK, lw=0.8, ls="--", alpha=0.5)
            curves = [(reference["curve"], FAINT)] if reference else []
            for curve, colour in (*curves, (method["curve"], COLOURS[0])):
                places, means, lows, highs = zip(*curve)
                axis.fill_between(places, lows, highs, color=colour, alpha=0.2, lw=0)
                axis.plot(places, means, color=colour, lw=1.4)
            axis.set_title(textwrap.shorten(method["label"].replace("+", " + "), 26, placeholder=" ..."), fontsize=7.5,
                           pad=4)
            axis.xaxis.set_major_locator(pyplot.MaxNLocator(2))
            axis.xaxis.set_major_formatter(lambda value, _: count(value))
            axis.tick_params(labelsize=7, labelbottom=number + COLUMNS >= len(methods))
        save(figure, path)


# --- bars ------------------------------------------------------------------------------------------------------------

def _cards(figures: Sequence[str], style: str = "") -> str:
    return f'<div class="cards"{style}>\n{"".join(figures)}</div>\n'


def _bar_figure(title: str, caption: str, methods: Sequence[dict[str, Any]], values: Sequence[float | None], form: str,
                mark: float | None, end: float = 0.0) -> str:
    """Figure of a value of every method. form: of the values, as in format(). mark, end: see `bars`."""
    shown = [(method["label"], value, table.number(value, form))
             for method, value in zip(methods, values, strict=True)]
    told = f"{title}: {', '.join(f'{label} {text}' for label, _, text in shown)}"
    return _figure(title, caption, bars(shown, told, mark, end=end))


def _accuracy_bars(results: dict[str, Any]) -> str:
    """Bars of the accuracy with its intervals, and dots at the best of a sweep."""
    methods = table.rank(results)
    tuned = [method["tuned"]["accuracy"] if "tuned" in method else None for method in methods]
    swept = any(best is not None for best in tuned)
    told = ", ".join(f"{method['label']} {format_interval(method['accuracy'], method['low'], method['high'], 3)}"
                     + (f", {best:.3f} with the best of the sweep" if best is not None else "")
                     for method, best in zip(methods, tuned, strict=True))
    drawn = bars([(method["label"], method["accuracy"], f"{method['accuracy']:.3f}") for method in methods],
                 f"Accuracy: {told}", results["base"], [
                     tuple(method["accuracy"] if method[end] is None else method[end] for end in ("low", "high"))
                     for method in methods],
                 dots=tuned if swept else ())
    caption = "with 95 % intervals; the dashed line is the base" + ("; a dot is the best of the sweep" if swept else "")
    return _cards([_figure("Accuracy", caption, drawn)], BELOW)


def _cost_bars(results: dict[str, Any]) -> str:
    methods = table.rank(results)
    figures = [_bar_figure(title, caption, methods, [method[key] for method in methods], ".3g", mark)
               for title, caption, key, mark in (
        ("Seconds of training", f"as a ratio to {results['reference']}, the dashed line", "seconds_ratio", 1.0),
        ("KL to the base", "per sample, of the trained model", "kl", None),
        ("Diversity kept", "within a prompt, as a share of the base's, the dashed line", "diversity", 1.0))]
    for name in results["watched"]:
        values = [method["watched"][name]["after"] for method in methods]
        if all(value is None or value >= 0 for value in values):
            figures.append(_bar_figure(name, "eval-only; the dashed line is the base", methods, values, ".3g",
                                       methods[0]["watched"][name]["before"]))
    return _cards(figures, BELOW)
