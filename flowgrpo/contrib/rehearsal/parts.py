"""Divergences from the base model on samples that it drew before training."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

DIVERGENCES = ("forward_kl", "js", "alpha")


@dataclass(frozen=True)
class Rehearsal:
    """weight * D(policy, base), an f-divergence: it covers all modes of the base model, on samples that the base
    generated once (DPH-RL, 2509.07430), [B, N].

    Every optimizer step adds the mean of f(u), u = p / p_base, over the decisions of one part of the recorded samples:
    train.prompts groups, drawn before the first update. Their log-probabilities are recorded with them, so no
    reference model runs later.

    divergence: "forward_kl": f = -log u, KL(base || policy). "js": f = u log u - (u + 1) log((u + 1) / 2), twice the
        Jensen-Shannon divergence. "alpha": f = (u^(1 - alpha) - (1 - alpha) u - alpha) / (alpha (alpha - 1)), between
        the reverse KL (alpha near 0) and the forward one (near 1), with alpha and its default as in the released code.
    least: samples with a lower total reward are left out (the paper rehearses what the base solves); None: none is.
    """

    weight: float = 0.1
    divergence: str = "forward_kl"
    alpha: float = 0.2
    least: float | None = None

    def __post_init__(self) -> None:
        if not 0 < self.weight < math.inf:
            raise ValueError(f"Rehearsal: weight is {self.weight}, expected above 0")
        if self.divergence not in DIVERGENCES:
            raise ValueError(f"Rehearsal: divergence is {self.divergence!r}, expected one of {', '.join(DIVERGENCES)}")
        if self.alpha in (0, 1):
            raise ValueError(f"Rehearsal: alpha is {self.alpha}, expected another number: 1 is forward_kl")

    def __call__(self, logp: Tensor, base: Tensor) -> Tensor:
        """Return weight * f(u) of log-probabilities [B, N] of the policy and of the base model: [B, N]."""
        log_ratio = logp - base
        if self.divergence == "forward_kl":
            return -self.weight * log_ratio
        ratio = log_ratio.exp()
        if self.divergence == "js":
            return self.weight * (ratio * log_ratio - (ratio + 1) * (log_ratio.expm1() / 2).log1p())
        power = 1 - self.alpha
        return self.weight * (power * log_ratio.expm1() - (power * log_ratio).expm1()) / (power * self.alpha)
