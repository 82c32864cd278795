"""Losses of whole completions: right against wrong ones, importance of a whole text, regressed advantages.

All are per token, [B, L], or per transition, [B, 1], with the interface of the surrogates of `objectives`; the `old` of
a `GroupLoss` is a `CompletionBatch`. Samples of a group are compared through `GroupStatistics`, without a gradient. A
completion's weight in its group's loss is one number, so a micro-batch may hold a part of the group. Log-ratios and
log-probabilities are 0 where a token does not count, so sums over a row need no mask.

`PairLoss` is the family of DPO, on preference pairs of texts and images.
"""

import math
from typing import Annotated, Literal

import torch
from torch import Tensor
from torch.nn.functional import softplus

from flowgrpo.objectives.surrogates import Surrogate
from flowgrpo.parts import Above, AtLeast, part
from flowgrpo.types import CompletionBatch, NoisedBatch, unwrap


@part("surrogate")
class TaperedReinforce(Surrogate):
    """-w A (1 + log_ratio), [B, L], w = 1 for A >= 0 and the ratio, at most `most` and held constant, for A < 0 (TOPR,
    2503.14286).

    A good sample pulls at any probability. A bad one loses its push as it becomes unlikely. So the loss is bounded
    without a KL or a clip, on old samples too. With `CompletionRatio` as published.
    """

    most: Annotated[float, Above(0)] = 1.0

    def __call__(self, log_ratio: Tensor, advantage: Tensor, old: Tensor | None = None) -> Tensor:
        assert advantage.ndim == 2, advantage.shape
        taper = log_ratio.detach().clamp(max=math.log(self.most)).exp()
        return -torch.where(advantage < 0, taper, 1.0) * advantage * (1 + log_ratio)

    def clip_mask(self, log_ratio: Tensor, advantage: Tensor, old: Tensor | None = None) -> Tensor:
        """Mask where the weight is bounded, which cuts no gradient, bool [B, L]."""
        return (advantage < 0) & (log_ratio > math.log(self.most))


@part("surrogate")
class NegativeAwareText(Surrogate):
    """Loss of NFT for text (2505.18116 and its code), [B, L]: -w log r for a right completion, and -w log of the
    implicit negative policy's ratio, (1 - p r) / (1 - p), for a wrong one.

    r: the token's ratio.
    p: the share of right completions in the group, within 0.02 to 0.98 (its code).
    A: that of `baselines.Correctness`, 1 - p or -p; where it is 0 so is the loss.
    w: 1 - p with `weight` "linear", whose first gradient is Dr. GRPO's, or sqrt((1 - p) / p) with "sqrt", GRPO's.
    floor: lower bound of the negative ratio; its gradient is kept there.
    """

    weight: Literal["sqrt", "linear"] = "linear"
    floor: Annotated[float, Above(0)] = 1.0

    def __call__(self, log_ratio: Tensor, advantage: Tensor, old: Tensor | None = None) -> Tensor:
        share, negative = self._negative(log_ratio, advantage)
        weight = ((1 - share) / share).sqrt() if self.weight == "sqrt" else 1 - share
        negative = negative + (negative.clamp(min=self.floor) - negative).detach()
        return -weight * torch.where(advantage > 0, log_ratio, negative.log()) * (advantage != 0)

    def clip_mask(self, log_ratio: Tensor, advantage: Tensor, old: Tensor | None = None) -> Tensor:
        """Mask where the negative ratio is at its floor, which cuts no gradient, bool [B, L]."""
        return (advantage < 0) & (self._negative(log_ratio, advantage)[1] < self.floor)

    def _negative(self, log_ratio: Tensor, advantage: Tensor) -> tuple[Tensor, Tensor]:
        """p, and (1 - p r) / (1 - p) [B, L], computed from r - 1. Beyond e^10 a ratio has no gradient (its code)."""
        share = torch.where(advantage > 0, 1 - advantage, -advantage).clamp(0.02, 0.98)
        return share, 1 - share / (1 - share) * log_ratio.clamp(max=10).expm1()


class GroupLoss(Surrogate):
    """Surrogate whose `old` is a `CompletionBatch`.

    The `statistic` of one that reads groups is statistic(compared) -> [b, ...].
    """

    reads_target = "tokens"


class SampleLoss(GroupLoss):
    """Surrogate that compares the samples of a group by one number each: completions, transitions of one recorded step,
    or noised finals. Its `old` is a `CompletionBatch` or a `NoisedBatch`."""

    reads_target = "decisions"


@part("surrogate", reads_groups=True, reads_advantages=True,
      jointly={"temperature beta delta": "above 0, and 0 or more"})
