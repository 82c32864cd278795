"""The groups of one prompt compared as one: a part of a method's `advantage`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from flowgrpo.advantages import group_relative, require_clamp, rows_of, weighted_sum
from flowgrpo.types import Context

SCALES = ("group", "none", "leave_one_out")


@dataclass(frozen=True)
class Pooled:
    """`group_relative` of the weighted sum, all groups of an epoch that have the same prompt together as one group.

    For an epoch that samples a prompt several times, such as that of `Knapsack` (2509.25849).
    """

    scale: str = "group"
    clamp: float = math.inf

    def __post_init__(self) -> None:
        if self.scale not in SCALES:
            raise ValueError(f"Pooled: scale is {self.scale!r}, expected one of {', '.join(SCALES)}")
        require_clamp(self.clamp)

    def __call__(self, rewards: Tensor, weights: Tensor | Sequence[float], context: Context | None = None) -> Tensor:
        assert context is not None and len(context.prompts) == len(rewards), "Pooled needs a context with all prompts"
        total = weighted_sum(rewards, weights)
        found = torch.zeros_like(total)
        for rows in rows_of(context.prompts).values():
            found[rows] = group_relative(total[rows].reshape(1, -1), self.scale).view(len(rows), -1)
        return found.clamp(-self.clamp, self.clamp)
