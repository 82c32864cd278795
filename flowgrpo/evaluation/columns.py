"""Pages of a run with columns of one kind: its checkpoints, other runs, seeds, guidance scales, numbers of steps, or
RLG weights. A language model has the first three kinds.

A kind is a function of a run and the user's column values. A column can change the fields of `Column`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from flowgrpo import rewards
from flowgrpo.data import sources as given_files
from flowgrpo.data import splits
from flowgrpo.data.prompts import load_prompts
from flowgrpo.device import drawing
from flowgrpo.errors import UserError
from flowgrpo.evaluation import calls, picture_files, run_rewards
from flowgrpo.evaluation.measured import spread
from flowgrpo.evaluation.pages import singles, sources
from flowgrpo.evaluation.pages.before_after import captions, frames_of, means_of
from flowgrpo.evaluation.pages.grid import Row, draw_grid
from flowgrpo.evaluation.pages.html_page import write_page, write_table
from flowgrpo.evaluation.plan import Arm
from flowgrpo.evaluation.sampler import Pipelines, Texts, first_of_each
from flowgrpo.policies import build, loading
from flowgrpo.policies.checkpoints import run_config
from flowgrpo.policies.pipelines.load import rate_ahead
from flowgrpo.storage import paths
from flowgrpo.storage.places import is_checkpoint, listed, run_of

SEEDS = ("0", "1", "2", "3")
RLG = ("0", "0.5", "1", "1.5", "2")
OF_TEXTS = ("checkpoints", "runs", "seeds")


@dataclass(frozen=True)
class Column:
    """One column of a page.

    weights: a run's folder, one of its checkpoints, or None for the base. Also: the seed, and the arguments of the
    pipeline's call or the `text` settings of a language model.
    rlg: draw with base + rlg * (tuned - base).
    """

    name: str
    weights: Path | None
    seed: int
    asked: dict[str, Any]
    rlg: float | None = None

    @property
    def arm(self) -> Arm:
        return Arm(self.weights, self.asked, self.rlg)


@loading.memory_told()
def columns(run: str | Path, kind: str, values: Sequence[str], prompts: str | Path | None, count: int, seed: int,
            output: str | Path) -> list[Path]:
    """Draw `count` prompts in columns of one kind, with the run's rewards below each picture. Writes a PNG (with clips
    also a WebP and an mp4), each picture in a folder of the PNG's name, and a self-contained HTML file; texts as HTML
    and Markdown. Returns the paths of page and HTML.

    run: a folder written by `flowgrpo train`. values: one per column; empty: those of the kind. prompts: a prompt file,
    or None for the run's held-out prompts, evenly spaced. output: the PNG.
    Raises UserError for a folder that is not a run, and for values that do not fit the kind.
    """
    run, output = Path(run), Path(output)
    config = run_config(run)
    paths.require_file(output)
    written = build.writes(config.model, config)
    if written and kind not in OF_TEXTS:
        raise UserError(f"--columns {kind}: is of denoisers, and {run} trained a language model; expected one of "
                        f"{', '.join(OF_TEXTS)}")
    if written:
        from flowgrpo.text.policies import engines as texts

        arguments = texts.asked(config, 2 if kind == "seeds" else 1, None)
    else:
        arguments = calls.call_arguments(config.model, run)
    chosen = KINDS[kind](Column("tuned", run, seed, arguments), list(values))
    shown = spread(load_prompts(prompts) if prompts else splits.resolve(config)[1], count)
    given_files.require(shown)
    functions = run_rewards.measured(config)
    device = loading.place()
    sampler = Texts(config.model, config, None, device) if written else Pipelines(
        config.model, config, drawing(config.precision if config.adapter.rank else "fp32", device), device)

    def sampled(column: Column) -> list[Any]:
        return first_of_each(sampler, column.arm, shown, column.seed)

    drawn: list[list[Any]] = [sampled(column) for column in chosen]
    bases: list[Any] = [None] * len(chosen)
    if any(map(rewards.sees_base, functions.values())):
        bases = [torch.stack(sampled(replace(column, weights=None, rlg=None))) for column in chosen]
    fps = None if written else rate_ahead(config.model, config.load, arguments, config.fps)
    scores = [captions(functions, samples if written else torch.stack(samples), shown, base, fps)
              for samples, base in zip(drawn, bases)]
    rows = [Row(prompt.text, [pictures[i] for pictures in drawn],
                [dict(zip(functions, values[i].tolist())) for values in scores],
                sources.of(prompt, frames_of(drawn[0][i]))) for i, prompt in enumerate(shown)]
    names, title = [column.name for column in chosen], f"{config.name}: {kind}"
    means = means_of([dict(zip(functions, values.T[:, :, None].numpy())) for values in scores])
    first = write_table(output.with_suffix(".md"), title, names, rows, means) if written else \
        draw_grid(output, names, rows, means, picture_files.facts(
            run, names, shown, singles.save_columns(output, names, drawn, fps),
            singles.save_sources(output, shown, drawn[0]), model=config.model, seed=seed,
            call=arguments), fps)
    return [first, write_page(output.with_suffix(".html"), title, names, rows, means, fps)]


# --- the kinds -------------------------------------------------------------------------------------------------------

def _checkpoints(tuned: Column, values: list[str]) -> list[Column]:
    """Columns by epoch, 0 for the base; without values the base and every kept checkpoint."""
    assert tuned.weights is not None
    folders = listed(run_of(tuned.weights))
    epochs = [_number("checkpoints", value, int) for value in values] or [0, *folders]
    missing = [epoch for epoch in epochs if epoch and epoch not in folders]
    if missing or not folders:
        which = f"of epoch {missing[0]}" if missing else "at all"
        raise UserError(f"--columns checkpoints: {tuned.weights} has none {which}; there are: "
                        f"{', '.join(map(str, folders)) or 'none'} (train.keep says how many are kept)")
    return [replace(tuned, name=f"epoch {epoch}" if epoch else "base", weights=folders.get(epoch)) for epoch in epochs]


def _runs(tuned: Column, values: list[str]) -> list[Column]:
    """Columns for the base, the run, and further runs of the same model by folder. All are sampled with this run's
    settings."""
    if not values:
        raise UserError("--columns runs: expected --values with the folders of further runs")
    assert tuned.weights is not None
    first, chosen = run_config(tuned.weights), [replace(tuned, name="base", weights=None)]
    for folder in {path.resolve(): path for path in [tuned.weights, *map(Path, values)]}.values():
        config = run_config(folder)
        if (config.model, config.load) != (first.model, first.load):
            raise UserError(f"--columns runs: {folder} tuned {config.model!r}, but {tuned.weights} tuned "
                            f"{first.model!r}: expected runs of one model, loaded alike")
        name = f"{config.name}, {folder.name}" if is_checkpoint(folder) else config.name
        chosen.append(replace(tuned, name=name, weights=folder))
    return chosen


def _seeds(tuned: Column, values: list[str]) -> list[Column]:
    numbers = [_number("seeds", value, int) for value in values or SEEDS]
    return [replace(tuned, name=f"seed {number}", seed=number) for number in numbers]


def _guidance(tuned: Column, values: list[str]) -> list[Column]:
    return _called(tuned, "guidance", "guidance", values, float)


def _steps(tuned: Column, values: list[str]) -> list[Column]:
    return _called(tuned, "steps", "num_inference_steps", values, int, least=1)


def _rlg(tuned: Column, values: list[str]) -> list[Column]:
    numbers = [_number("rlg", value, float) for value in values or RLG]
    return [replace(tuned, name=f"rlg {number:g}", rlg=number) for number in numbers]


KINDS: dict[str, Callable[[Column, list[str]], list[Column]]] = {
    "checkpoints": _checkpoints, "runs": _runs, "seeds": _seeds, "guidance": _guidance, "steps": _steps, "rlg": _rlg}


def _called(tuned: Column, kind: str, argument: str, values: list[str], number: type, least: float = 0) -> list[Column]:
    if not values:
        raise UserError(f"--columns {kind}: expected --values with a number for each column, such as --values 1,2,4")
    numbers = [_number(kind, value, number, least) for value in values]
    return [replace(tuned, name=f"{kind} {parsed:g}", asked=tuned.asked | {argument: parsed})
            for parsed in numbers]


def _number(kind: str, value: str, number: type, least: float = 0) -> Any:
    try:
        parsed = number(value)
    except ValueError:
        parsed = None
    if parsed is None or not least <= parsed < float("inf"):
        raise UserError(f"--columns {kind}: got {value!r} in --values, expected {'whole ' * (number is int)}numbers "
                        f"from {least} up, parted by commas")
    return parsed
