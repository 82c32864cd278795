"""Which samples are trained: `selection(scores) -> keep`, scores [P, G] to bool [P, G].

scores are what ranks the samples of a group, the total reward or the combined advantage, without NaN. Advantages are
always computed on the full group first; a selection only leaves rows out of the loss.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from flowgrpo.advantages import zero_variance


@dataclass(frozen=True)
class All:
    """Keep every sample."""

    def __call__(self, scores: Tensor) -> Tensor:
        return torch.ones_like(scores, dtype=torch.bool)


@dataclass(frozen=True)
class BestWorst:
    """Keep the n/2 best and the n/2 worst of each group (DanceGRPO's best-of-N, 2505.07818; 8 of 24 there).

    n is even and at most G. Ties go by position, so that exactly n are kept.
    """

    n: int

    def __post_init__(self) -> None:
        if self.n < 2 or self.n % 2:
            raise ValueError(f"BestWorst: n is {self.n}, expected an even number from 2 up")

    def __call__(self, scores: Tensor) -> Tensor:
        assert not scores.isnan().any(), "scores to rank by must not contain NaN"
        size = scores.shape[1]
        if self.n > size:
            raise ValueError(f"BestWorst: n is {self.n}, expected at most the {size} samples of a group")
        ranked = scores.argsort(dim=1, stable=True)
        ends = torch.cat([ranked[:, : self.n // 2], ranked[:, size - self.n // 2 :]], dim=1)
        return torch.zeros_like(scores, dtype=torch.bool).scatter(1, ends, True)


@dataclass(frozen=True)
class DropZeroVariance:
    """Keep whole groups, those whose samples differ; the others have advantage 0 and cost forwards (Flow-GRPO)."""

    def __call__(self, scores: Tensor) -> Tensor:
        return (~zero_variance(scores))[:, None].expand(scores.shape)
