"""Pages of a run: base and tuned side by side, or columns of one kind: its checkpoints, other runs, seeds, guidance
scales, numbers of steps, or RLG weights. A language model has the first three kinds.

The page of a kind is one self-contained HTML file: a row below each prompt, a column per sample. Texts are also written
as a Markdown table.
"""

import base64
import html
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from flowgrpo import domains, rewards
from flowgrpo.config.schema import Config
from flowgrpo.data import sets
from flowgrpo.data import sources as given_files
from flowgrpo.device import drawing
from flowgrpo.errors import UserError
from flowgrpo.escaped import base64_of, cell, fill, markdown, table
from flowgrpo.evaluation import image_files, run_rewards, samplers
from flowgrpo.evaluation.measured import spread
from flowgrpo.evaluation.pages import clips
from flowgrpo.evaluation.pages import grid as cards
from flowgrpo.evaluation.pages.before_after import scored_rows
from flowgrpo.evaluation.pages.clips import durations, seconds_of
from flowgrpo.evaluation.plan import Arm
from flowgrpo.evaluation.samplers import Pipelines, Texts, first_of_each
from flowgrpo.evaluation.statistics import bounds, format_interval
from flowgrpo.policies import build, loading
from flowgrpo.policies.checkpoints import run_config
from flowgrpo.policies.pipelines.load import rate_ahead
from flowgrpo.storage import atomic, paths
from flowgrpo.storage.places import is_checkpoint, list_checkpoints, run_of

TEMPLATE = Path(__file__).with_suffix(".html")
MARKS = {1: ' class="rose">\u25b2 ', 0: ">", -1: ' class="fell">\u25bc '}
SEEDS = ("0", "1", "2", "3")
RLG = ("0", "0.5", "1", "1.5", "2")
OF_TEXTS = ("checkpoints", "runs", "seeds")


def write_page(path: str | Path, title: str, columns: Sequence[str], rows: Sequence[cards.Row],
               summary: cards.Summary | None = None, fps: float | None = None) -> Path:
    """Write the rows under their columns' names, each below its prompt. Scores above those of a row's first image
    have a green triangle up, below it a red one down.

    Images are resized as on the PNG page (grid.py); clips are videos, or animated WebPs without an encoder.
    summary: the last row. fps: frames per second of clips.
    """
    path = Path(path)
    sourced = any(row.sources for row in rows)
    heads = "".join(f'<th scope="col">{html.escape(name)}</th>' for name in (["source"] * sourced + [*columns]))
    small = all(isinstance(image, str) or max(image.shape[-2:]) < cards.SMALLEST
                for row in rows for image in row.images)
    digits, lines = cards.digits_of(rows), []
    for row in rows:
        beside = "".join(f"<figure>{_image(picture, fps)}<figcaption>{html.escape(name)}</figcaption></figure>"
                         for name, picture in row.sources)
        cells = [f"<td>{beside}</td>"] * sourced
        for image, scores in zip(row.images, row.scores):
            shown = "".join(_line(name, value, row.scores[0].get(name, value), digits[name])
                            for name, value in scores.items())
            cells.append(f"<td>{_image(image, fps)}{f'<dl>{shown}</dl>' if shown else ''}</td>")
        lines.append(_prompt(row.caption, len(cells)) + f"<tr>{''.join(cells)}</tr>\n")
    if summary:  # the columns' means, each above its interval
        cells = ["<td></td>"] * sourced
        for means in summary.columns:
            shown = "".join(_line(name, of.mean, summary.columns[0][name].mean, digits[name],
                                  f"<small>{bounds(of.low, of.high, digits[name])}</small>")
                            for name, of in means.items())
            cells.append(f"<td><dl>{shown}</dl></td>")
        lines.append(_prompt(summary.label, len(cells)) + f"<tr>{''.join(cells)}</tr>\n")
    atomic.write_text(path, fill(TEMPLATE, TITLE=html.escape(title), COLUMNS=heads, ROWS="".join(lines),
                                 RENDERING="pixelated" if small else "auto"))
    return path


def write_table(path: str | Path, title: str, columns: Sequence[str], rows: Sequence[cards.Row],
                summary: cards.Summary | None = None) -> Path:
    """Write texts under their columns' names as a Markdown table, each with its scores below; summary: the last row."""
    path, digits = Path(path), cards.digits_of(rows)
    lines = [["prompt", *map(markdown, columns)]]
    for row in rows:
        lines.append([cell(row.caption)])
        for text, scores in zip(row.images, row.scores):
            assert isinstance(text, str), "a table is of texts"
            listed = ", ".join(f"{_short(name)} {cards.format_score(value, digits[name])}"
                               for name, value in scores.items())
            lines[-1].append(f"{cell(text)}<br>{cell(listed)}" if listed else cell(text))
    if summary:
        lines.append([summary.label, *(", ".join(
            f"{cell(_short(name))} {format_interval(of.mean, of.low, of.high, digits[name])}"
            for name, of in means.items()) for means in summary.columns)])
    atomic.write_text(path, f"# {markdown(title)}\n\n{table(lines)}\n")
    return path


