"""Surrogates of texts over another one: bounded ratios of others' samples, and weights of tokens by information."""

import math
from typing import Annotated, Literal

import torch
from torch import Tensor

from flowgrpo.objectives.sequence_losses import GroupLoss
from flowgrpo.objectives.surrogates import Clip, Origin, Surrogate
from flowgrpo.parts import Above, AtLeast, part
from flowgrpo.text.losses import WrappedLoss
from flowgrpo.types import CompletionBatch, unwrap


@part("surrogate", target="likelihood", reads_guided=True, jointly={"gamma probability": "above 0, and above 0 to 1"})
class PolicyShaping(WrappedLoss):
    """-A r/(r+gamma) on samples of guidance that the loss does not read and on prompts' own answers;
    the surrogate's loss on the others, [B, N] (policy shaping of LUFFY, 2504.14945).

    Of a guided sample r is p(o | prompt) / p_old(o | guidance), of an answer p / `probability` (LUFFY: 1). f is below 1
    and is not clipped. Its gradient by log r, gamma r / (r + gamma)^2, is largest at r = gamma: unlikely decisions
    count more than they do by r.
    """

    surrogate: Surrogate = Clip(0.2, 0.2)
    gamma: Annotated[float, Above(0)] = 0.1
    probability: Annotated[float, Above(0, to=1)] = 1.0

    def __call__(self, log_ratio: Tensor, advantage: Tensor, old: Origin) -> Tensor:
        of_answer = old.new - math.log(self.probability)
        ratio = torch.where(old.answers[:, None], of_answer, log_ratio)
        shaped = -advantage * torch.sigmoid(ratio - math.log(self.gamma))
        return torch.where(self._elsewhere(old), shaped, self.surrogate(log_ratio, advantage, old.old))

    def clip_mask(self, log_ratio: Tensor, advantage: Tensor, old: Origin) -> Tensor:
        return self.surrogate.clip_mask(log_ratio, advantage, old.old) & ~self._elsewhere(old)

    @staticmethod
    def _elsewhere(old: Origin) -> Tensor:
        return (old.guided | old.answers)[:, None]


@part("surrogate", reads_groups=True, reads_entropy=lambda loss: loss.by == "entropy")
class TokenWeights(WrappedLoss, GroupLoss):
    """Surrogate loss times 1 + strength * z, z the information of a token from 0 to 1, [B, L].

    by: "entropy": of the token's distribution under the present policy.
        "surprise": -log p of the token under the old policy.
        "probability": p itself; with strength -s likely tokens count less. z is p, not scaled.
        "disagreement": the entropy of the tokens that the group has at this place, among the completions that reach it.
        It stands for the weights of TW-GRPO (2505.24718), a divergence of the group's distributions from their
        geometric mean, which needs all logits of the group. The two may rank places the other way round.

    Other kinds are scaled by the least and the largest value of the group: z = (v - least) / (largest - least), 0 for
    a group with one value. A strength below 0 weakens informative tokens. The divisor of the loss counts all tokens.
    """

    surrogate: Surrogate = Clip(0.2, 0.2)
    by: Literal["entropy", "surprise", "probability", "disagreement"] = "disagreement"
    strength: Annotated[float, AtLeast(-1, below=math.inf)] = 1.0

    def statistic(self, compared: CompletionBatch) -> Tensor:
        """Information of every token, 0 for disagreement, which the tokens of all say: [b, L]."""
        if self.by == "disagreement":
            return torch.zeros_like(compared.old.logp)
        if self.by == "entropy":
            return unwrap(compared.new.entropy)
        return -compared.old.logp if self.by == "surprise" else compared.old.logp.exp()

    def weights(self, compared: CompletionBatch) -> Tensor:
        peers, scaled = unwrap(compared.peers), torch.zeros_like(unwrap(compared.peers).statistic)
        for label in peers.group.unique():
            at = peers.group == label
            ids, mask = compared.ids[at], compared.mask[at]
            values = disagreement(ids, mask).to(scaled) if self.by == "disagreement" else peers.statistic[at]
            counted = values[mask]
            if self.by == "probability":
                scaled[at] = values
            elif len(counted) and counted.amax() != counted.amin():  # else the group has one value
                scaled[at] = ((values - counted.amin()) / (counted.amax() - counted.amin())).clamp(0, 1)
        return 1 + self.strength * scaled[compared.rows]


def disagreement(ids: Tensor, mask: Tensor) -> Tensor:
    """Entropy, in nats, of the tokens that one group's completions ids [n, L] have at each place: [n, L]. mask: the
    tokens that count."""
    same = ((ids[:, None] == ids) & mask[:, None] & mask).sum(1)  # of each token, how many of the group have it there
    share = same / mask.sum(0).clamp(min=1)
    return -(share.clamp(min=1e-9).log() * mask).sum(0).div(mask.sum(0).clamp(min=1)).expand(mask.shape)
