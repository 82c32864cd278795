"""Several pictures in one call of a stock pipeline, where each is then what it is alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from tqdm import tqdm

from flowgrpo.data.prompts import Prompt
from flowgrpo.errors import UserError
from flowgrpo.evaluation.images import call, draw_one

SHARE = 0.1  # of the difference between two pictures: what company may change, in half precision
# What a pipeline for one prompt raises; if it is something else, drawing alone raises it again.
REFUSALS = (AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)


class Together:
    """Draws pictures in one call. Whether the pipeline does so is found out by the first ones, of which one is drawn
    alone too; `works` is then True or False, and None before."""

    def __init__(self) -> None:
        self.works: bool | None = None

    def draw(self, pipe: Any, prompts: Sequence[Prompt], seeds: Sequence[int], asked: dict[str, Any],
             negative: str) -> list[torch.Tensor]:
        """Pictures [3, H, W] or clips [F, 3, H, W] in [0, 1], each of its prompt and its seed: those of `draw_one`, to
        the rounding of other matrix shapes. Prompts that bring a picture are drawn alone. UserError where the device's
        memory does not suffice."""
        if len(prompts) < 2 or self.works is False or any(prompt.image for prompt in prompts):
            return [draw_one(pipe, *each, asked, negative) for each in zip(prompts, seeds)]
        try:
            if self.works is None:
                return self._tried(pipe, prompts, seeds, asked, negative)
            return list(_drawn(pipe, prompts, seeds, asked, negative))
        except torch.OutOfMemoryError as error:
            raise UserError(f"{len(prompts)} pictures in one call do not fit into the device's memory: give a --batch "
                            f"below {len(prompts)}") from error

    def _tried(self, pipe: Any, prompts: Sequence[Prompt], seeds: Sequence[int], asked: dict[str, Any],
               negative: str) -> list[torch.Tensor]:
        try:
            found = list(_drawn(pipe, prompts, seeds, asked, negative))
        except torch.OutOfMemoryError:
            raise
        except REFUSALS:
            found = []
        # The second picture: the first would also be right where all rows had the first one's noise or prompt.
        alone = draw_one(pipe, prompts[1], seeds[1], asked, negative)
        self.works = bool(found) and _same(found, alone)
        if self.works:
            return found
        tqdm.write(f"{type(pipe).__name__} does not draw several prompts in one call as it draws each: one at a time")
        return [alone if i == 1 else draw_one(pipe, *each, asked, negative)
                for i, each in enumerate(zip(prompts, seeds))]


def _same(found: Sequence[torch.Tensor], alone: torch.Tensor) -> bool:
    if found[1].shape != alone.shape:
        return False
    return bool((found[1] - alone).abs().mean() <= SHARE * (found[1] - found[0]).abs().mean())


@torch.no_grad()
def _drawn(pipe: Any, prompts: Sequence[Prompt], seeds: Sequence[int], asked: dict[str, Any],
           negative: str) -> torch.Tensor:
    """What one call gives, [B, ...]. ValueError where it is not of as many pictures or clips as there are prompts."""
    made = call(pipe, asked, prompt=[prompt.text for prompt in prompts], output_type="pt",
                generator=[torch.Generator().manual_seed(seed) for seed in seeds],
                negative_prompt=[negative if prompt.negative is None else prompt.negative for prompt in prompts])
    if made.ndim not in (4, 5) or len(made) != len(prompts):
        raise ValueError(f"expected {len(prompts)} pictures or clips, got {list(made.shape)}")
    return made.float().cpu()