def _short(name: str) -> str:
    return name.rpartition("/")[2]


def _prompt(text: str, columns: int) -> str:
    return f'<tr class="prompt"><th scope="row" colspan="{columns}"><span>{html.escape(text)}</span></th></tr>'


def _image(image: torch.Tensor | str, fps: float | None) -> str:
    if isinstance(image, str):
        return f"<p>{html.escape(image)}</p>"
    frames = [cards._image(frame) for frame in (image if image.ndim == 4 else image[None])]
    size = f'width="{frames[0].width}" height="{frames[0].height}"'
    if image.ndim == 3:
        return f'<img alt="" {size} src="data:image/png;base64,{base64_of(frames[0])}">'
    seconds = seconds_of(len(frames), fps)
    moved = base64_of(frames[0], "WEBP", save_all=True, append_images=frames[1:], loop=0, lossless=True,
                      duration=durations(seconds, len(frames)))
    still = f'<img alt="" {size} src="data:image/webp;base64,{moved}">'
    video = clips.encode(frames, seconds)
    if video is None:
        return still
    source = f'<source type="{clips.TYPE}" src="data:{clips.TYPE};base64,{base64.b64encode(video).decode()}">'
    poster = f"data:image/webp;base64,{base64_of(frames[0], 'WEBP', quality=80)}"
    return f'<video {size} poster="{poster}" autoplay loop muted playsinline>{source}{still}</video>'


def _line(name: str, value: float, before: float, digits: int, below: str = "") -> str:
    mark = MARKS[cards.direction(value, before, digits)]
    label = re.sub(r"(?<=[_.])", "<wbr>", html.escape(_short(name)))  # a name may break there
    return f"<dt>{label}</dt><dd{mark}{cards.format_score(value, digits)}{below}</dd>"


@dataclass(frozen=True)
class Column:
    """One column of a page. arm: of the weights of a run's folder, of one of its checkpoints, or of the base."""

    name: str
    seed: int
    arm: Arm

    def but(self, name: str, **changes: Any) -> "Column":
        """This column under another name, with changes of its arm."""
        return replace(self, name=name, arm=replace(self.arm, **changes))


@loading.memory_told()
def grid(run: str | Path, prompts: str | Path | None, count: int, seed: int, output: str | Path,
         rlg: float | None = None) -> Path:
    """Draw base and tuned images of `count` prompts side by side, with the run's rewards below; returns `output`. The
    images one by one lie in a folder of its name.
    Clips are drawn as their frames, and animated in an additional WebP and mp4.

    run: a folder written by `flowgrpo train`, whose `eval` steps and guidance apply.
    prompts: a prompt file, or None for `count` of the run's held-out prompts, evenly spaced.
    rlg: draw the tuned images with base + rlg * (tuned - base).
    Raises UserError for a folder that is not a run, or has no weights yet.
    """
    run, output = Path(run), Path(output)
    config = run_config(run)
    loading.require_weights(run)
    paths.require_file(output)
    arm = Arm(run, samplers.call_arguments(config.model, run), rlg)
    tuned = Column("after" if rlg is None else f"rlg {rlg:g}", seed, arm)
    [page] = _draw(config, tuned, [tuned.but("before", weights=None, rlg=None), tuned], prompts, count, output)
    return page


@loading.memory_told()
def columns(run: str | Path, kind: str, values: Sequence[str], prompts: str | Path | None, count: int, seed: int,
            output: str | Path) -> list[Path]:
    """Draw `count` prompts in columns of one kind, with the run's rewards below each image. Writes a PNG (with clips
    also a WebP and an mp4), each image in a folder of the PNG's name, and a self-contained HTML file; texts as HTML
    and Markdown. Returns the paths of page and HTML.

    run: a folder written by `flowgrpo train`. values: one per column; empty: those of the kind. prompts: a prompt file,
    or None for the run's held-out prompts, evenly spaced. output: the PNG.
    Raises UserError for a folder that is not a run, and for values that do not fit the kind.
    """
    run, output = Path(run), Path(output)
    config = run_config(run)
    paths.require_file(output)
    by_tokens = build.writes(config.model, config)
    known = OF_TEXTS if by_tokens and config.text.generates == "text" else (*OF_TEXTS, "guidance")
    if by_tokens and kind not in known:
        raise UserError(f"--columns {kind}: is of denoisers, and {run} trained a language model; expected one of "
                        f"{', '.join(known)}")
    if by_tokens:
        arguments = domains.sampled_by("tokens").asked(config, 2 if kind == "seeds" else 1, None)
    else:
        arguments = samplers.call_arguments(config.model, run)
    tuned = Column("tuned", seed, Arm(run, arguments))
    return _draw(config, tuned, KINDS[kind](tuned, list(values)), prompts, count, output, kind)


