"""Comparison of several runs in one page: a curve per run and reward, and a table of the settings that differ."""

import html
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flowgrpo.config.parse import read_yaml
from flowgrpo.config.recipes import flat
from flowgrpo.errors import UserError
from flowgrpo.escaped import fill, plain
from flowgrpo.evaluation.runs import HELD_OUT, means_of_base, read
from flowgrpo.storage import atomic
from flowgrpo.storage.json_files import read_lines
from flowgrpo.storage.places import CONFIG, run_of

APART = ("name", "output")  # settings in which all runs differ
# Distinct to colour-blind readers (Okabe and Ito), from the ninth run on with dashes.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8a8a00", "#808080")
WIDTH, HEIGHT, LEFT, BOTTOM = 640, 260, 64, 28  # of a chart and its margins, in pixels
KINDS = {"reward/{}/mean": "training samples", f"{HELD_OUT}{{}}": "held-out prompts"}
TEMPLATE = Path(__file__).with_suffix(".html")


@dataclass(frozen=True)
class Compared:
    """Run of the page: its label, its settings under dotted keys, and its metrics."""

    label: str
    settings: dict[str, Any]
    lines: list[dict[str, Any]]


def write(runs: Sequence[Path], output: Path | None = None) -> Path:
    """Write the page of several runs to `output`, or beside the first; return its path. Raises UserError for a folder
    that is no run or is given twice."""
    folders = [run_of(run).resolve() for run in runs]
    if len(set(folders)) < len(folders):
        raise UserError(f"{' '.join(map(str, runs))}: one run is given twice, expected different ones")
    names = [folder.name for folder in folders]
    labels = names if len(set(names)) == len(names) else list(map(str, folders))
    output = output or folders[0].parent / f"{'-'.join(names)}.html"
    compared = [Compared(label, flat(read_yaml(folder / CONFIG)), epoch_metrics(folder))
                for label, folder in zip(labels, folders)]
    atomic.write_text(output, page(compared))
    return output


def epoch_metrics(folder: Path) -> list[dict[str, Any]]:
    """Metrics of a run's epochs, with the held-out rewards before the first one and after the last one, as far as they
    are of the same prompts."""
    lines, run = read_lines(folder / "metrics.jsonl", "epoch"), read(folder)
    last = lines[-1] if lines and run.state == "finished" and not (folder / "choosing.json").is_file() else {}
    ends = {f"{HELD_OUT}{name}": value for name, value in run.after.items()} if last else {}
    before = {f"{HELD_OUT}{name}": value for name, value in means_of_base(folder).items()}
    return [{"epoch": 0} | before, *lines[:-1], *([ends | last] if last else lines[-1:])]


def page(runs: Sequence[Compared]) -> str:
    title = _text(" and ".join(run.label for run in runs))
    legend = "".join(f'<li><span style="border-color: {COLOURS[at % len(COLOURS)]}; border-top-style: '
                     f'{"dashed" if at >= len(COLOURS) else "solid"}"></span>{_text(run.label)}</li>'
                     for at, run in enumerate(runs))
    charts = [f"<h2>{_text(name)}, {kind}</h2>\n{chart(lines, f'{name}, {kind}')}"
              for (name, kind), lines in curves(runs).items()]
    return fill(TEMPLATE, TITLE=title, WIDTH=str(WIDTH), LEGEND=legend, CHARTS="".join([*charts, table(runs)]))


def _text(text: str) -> str:
    return html.escape(plain(text))


def curves(runs: Sequence[Compared]) -> dict[tuple[str, str], list[list[tuple[int, float]]]]:
    """Curves of each reward and kind of sample: of every run its points (epoch, mean)."""
    keys = dict.fromkeys(key for run in runs for line in run.lines for key in line)
    rewards = [key.removeprefix("reward/").removesuffix("/mean") for key in keys
               if key.startswith("reward/") and key.endswith("/mean")]
    rewards += [key.removeprefix(HELD_OUT) for key in keys if key.startswith(HELD_OUT)]
    drawn = {(name, kind): [[(line["epoch"], line[key]) for line in run.lines
                             if line.get(key := pattern.format(name)) is not None] for run in runs]
             for name in dict.fromkeys(rewards) for pattern, kind in KINDS.items()}
    return {key: lines for key, lines in drawn.items() if any(lines)}


def chart(lines: list[list[tuple[int, float]]], label: str) -> str:
    """Curves as SVG, with the lowest and the highest value at the left and the epochs below."""
    epochs = [epoch for points in lines for epoch, _ in points]
    values = [value for points in lines for _, value in points]
    (first, last), (low, high) = (min(epochs), max(epochs)), (min(values), max(values))
    right, base = WIDTH - 8, HEIGHT - BOTTOM

    def place(epoch: int, value: float) -> tuple[float, float]:
        across = (epoch - first) / (last - first) if last > first else 0.5
        up = (value - low) / (high - low) if high > low else 0.5
        return LEFT + across * (right - LEFT), base - up * (base - 12)

    drawn = []
    for at, points in enumerate(lines):
        colour, dashes = COLOURS[at % len(COLOURS)], ' stroke-dasharray="6 4"' if at >= len(COLOURS) else ""
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in (place(*point) for point in points))
        if len(points) == 1:
            x, y = place(*points[0])
            drawn.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{colour}"/>')
        elif points:
            drawn.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"{dashes}/>')
    return (f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{_text(label)}">'
            f'<path class="axis" fill="none" d="M{LEFT} 12V{base}H{right}"/>'
            f'<text x="{LEFT - 6}" y="16" text-anchor="end">{high:.4g}</text>'
            f'<text x="{LEFT - 6}" y="{base}" text-anchor="end">{low:.4g}</text>'
            f'<text x="{LEFT}" y="{HEIGHT - 8}">epoch {first}</text>'
            f'<text x="{right}" y="{HEIGHT - 8}" text-anchor="end">{last}</text>{"".join(drawn)}</svg>\n')


def table(runs: Sequence[Compared]) -> str:
    """Settings that differ, with the value of each run; empty where a run has no such key."""
    keys = dict.fromkeys(key for run in runs for key in run.settings if key not in APART)
    every = {key: ["" if key not in run.settings else "none" if run.settings[key] is None else str(run.settings[key])
                   for run in runs] for key in keys}
    rows = {key: values for key, values in every.items() if len(set(values)) > 1}
    if not rows:
        return "<h2>Settings</h2>\n<p>All settings are the same.</p>\n"
    heads = "".join(f"<th>{_text(run.label)}</th>" for run in runs)
    body = "".join(f"<tr><th>{_text(key)}</th>" + "".join(f"<td>{_text(value)}</td>" for value in values)
                   + "</tr>\n" for key, values in rows.items())
    return (f'<h2>Settings that differ</h2>\n<div class="wide"><table><thead><tr><th></th>{heads}</tr></thead>\n'
            f"<tbody>{body}</tbody></table></div>\n")
