"""Before/after rows of a page: pairs of samples with their captions."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import torch

from flowgrpo import rewards
from flowgrpo.data.prompts import Prompt
from flowgrpo.errors import UserError
from flowgrpo.evaluation.measured import Measured, evenly
from flowgrpo.evaluation.pages.grid import Row, draw_grid


def captions(functions: dict[str, Any], samples: torch.Tensor | Sequence[str], prompts: Sequence[Prompt],
             base: torch.Tensor | Sequence[str] | None = None) -> torch.Tensor:
    """Return `rewards.score` [N, R] of N samples; NaN for a reward that fails on them, with a printed line."""
    texts, metadata, columns = [p.text for p in prompts], [p.metadata for p in prompts], []
    pictures = cast("torch.Tensor | None", base)  # a reward that reads the base is one of pictures
    for name, function in functions.items():
        try:
            columns.append(rewards.score({name: function}, samples, texts, metadata, base=pictures))
        except UserError as error:
            print(f"left out: {error}", file=sys.stderr)
            columns.append(torch.full((len(texts), 1), torch.nan))
    return torch.cat(columns, 1)


def draw_pairs(path: Path, base: Measured, after: Measured, names: tuple[str, str] = ("before", "after")) -> None:
    """Write the grid PNG: base and tuned pictures of the same prompts and seeds, with their scores."""
    rows = [Row(text, [old, new], [was, now]) for (text, old, was), (_, new, now) in zip(cards(base), cards(after))]
    draw_grid(path, names, rows)


def cards(measured: Measured) -> list[tuple[str, torch.Tensor, dict[str, float]]]:
    """Return prompt, picture and scores of each kept picture."""
    prompts = list({id(prompt): prompt for prompt in measured.prompts}.values())
    samples = len(measured.prompts) // len(prompts)
    return [(prompts[i].text, picture, {name: values[i * samples] for name, values in measured.scores.items()})
            for i, picture in zip(evenly(len(prompts), len(measured.pictures)), measured.pictures)]
