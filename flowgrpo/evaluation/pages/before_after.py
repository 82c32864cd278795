"""Rows of a page: samples of several measurements side by side, with their scores."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from flowgrpo import rewards
from flowgrpo.data.prompts import Prompt
from flowgrpo.distributed.signals import promptly
from flowgrpo.errors import UserError
from flowgrpo.evaluation.measured import Measured, evenly, spread
from flowgrpo.evaluation.pages import sources
from flowgrpo.evaluation.pages.grid import Row, Summary, draw_grid
from flowgrpo.evaluation.statistics import interval, method_of


def scored_rows(functions: dict[str, Any], columns: Sequence[Sequence[Any]], prompts: Sequence[Prompt],
                bases: Sequence[torch.Tensor | None], fps: float | None = None) -> tuple[list[Row], Summary | None]:
    """Rows of columns that have a sample of each prompt, with their scores, and the columns' means. bases: the base's
    images for each column, which rewards may compare with."""
    scores = [captions(functions, column if isinstance(column[0], str) else torch.stack([*column]), prompts, base, fps)
              for column, base in zip(columns, bases)]
    drawn = [Row(prompt.text, [column[i] for column in columns],
                 [dict(zip(functions, values[i].tolist())) for values in scores],
                 sources.read_sources(prompt, columns[0][i])) for i, prompt in enumerate(prompts)]
    return drawn, means_of([dict(zip(functions, values.T[:, :, None].numpy())) for values in scores])


def captions(functions: dict[str, Any], samples: torch.Tensor | Sequence[str], prompts: Sequence[Prompt],
             base: torch.Tensor | None = None, fps: float | None = None) -> torch.Tensor:
    """Return `rewards.score` [N, R] of N samples; NaN for a reward that fails on them, with a printed line."""
    texts, metadata = [p.text for p in prompts], [p.metadata for p in prompts]
    columns = [torch.empty(len(texts), 0)]
    for name, function in functions.items():
        try:
            columns.append(promptly(partial(rewards.score, {name: function}, samples, texts, metadata, base=base,
                                            fps=fps)))
        except UserError as error:
            print(f"left out: {error}", file=sys.stderr)
            columns.append(torch.full((len(texts), 1), torch.nan))
    return torch.cat(columns, 1)


def draw_measured(path: Path, columns: Mapping[str, Measured], facts: Mapping[str, str] | None = None) -> None:
    """Write the grid page: a column for each measurement of the same prompts and seeds, with its scores, and the means
    of all measured prompts; no page without an image. facts: text chunks of the PNG."""
    measured = [*columns.values()]
    shown = [replace(of[0], images=[row.images[0] for row in of], scores=[row.scores[0] for row in of])
             for of in zip(*map(rows, measured))]
    if shown:
        draw_grid(path, [*columns], shown, means_of([arrays(each) for each in measured]), facts, measured[0].fps)


def means_of(columns: Sequence[Mapping[str, np.ndarray]]) -> Summary | None:
    """Means of columns of scores [N, S] by reward; None for a single prompt, or without rewards."""
    prompts = max((len(scores) for scores in columns[0].values()), default=0)
    if prompts < 2:
        return None
    methods = {name: method_of(*(column[name] for column in columns)) for name in columns[0]}
    return Summary(prompts, [{name: interval(scores, methods[name]) for name, scores in column.items()}
                             for column in columns])


def arrays(measured: Measured) -> dict[str, np.ndarray]:
    """Scores [N, S] of N prompts by reward."""
    prompts = len({id(prompt) for prompt in measured.prompts})
    return {name: np.array(values).reshape(prompts, -1) for name, values in measured.scores.items()}


def rows(measured: Measured) -> list[Row]:
    """Row of one column for each kept image."""
    count = len({id(prompt) for prompt in measured.prompts})
    if not count:
        return []
    samples, places = len(measured.prompts) // count, evenly(count, len(measured.images))
    return [Row(prompt.text, [image], [{name: values[i * samples] for name, values in measured.scores.items()}],
                sources.read_sources(prompt, image))
            for i, prompt, image in zip(places, image_prompts(measured), measured.images)]


def image_prompts(measured: Measured) -> list[Prompt]:
    return spread(list({id(prompt): prompt for prompt in measured.prompts}.values()), len(measured.images))
