"""Losses of preference pairs on the log-probabilities of whole samples: the family of DPO, for texts and pictures."""

from __future__ import annotations

import math
from typing import Annotated

from torch import Tensor
from torch.nn.functional import softplus

from flowgrpo.objectives.sequence_losses import SampleLoss
from flowgrpo.parts import Above, AtLeast, OneOf, part
from flowgrpo.types import CompletionBatch, NoisedBatch, Scored, required

FORMS = ("logistic", "squared", "hinge")


@part("surrogate", reads_groups=True, reads_advantages=True, jointly={"beta smoothing": "above 0, and 0 to 1/2"})
class PairLoss(SampleLoss):
    """Loss of preference pairs, [B, N]: the mean over the pairs of a group with different advantages of f(h), h = beta
    (s_w - s_l) - margin - offset (A_w - A_l).

    s: of a sample the sum over its decisions of log p - log p_reference; without `reference` of log p; with `mean` the
        mean over its decisions.
    w, l: the sample of the larger advantage A, and the other.
    form: "logistic": f = -log sigmoid(h) (DPO, 2305.18290). "squared": f = ((h - 1/2) / beta)^2 (IPO, 2310.12036).
        "hinge": f = max(1 - h, 0) (SLiC-HF, 2305.10425).
    smoothing: probability e of a wrong label: (1 - e) f(h) + e f(-h) (cDPO).
    margin: SimPO's target margin (2405.14734), which has `mean` and no `reference`.
    offset: weight of the rewards' difference, ODPO's (2402.10571), of an advantage that keeps their scale.
    likelihood: weight of a further term, -log p of each group's best sample, the mean over its decisions (RPO,
        2404.19733; CPO, 2401.08417).

    Of texts with `SequenceMean`. Of pictures log p is -e/2, e the mean squared error at a noised final: with `beta` of
    `Preference` this is its loss. A group of equal advantages has the value 0.
    """

    beta: Annotated[float, Above(0)] = 0.1
    form: Annotated[str, OneOf(FORMS)] = "logistic"
    mean: bool = False
    reference: bool = True
    smoothing: Annotated[float, AtLeast(0, below=0.5)] = 0.0
    margin: float = 0.0
    offset: Annotated[float, AtLeast(0)] = 0.0
    likelihood: Annotated[float, AtLeast(0)] = 0.0

    @property
    def reads_reference(self) -> bool:  # type: ignore[override]
        """True if samples are compared with the reference."""
        return self.reference

    def statistic(self, compared: CompletionBatch | NoisedBatch) -> Tensor:
        """Return s of every sample: [b]."""
        logp, mask = compared.new.logp, compared.new.mask
        if self.reference:
            logp = logp - required(compared.reference).logp
        total = (logp * mask).sum(1)
        return total / mask.sum(1).clamp(min=1) if self.mean else total

    def __call__(self, log_ratio: Tensor, advantage: Tensor, old: CompletionBatch | NoisedBatch) -> Tensor:
        peers = required(old.peers)
        group = peers.members(old.rows).to(log_ratio.dtype)
        apart = advantage - peers.advantage
        sign = apart.sign() * group
        h = sign * self.beta * (self.statistic(old)[:, None] - peers.statistic) - self.margin \
            - self.offset * apart.abs()
        losses = (1 - self.smoothing) * self.loss(h) + (self.smoothing * self.loss(-h) if self.smoothing else 0.0)
        size, pairs = group.sum(1, keepdim=True), _pairs(peers.advantage, group)
        value = (losses * sign.abs()).sum(1, keepdim=True) * size / (2 * pairs.clamp(min=1))
        value = 2 * value - value.detach()  # half of a pair's gradient is its partner's
        if self.likelihood:
            pull = _best(peers.advantage, group, old.rows) * size * (pairs > 0)
            value = value - self.likelihood * pull * _mean(old.new)
        return value.expand_as(log_ratio)

    def loss(self, h: Tensor) -> Tensor:
        """Return f(h), of any shape."""
        if self.form == "squared":
            return ((h - 0.5) / self.beta).square()
        return softplus(-h) if self.form == "logistic" else (1 - h).clamp(min=0)


def _best(advantage: Tensor, group: Tensor, rows: Tensor) -> Tensor:
    """Return the share of each row [b] in the best samples of its group [b, m], by the advantages [m]: [b, 1]."""
    highest = advantage.masked_fill(group == 0, -math.inf).amax(1, keepdim=True)
    best = group * (advantage == highest)
    return best.gather(1, rows[:, None]) / best.sum(1, keepdim=True)


def _mean(scored: Scored) -> Tensor:
    """Return the mean log-probability of each row's decisions: [b, 1]."""
    return (scored.logp * scored.mask).sum(1, keepdim=True) / scored.mask.sum(1, keepdim=True).clamp(min=1)


def _pairs(advantage: Tensor, group: Tensor) -> Tensor:
    """Return the number of pairs of different advantages [m] in each row's group [b, m]: [b, 1]."""
    differ = (advantage[:, None] != advantage).to(group.dtype)
    return ((group @ differ) * group).sum(1, keepdim=True) / 2