class Discriminative(GroupLoss):
    """Loss of DisCO (2505.12366), [B, L]: temperature * log mean over wrong of exp(s / temperature), less the mean over
    right ones of s, plus beta max(KL - delta, 0)^2.

    s: of a completion the mean log-probability of its tokens (`score` "log"; temperature 10) or their mean ratio
    ("ratio"; temperature 1). An infinite temperature takes the mean of the wrong ones too (DisCO-b). Right is A > 0,
    wrong A < 0, as `baselines.Correctness` gives them; the mean over right ones is weighted by A, which
    `baselines.Decoupled` makes DRPO's. Without both, scores have no gradient. KL is the mean over
    completions of the mean of log p_old - log p, KL(old || new) on samples of old: over the group, where the paper has
    the whole batch. With `SequenceMean`, whose mean over rows is then that of groups of one size. The returned values
    have this loss's gradient, and its value to first order.
    """

    score: Literal["log", "ratio"] = "log"
    temperature: Annotated[float, Above(0)] = 10.0
    beta: Annotated[float, AtLeast(0)] = 1000.0
    delta: Annotated[float, AtLeast(0)] = 1e-4

    def statistic(self, compared: CompletionBatch) -> Tensor:
        """Score and the KL estimate of every completion: [b, 2]."""
        mask = compared.new.mask
        return torch.stack([token_mean(self._scores(compared), mask), token_mean(-compared.log_ratio, mask)], 1)

    def __call__(self, log_ratio: Tensor, advantage: Tensor, old: CompletionBatch) -> Tensor:
        peers = unwrap(old.peers)
        group, (scores, divergence) = peers.members(old.rows), peers.statistic.unbind(1)
        right, wrong = group & (peers.advantage > 0), group & (peers.advantage < 0)
        tempered = (scores / self.temperature).expand_as(wrong).masked_fill(~wrong, -math.inf)
        hard = tempered.softmax(1).gather(1, old.rows[:, None])
        size = group.sum(1, keepdim=True)
        good = (right * peers.advantage).sum(1, keepdim=True)
        pull = torch.where(advantage > 0, -advantage / good, hard) * size
        comparable = right.any(1, keepdim=True) & wrong.any(1, keepdim=True) & (advantage != 0)
        excess = (over_group(divergence, group) - self.delta).clamp(min=0)
        return torch.where(comparable, pull, 0.0) * self._scores(old) - 2 * self.beta * excess * log_ratio

    def _scores(self, compared: CompletionBatch) -> Tensor:
        return compared.new.logp if self.score == "log" else compared.log_ratio.exp()


@part("surrogate", reads_groups=True, reads_advantages=True)
class Regressed(SampleLoss):
    """Loss of Reg-GRPO (2506.07464), (z - A)^2, [B, L]: the advantage regressed on z, the log-ratio less its group's
    mean over its group's deviation (ddof 0), without clip or min.

    The deviation is held constant and at least `least`, both ours: at the first update all log-ratios are 0 and so is
    their deviation. Below it the target is a log-ratio of least * A; above it only the shape counts. Of completions
    with `CompletionRatio` and `SequenceSum`; of images log-ratios are means over a latent, and `least` is 1e-4 or so.
    """

    least: Annotated[float, Above(0)] = 0.1

    def statistic(self, compared: CompletionBatch | NoisedBatch) -> Tensor:
        """Log-ratio of every sample: [b]."""
        return token_mean(compared.log_ratio, compared.new.mask)

    def __call__(self, log_ratio: Tensor, advantage: Tensor, old: CompletionBatch | NoisedBatch) -> Tensor:
        peers = unwrap(old.peers)
        group = peers.members(old.rows)
        mean = over_group(peers.statistic, group)
        spread = over_group((peers.statistic - mean).square(), group).sqrt().clamp(min=self.least)
        return ((log_ratio - mean) / spread - advantage).square()


@part("surrogate", reads_groups=True, reads_reference=True, reads_advantages=True,
      jointly={"beta best trust": "above 0, and 0 or more of trust"})
