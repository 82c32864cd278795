"""Batched calls of a stock pipeline that give each picture what a single call would give."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from tqdm import tqdm

from flowgrpo.data.prompts import Prompt
from flowgrpo.errors import UserError
from flowgrpo.evaluation.images import call, draw_one
from flowgrpo.policies.pipelines.edit_policy import attached

SHARE = 0.1  # maximum effect of the batch in half precision, as a share of the difference between two pictures
# Errors of a pipeline that takes one prompt; any other error is raised again by drawing singly.
REFUSALS = (AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)


class Together:
    """Draw pictures in batched calls. The first call tests the pipeline: one of its pictures is also drawn singly.
    `works` is None before that, then True or False."""

    def __init__(self) -> None:
        self.works: bool | None = None

    def draw(self, pipe: Any, prompts: Sequence[Prompt], seeds: Sequence[int], arguments: dict[str, Any],
             negative: str) -> list[torch.Tensor]:
        """Draw pictures [3, H, W] or clips [F, 3, H, W] in [0, 1], one per prompt and seed. They equal those of
        `draw_one` up to rounding of other matrix shapes. Prompts that bring files are drawn singly.
        Raises UserError if the device runs out of memory."""
        if (edits := attached(pipe)) is not None and len(prompts) > 1:
            return list(edits.draw(prompts, seeds, arguments, negative))
        if len(prompts) < 2 or self.works is False or any(prompt.brings for prompt in prompts):
            return [draw_one(pipe, prompt, seed, arguments, negative) for prompt, seed in zip(prompts, seeds)]
        try:
            if self.works is None:
                return self._tried(pipe, prompts, seeds, arguments, negative)
            return list(_drawn(pipe, prompts, seeds, arguments, negative))
        except torch.OutOfMemoryError as error:
            raise UserError(f"{len(prompts)} images in one call do not fit into the device's memory: give a --batch "
                            f"below {len(prompts)}") from error

    def _tried(self, pipe: Any, prompts: Sequence[Prompt], seeds: Sequence[int], arguments: dict[str, Any],
               negative: str) -> list[torch.Tensor]:
        try:
            pictures = list(_drawn(pipe, prompts, seeds, arguments, negative))
        except torch.OutOfMemoryError:
            raise
        except REFUSALS:
            pictures = []
        # The second picture: the first would match even if all rows had its noise or prompt.
        alone = draw_one(pipe, prompts[1], seeds[1], arguments, negative)
        self.works = bool(pictures) and _same(pictures, alone)
        if self.works:
            return pictures
        tqdm.write(f"{type(pipe).__name__} does not draw several prompts in one call as it draws each: one at a time")
        return [alone if i == 1 else draw_one(pipe, prompt, seed, arguments, negative)
                for i, (prompt, seed) in enumerate(zip(prompts, seeds))]


def _same(pictures: Sequence[torch.Tensor], alone: torch.Tensor) -> bool:
    if pictures[1].shape != alone.shape:
        return False
    return bool((pictures[1] - alone).abs().mean() <= SHARE * (pictures[1] - pictures[0]).abs().mean())


@torch.no_grad()
def _drawn(pipe: Any, prompts: Sequence[Prompt], seeds: Sequence[int], arguments: dict[str, Any],
           negative: str) -> torch.Tensor:
    """Return the output of one call, [B, ...].
    Raises ValueError unless it has one picture or clip per prompt."""
    pictures = call(pipe, arguments, prompt=[prompt.text for prompt in prompts], output_type="pt",
                    generator=[torch.Generator().manual_seed(seed) for seed in seeds],
                    negative_prompt=[negative if prompt.negative is None else prompt.negative for prompt in prompts])
    if pictures.ndim not in (4, 5) or len(pictures) != len(prompts):
        raise ValueError(f"expected {len(prompts)} images or clips, got {list(pictures.shape)}")
    return pictures.float().cpu()
