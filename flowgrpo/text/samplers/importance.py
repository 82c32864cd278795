"""Importance weights for completions sampled by another program than the trainer.

An engine with other kernels or another precision computes other log-probabilities for the same weights. So its samples
are not quite the policy's. They are weighted by the bounded ratio of the two.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

HOW, LEVELS = ("tis", "mis", "none"), ("token", "sequence")


@dataclass(frozen=True)
class Mismatch:
    """Importance weight of every token, [B,L], from r = exp(trainer - engine).

    how: "tis", min(r, cap) (truncated importance sampling: Yao and others, Your Efficient RL Framework Secretly Brings
        You Off-Policy RL Training, 2025); "mis", r up to the cap and 0 above it (masked: Liu and others, When Speed
        Kills Stability, 2025); "none", 1.
    level: r of each token, or of its whole completion, the product over its tokens.
    """

    how: str = "tis"
    cap: float = 2.0
    level: str = "token"

    def __post_init__(self) -> None:
        if self.how not in HOW or self.level not in LEVELS:
            raise ValueError(f"Mismatch: how is {self.how!r} and level {self.level!r}, expected one of "
                             f"{', '.join(HOW)} and one of {', '.join(LEVELS)}")
        if not self.cap >= 1:
            raise ValueError(f"Mismatch: cap is {self.cap}, expected 1 or more (infinity for none)")

    def __call__(self, trainer: Tensor, engine: Tensor, mask: Tensor) -> Tensor:
        """Return weights [B,L], without a gradient, of log-probabilities [B,L] at the same weights; 1 where mask is
        false."""
        excess = self._log_ratio(trainer, engine, mask)
        ratio = excess.clamp(max=math.log(self.cap)).exp()
        if self.how == "none":
            ratio = ratio.new_ones(ratio.shape)
        elif self.how == "mis":
            ratio = ratio.masked_fill(self.above(trainer, engine, mask), 0.0)
        return ratio.masked_fill(~mask, 1.0)

    def above(self, trainer: Tensor, engine: Tensor, mask: Tensor) -> Tensor:
        """Return the mask of r above the cap, bool [B,L]; false where mask is false."""
        return (self._log_ratio(trainer, engine, mask) > math.log(self.cap)) & mask

    def _log_ratio(self, trainer: Tensor, engine: Tensor, mask: Tensor) -> Tensor:
        apart = (trainer.detach() - engine.detach()).masked_fill(~mask, 0.0)
        return apart if self.level == "token" else apart.sum(1, keepdim=True).expand_as(apart)