class PairwisePreference(SampleLoss):
    """Loss of TRPA (2504.04524 and its code), [B, L]: the mean over the pairs of a group with different advantages of
    -log sigmoid(k beta (g_w - g_l)), plus trust * an estimate of KL(old || new) per token.

    g: the mean over a completion's tokens of log p - log p_reference.
    w: the completion of the larger advantage, its preference level; l: the other.
    k: `best` if w has the group's best level, otherwise 1.

    The estimate is r - 1 - log r. With `SequenceMean`: a group's weight is then its number of completions.
    """

    beta: Annotated[float, Above(0)] = 0.1
    best: Annotated[float, Above(0)] = 2.5
    trust: Annotated[float, AtLeast(0)] = 1e-3

    def statistic(self, compared: CompletionBatch | NoisedBatch) -> Tensor:
        """Return g of every sample: [b]."""
        return token_mean(compared.new.logp - unwrap(compared.reference).logp, compared.new.mask)

    def __call__(self, log_ratio: Tensor, advantage: Tensor, old: CompletionBatch | NoisedBatch) -> Tensor:
        peers = unwrap(old.peers)
        group = peers.members(old.rows)
        sign = (advantage - peers.advantage).sign() * group
        top = peers.advantage.masked_fill(~group, -math.inf).amax(1, keepdim=True)
        scale = self.beta * torch.where(torch.maximum(advantage, peers.advantage) == top, self.best, 1.0)
        apart = sign * scale * (peers.statistic[old.rows, None] - peers.statistic)
        pairs = _pairs(peers.advantage, group.to(peers.advantage.dtype))
        share = group.sum(1, keepdim=True) / pairs.clamp(min=1)
        slope = -(sign * scale * torch.sigmoid(-apart)).sum(1, keepdim=True) * share
        value = (softplus(-apart) * sign.abs()).sum(1, keepdim=True) * share / 2
        pull = slope * (old.new.logp - unwrap(old.reference).logp)
        moved = old.new.logp - old.old.logp
        return value + pull - pull.detach() + self.trust * (moved.expm1() - moved)


def token_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Mean of values [b, L] over each row's tokens where the mask is true, 0 where it is nowhere: [b]."""
    return (values * mask).sum(1) / mask.sum(1).clamp(min=1)


def over_group(values: Tensor, group: Tensor) -> Tensor:
    """Mean over each row's group, bool [b, m], of values [m] or [b, m]: [b, 1]."""
    return (values * group).sum(1, keepdim=True) / group.sum(1, keepdim=True)


@part("surrogate", reads_groups=True, reads_advantages=True, reads_reference=lambda loss: loss.reference,
      jointly={"beta smoothing": "above 0, and 0 to 1/2"})
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

    Of texts with `SequenceMean`. Of images log p is -e/2, e the mean squared error at a noised final: with `beta` of
    `Preference` this is its loss. A group of equal advantages has the value 0.
    """

    beta: Annotated[float, Above(0)] = 0.1
    form: Literal["logistic", "squared", "hinge"] = "logistic"
    mean: bool = False
    reference: bool = True
    smoothing: Annotated[float, AtLeast(0, below=0.5)] = 0.0
    margin: float = 0.0
    offset: Annotated[float, AtLeast(0)] = 0.0
    likelihood: Annotated[float, AtLeast(0)] = 0.0

    def statistic(self, compared: CompletionBatch | NoisedBatch) -> Tensor:
        """Return s of every sample: [b]."""
        logp, mask = compared.new.logp, compared.new.mask
        if self.reference:
            logp = logp - unwrap(compared.reference).logp
        return token_mean(logp, mask) if self.mean else (logp * mask).sum(1)

    def __call__(self, log_ratio: Tensor, advantage: Tensor, old: CompletionBatch | NoisedBatch) -> Tensor:
        peers = unwrap(old.peers)
        group = peers.members(old.rows).to(log_ratio.dtype)
        apart = advantage - peers.advantage
        sign = apart.sign() * group
        h = sign * self.beta * (self.statistic(old)[:, None] - peers.statistic) - self.margin \
            - self.offset * apart.abs()
        losses = (1 - self.smoothing) * self.loss(h) + (self.smoothing * self.loss(-h) if self.smoothing else 0.0)
        size = group.sum(1, keepdim=True)
        pairs = _pairs(peers.advantage, group)
        value = (losses * sign.abs()).sum(1, keepdim=True) * size / (2 * pairs.clamp(min=1))
        value = 2 * value - value.detach()  # half of a pair's gradient is its partner's
        if self.likelihood:
            # The pull is each row's share in the best samples of its group, [b, 1].
            best = group * (peers.advantage == peers.advantage.masked_fill(group == 0, -math.inf).amax(1, keepdim=True))
            pull = best.gather(1, old.rows[:, None]) / best.sum(1, keepdim=True) * size * (pairs > 0)
            value = value - self.likelihood * pull * token_mean(old.new.logp, old.new.mask)[:, None]
        return value.expand_as(log_ratio)

    def loss(self, h: Tensor) -> Tensor:
        """Return f(h), of any shape."""
        if self.form == "squared":
            return ((h - 0.5) / self.beta).square()
        return softplus(-h) if self.form == "logistic" else (1 - h).clamp(min=0)


def _pairs(advantage: Tensor, group: Tensor) -> Tensor:
    """Number of pairs of different advantages [m] in each row's group [b, m]: [b, 1]."""
    differ = (advantage[:, None] != advantage).to(group.dtype)
    return ((group @ differ) * group).sum(1, keepdim=True) / 2
