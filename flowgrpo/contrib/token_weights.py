"""Weights of tokens by information: entropy, surprise, or how far a group agrees on a place."""

from __future__ import annotations

import math
from typing import Annotated

import torch
from torch import Tensor

from flowgrpo.objectives import Clip
from flowgrpo.objectives.sequence_losses import GroupLoss
from flowgrpo.objectives.surrogates import Surrogate
from flowgrpo.parts import AtLeast, OneOf, part
from flowgrpo.text.losses import WrappedLoss
from flowgrpo.types import CompletionBatch, unwrap

KINDS = ("entropy", "surprise", "probability", "disagreement")


@part("surrogate", reads_groups=True)
class TokenWeights(WrappedLoss, GroupLoss):
    """Surrogate loss times 1 + strength * z, z the information of a token from 0 to 1, [B, L].

    by: "entropy": of the token's distribution under the present policy.
        "surprise": -log p of the token under the old policy.
        "probability": p itself; with strength -s likely tokens count less. z is p, not scaled.
        "disagreement": the entropy of the tokens that the group has at this place, among the completions that reach it:
        0 where all agree. It stands for the weights of TW-GRPO (2505.24718), a divergence of the group's distributions
        from their geometric mean, which needs all logits of the group. The two may rank places the other way round.

    Other kinds are scaled by the least and the largest value of the group: z = (v - least) / (largest - least), 0 for
    a group with one value. A strength below 0 weakens informative tokens. The divisor of the loss counts all tokens.
    """

    surrogate: Surrogate = Clip(0.2, 0.2)
    by: Annotated[str, OneOf(KINDS)] = "disagreement"
    strength: Annotated[float, AtLeast(-1, below=math.inf)] = 1.0

    @property
    def reads_entropy(self) -> bool:  # type: ignore[override]
        """True if the weights are by entropy."""
        return self.by == "entropy"

    def statistic(self, compared: CompletionBatch) -> Tensor:
        """Return the information of every token, 0 for disagreement, which the tokens of all say: [b, L]."""
        if self.by == "disagreement":
            return torch.zeros_like(compared.old.logp)
        if self.by == "entropy":
            return unwrap(compared.new.entropy)
        return -compared.old.logp if self.by == "surprise" else compared.old.logp.exp()

    def __call__(self, log_ratio: Tensor, advantage: Tensor, old: CompletionBatch) -> Tensor:
        return self.surrogate(log_ratio, advantage, old.old.logp) * self.weights(old)

    def clip_mask(self, log_ratio: Tensor, advantage: Tensor, old: CompletionBatch) -> Tensor:
        return self.surrogate.clip_mask(log_ratio, advantage, old.old.logp) & (self.weights(old) > 0)

    def weights(self, compared: CompletionBatch) -> Tensor:
        """Return the weight of every token: [b, L]."""
        peers, scaled = unwrap(compared.peers), torch.zeros_like(unwrap(compared.peers).statistic)
        for label in peers.group.unique():
            at = peers.group == label
            ids, mask = compared.ids[at], compared.mask[at]
            values = disagreement(ids, mask).to(scaled) if self.by == "disagreement" else peers.statistic[at]
            scaled[at] = values if self.by == "probability" else _min_max_scale(values, mask)
        return 1 + self.strength * scaled[compared.rows]


def disagreement(ids: Tensor, mask: Tensor) -> Tensor:
    """Return the entropy, in nats, of the tokens at each place of one group's completions ids [n, L], at every place of
    each completion: [n, L]. mask: the tokens that count, bool [n, L]."""
    same = ((ids[:, None] == ids) & mask[:, None] & mask).sum(1)  # of each token, how many of the group have it there
    share = same / mask.sum(0).clamp(min=1)
    return -(share.clamp(min=1e-9).log() * mask).sum(0).div(mask.sum(0).clamp(min=1)).expand(mask.shape)


def _min_max_scale(values: Tensor, mask: Tensor) -> Tensor:
    """Return values [n, L] from 0 for the least counted one to 1 for the largest."""
    counted = values[mask]
    if not len(counted) or counted.amax() == counted.amin():
        return torch.zeros_like(values)
    return ((values - counted.amin()) / (counted.amax() - counted.amin())).clamp(0, 1)