def _draw(config: Config, tuned: Column, chosen: Sequence[Column], prompts: str | Path | None, count: int,
          output: Path, kind: str = "") -> list[Path]:
    """Draw columns and write their page; return its path and that of the HTML. tuned: the run's column, whose settings
    the page states. kind: of the columns, in the HTML's title; without it no HTML is written."""
    # Everything that can be refused comes before a model is loaded.
    run = tuned.arm.weights
    assert run is not None
    shown = spread(sets.prompts_to_show(config, prompts), count)
    given_files.require(shown)
    functions = run_rewards.rewards_of_run(config)
    device, by_tokens = loading.place(), build.writes(config.model, config)
    precision = "fp32" if kind and not config.adapter.rank else config.precision
    sampler = Texts(config.model, config, None, device) if by_tokens else \
        Pipelines(config.model, config, drawing(precision, device), device)
    # Samples by column, and the base's of the same seeds where a reward compares with them.
    drawn = [first_of_each(sampler, each.arm, each.seed, shown) for each in chosen]
    bases: list[Any] = [None] * len(chosen)
    if any(map(rewards.sees_base, functions.values())):
        there = [(each.arm, each.seed) for each in chosen]
        wanted = [(Arm(None, each.arm.asked), each.seed) for each in chosen]
        bases = [torch.stack(drawn[there.index(base)] if base in there else first_of_each(sampler, *base, shown))
                 for base in wanted]
    fps = None if by_tokens else rate_ahead(config.model, config.load, tuned.arm.asked, config.fps)
    rows, means = scored_rows(functions, drawn, shown, bases, fps)
    # The page: a table of texts, or images with what says how they were drawn.
    names, title = [column.name for column in chosen], f"{config.name}: {kind}"
    if isinstance(drawn[0][0], str):
        page = write_table(output.with_suffix(".md"), title, names, rows, means)
    else:
        page = cards.draw_grid(output, names, rows, means, image_files.facts(
            run, names, shown, image_files.save_columns(output, names, drawn, fps),
            image_files.save_sources(output, shown, drawn[0]), model=config.model, seed=tuned.seed,
            call=tuned.arm.asked), fps)
    return [page, write_page(output.with_suffix(".html"), title, names, rows, means, fps)] if kind else [page]


# --- the kinds -------------------------------------------------------------------------------------------------------

def _checkpoints(tuned: Column, values: list[str]) -> list[Column]:
    """Columns by epoch, 0 for the base; without values the base and every kept checkpoint."""
    run = tuned.arm.weights
    assert run is not None
    folders = list_checkpoints(run_of(run))
    epochs = _numbers("checkpoints", values, int) or [0, *folders]
    missing = [epoch for epoch in epochs if epoch and epoch not in folders]
    if missing or not folders:
        which = f"of epoch {missing[0]}" if missing else "at all"
        raise UserError(f"--columns checkpoints: {run} has none {which}; there are: "
                        f"{', '.join(map(str, folders)) or 'none'} (train.keep says how many are kept)")
    return [tuned.but(f"epoch {epoch}" if epoch else "base", weights=folders.get(epoch)) for epoch in epochs]


def _runs(tuned: Column, values: list[str]) -> list[Column]:
    """Columns for the base, the run, and further runs of the same model by folder. All are sampled with this run's
    settings."""
    if not values:
        raise UserError("--columns runs: expected --values with the folders of further runs")
    run = tuned.arm.weights
    assert run is not None
    first, chosen = run_config(run), [tuned.but("base", weights=None)]
    for folder in {path.resolve(): path for path in [run, *map(Path, values)]}.values():
        config = run_config(folder)
        if (config.model, config.load) != (first.model, first.load):
            raise UserError(f"--columns runs: {folder} tuned {config.model!r}, but {run} tuned "
                            f"{first.model!r}: expected runs of one model, loaded alike")
        name = f"{config.name}, {folder.name}" if is_checkpoint(folder) else config.name
        chosen.append(tuned.but(name, weights=folder))
    return chosen


def _arguments(kind: str, argument: str, number: type, tuned: Column, values: list[str], least: float = 0
               ) -> list[Column]:
    if not values:
        raise UserError(f"--columns {kind}: expected --values with a number for each column, such as --values 1,2,4")
    return [tuned.but(f"{kind} {parsed:g}", asked=tuned.arm.asked | {argument: parsed})
            for parsed in _numbers(kind, values, number, least)]


def _numbers(kind: str, values: Sequence[str], number: type, least: float = 0) -> list[Any]:
    parsed: list[Any] = []
    for value in values:
        try:
            parsed.append(number(value))
        except ValueError:
            parsed.append(math.nan)
        if not least <= parsed[-1] < math.inf:
            raise UserError(f"--columns {kind}: got {value!r} in --values, expected {'whole ' * (number is int)}"
                            f"numbers from {least} up, parted by commas")
    return parsed


KINDS: dict[str, Callable[[Column, list[str]], list[Column]]] = {
    "checkpoints": _checkpoints,
    "runs": _runs,
    "seeds": lambda tuned, values: [replace(tuned, name=f"seed {number}", seed=number)
                                    for number in _numbers("seeds", values or SEEDS, int)],
    "guidance": partial(_arguments, "guidance", "guidance", float),
    "steps": partial(_arguments, "steps", "num_inference_steps", int, least=1),
    "rlg": lambda tuned, values: [tuned.but(f"rlg {number:g}", rlg=number)
                                  for number in _numbers("rlg", values or RLG, float)]}
