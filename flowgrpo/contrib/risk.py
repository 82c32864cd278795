"""Risk-averse advantages: quantiles of the rewards of bundles of prompts."""

from typing import Annotated

import torch
from torch import Tensor

from flowgrpo.advantages.group import RELATIVE_NOISE, AdvantageRule, Clamp
from flowgrpo.advantages.trackers import update_state
from flowgrpo.parts import AtLeast, part
from flowgrpo.types import Context


@part("advantage", single=True, teaches=True)
class RiskAverse(AdvantageRule):
    """Mixed value-at-risk weights of RiskPO (2510.00911) as an advantage, over bundles of several prompts.

    A bundle is `bundle` consecutive groups of the epoch. Its g-th score is the mean reward of the g-th samples of its
    groups, so right and wrong answers become a spread of scores. Each of these samples has the advantage of the score:
    A = `risk_weights` / (2 + omega) / the deviation of the scores (eps 1e-8). No advantage is above 0: scores above the
    upper quantile have weight 0, and worse ones more negative weights.

    The quantiles alpha and beta and the deviation (ddof 0) are those of all scores of an epoch, tracked from epoch to
    epoch: x <- x + rate * (x of this epoch - x). rate 1 reads the present epoch alone.

    omega 0.5 and the division are the released code's, whose deviation has ddof 1. The form of its script for DAPO's
    prompts, which shifts advantages up, to above 0, is not here. bundle, alpha, beta, and the tracking of quantiles by
    their average are ours: the paper tracks them by stochastic approximation.
    """

    alpha: float = 0.2
    beta: float = 0.8
    omega: Annotated[float, AtLeast(0)] = 0.5
    bundle: Annotated[int, AtLeast(1)] = 5
    rate: float = 0.2
    clamp: Clamp = 5.0

    def __post_init__(self) -> None:
        if not 0 < self.alpha < self.beta <= 1 or not 0 < self.rate <= 1:
            raise ValueError(f"RiskAverse: alpha is {self.alpha}, beta {self.beta} and rate {self.rate}, expected "
                             "0 < alpha < beta <= 1, and a rate above 0 to 1")

    def compare(self, total: Tensor, context: Context | None) -> Tensor:
        context = context or Context()
        scores = torch.stack([of.nanmean(0) for of in total.split(self.bundle)])
        if scores.isnan().all():
            return torch.zeros_like(total)
        # Quantiles and deviation of the scores, averaged with those of earlier epochs.
        known = scores[~scores.isnan()]
        now = [*known.quantile(known.new_tensor([self.alpha, self.beta])).tolist(), known.std(correction=0).item()]
        low, high, spread = update_state(
            context.run.memory, "RiskAverse", "scores", context.run.epoch, [],
            lambda past: [old + self.rate * (new - old) for old, new in zip(past or now, now)])[1]
        if spread <= RELATIVE_NOISE * scores.abs().nan_to_num(0).max().item():
            return torch.zeros_like(total)
        advantages = risk_weights(scores, low, high, self.alpha, self.beta, self.omega)
        advantages = advantages / ((2 + self.omega) * (spread + 1e-8))
        return advantages.repeat_interleave(self.bundle, dim=0)[:len(total)].masked_fill(total.isnan(), 0)


def risk_weights(rewards: Tensor, low: Tensor | float, high: Tensor | float, alpha: float, beta: float, omega: float
                 ) -> Tensor:
    """Weights of grad log p in the gradient of MVaR (RiskPO, 2510.00911), for rewards [P, G]: [P, G], all <= 0.

    MVaR = (1 + omega) * mean of the lowest alpha + mean of the rewards between the quantiles alpha and beta, which are
    low and high. Its weights: (1 + omega) min(r - low, 0) / alpha + (clip(r, low, high) - high) / (beta - alpha).
    """
    tail = (rewards - low).clamp(max=0) / alpha
    band = (rewards.clamp(low, high) - high) / (beta - alpha)  # type: ignore[arg-type]
    return ((1 + omega) * tail + band).masked_fill(rewards.isnan(), 0)
