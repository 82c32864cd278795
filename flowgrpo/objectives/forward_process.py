"""Losses of forward-process methods: velocity errors of the model on its own noised samples.

e = mean((v - u)^2), the error at a sample's target u = noise - data, is -2 log N(u; v, 1) up to a constant: a better
fit is a more likely sample. All losses are per decision, [B, 1], with the interface of the surrogates of `objectives`;
their `old` is a `NoisedBatch`. Samples of a group are compared through `GroupStatistics`, without a gradient. The own
term of a sample has the whole gradient, so a micro-batch may hold a part of the group.
"""

from typing import Annotated

import torch
from torch import Tensor
from torch.nn.functional import softplus

from flowgrpo.objectives.ratios import error
from flowgrpo.objectives.sequence_losses import over_group
from flowgrpo.objectives.surrogates import Surrogate, cut
from flowgrpo.parts import Above, AtLeast, part
from flowgrpo.types import NoisedBatch, unwrap

LEAST = 1e-5  # lower bound of a self-normalised error's weight


class OfNoised(Surrogate):
    """Surrogate of noised samples only: its `old` is a `NoisedBatch`.

    The `statistic` of one that reads groups is statistic(noised) -> [b, 1].
    """

    reads_target = "noised finals"


@part("surrogate", reads_means=True)
class NegativeAware(OfNoised):
    """Loss of DiffusionNFT (2509.16117 and its code), most/beta * (r l(v+) + (1 - r) l(v-)): [B, 1].

    r = A / (2 most) + 1/2 within 0 to 1; v+ = v_old + beta (v - v_old), v- = v_old - beta (v - v_old). l(v) is the mean
    squared error of the data x_t - t v predicted from a velocity, over its mean absolute error, which is detached and
    at least 1e-5. Good samples pull v towards their target, bad ones push it away. With advantage 0 the gradient at v =
    v_old is 0.
    """

    beta: Annotated[float, Above(0)] = 1.0
    most: Annotated[float, Above(0)] = 5.0

    def __call__(self, log_ratio: Tensor, advantage: Tensor, old: NoisedBatch) -> Tensor:
        target = old.target[:, None]
        before = unwrap(old.old.mean)
        moved = self.beta * (unwrap(old.new.mean) - before)
        good = goodness(advantage, self.most)
        towards, away = (_scale_free_error(old.time * (v - target)) for v in (before + moved, before - moved))
        return self.most / self.beta * (good * towards + (1 - good) * away)


@part("surrogate", reads_means=True, reads_groups=True)
class CentredReward(OfNoised):
    """Loss of CRD (2603.14128, as in Flow-Factory), most/beta * (beta (R - mean R) - (r - mean r))^2: [B, 1].

    R = l(v_old) - l(v) is the implicit reward, l(v) = e / w with w = mean|v - u|, detached and at least 1e-5. r = A /
    (2 most) + 1/2 within 0 to 1; means are over the group. The residuals add up to 0, so a mean without a gradient
    changes no gradient.
    """

    beta: Annotated[float, Above(0)] = 1.0
    most: Annotated[float, Above(0)] = 5.0

    def statistic(self, noised: NoisedBatch) -> Tensor:
        now, before = (_scale_free_error(unwrap(score.mean) - noised.target[:, None])
                       for score in (noised.new, noised.old))
        return before - now

    def __call__(self, log_ratio: Tensor, advantage: Tensor, old: NoisedBatch) -> Tensor:
        peers = unwrap(old.peers)
        group = peers.members(old.rows)
        reward = self.statistic(old) - over_group(peers.statistic, group)
        target = goodness(advantage, self.most) - over_group(goodness(peers.advantage, self.most), group)
        return self.most / self.beta * (self.beta * reward - target).square()


@part("surrogate", reads_reference=True, reads_groups=True, jointly={"low high": "0 to 1 and 0 or more"})
class GroupPreference(OfNoised):
    """Loss of DGPO (2510.08425 and its code), W A e: [B, 1], without a gradient if exp(e_old - e) has left 1 - low to 1
    + high on the side that A pushes it to.

    W = sigmoid(beta * mean over the group of A (e - e_reference)), one detached number per group and time. It is near 0
    if the good samples are already better matched than by the reference, and the bad ones worse. The clip reads the
    log-ratio of Matching(1).
    """

    beta: Annotated[float, Above(0)] = 100.0
    low: Annotated[float, AtLeast(0, to=1)] = 0.05
    high: Annotated[float, AtLeast(0)] = 0.05

    def statistic(self, noised: NoisedBatch) -> Tensor:
        return error(noised.new) - error(unwrap(noised.reference))

    def __call__(self, log_ratio: Tensor, advantage: Tensor, old: NoisedBatch) -> Tensor:
        loss = error(old.new)
        loss = torch.where(self.clip_mask(log_ratio, advantage, old), loss.detach(), loss)
        return self.weight(old) * advantage * loss

    def weight(self, noised: NoisedBatch) -> Tensor:
        """Return W of every sample's group: [b, 1]."""
        peers = unwrap(noised.peers)
        return torch.sigmoid(self.beta * over_group(peers.advantage * peers.statistic, peers.members(noised.rows)))

    def clip_mask(self, log_ratio: Tensor, advantage: Tensor, old: NoisedBatch | None = None) -> Tensor:
        return cut(log_ratio.detach().expm1(), advantage, -self.low, self.high)


@part("surrogate", reads_reference=True, reads_groups=True)
class Preference(OfNoised):
    """Loss of Diffusion-DPO (2311.12908 and its code), -log sigmoid(-beta/2 (d_w - d_l)), of the pairs of a group: [B,
    1].

    d = e - e_reference at one time, w the sample of the larger advantage and l the other; beta applies to mean errors.
    A pair of equal advantages has the value log 2 and no gradient. A sample's value is the mean over its pairs. The
    mean over the samples is that over the pairs, and so is its gradient. A sample whose others all lack a reward has
    the value 0.

    similarity: the weight of a further term, e of the first sample of each group, once per group. For recorded pairs
    this sample is the preferred image if the file labels it, and for RPO (2407.12164) the image of the subject,
    preferred or not.
    """

    beta: Annotated[float, Above(0)] = 100.0
    similarity: Annotated[float, AtLeast(0)] = 0.0

    def statistic(self, noised: NoisedBatch) -> Tensor:
        return error(noised.new) - error(unwrap(noised.reference))

    def __call__(self, log_ratio: Tensor, advantage: Tensor, old: NoisedBatch) -> Tensor:
        value, group, others = preference_loss(self.statistic(old), advantage, old, self.beta)
        if not self.similarity:
            return value
        places = torch.arange(group.shape[1], device=old.rows.device)
        before = (group & (places < old.rows[:, None])).any(1, keepdim=True)
        first = ~before & others.any(1, keepdim=True)  # the remaining sample of a pair may be either one
        return value + self.similarity * first * group.sum(1, keepdim=True) * error(old.new)


@part("surrogate", reads_reference=True, reads_groups=True)
class StepPreference(OfNoised):
    """Loss of PSO (2410.03190), -log sigmoid(beta (r_w - r_l)), of the pairs of a group at one recorded step: [B, 1].

    r is the method's log-ratio of a sample's own step to the reference, w the sample of the larger advantage and l the
    other. Pairs count as for `Preference`. beta is in the unit of `gaussian.log_prob`, a mean over dimensions; the
    paper's, of their sum, is smaller by their number.
    """

    reads_target = "steps"
    beta: Annotated[float, Above(0)] = 100.0

    def statistic(self, noised: NoisedBatch) -> Tensor:
        return -2 * unwrap(noised.measure)(noised.new, unwrap(noised.reference))

    def __call__(self, log_ratio: Tensor, advantage: Tensor, old: NoisedBatch) -> Tensor:
        return preference_loss(self.statistic(old), advantage, old, self.beta)[0]


def preference_loss(own: Tensor, advantage: Tensor, of: NoisedBatch, beta: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return (the mean of -log sigmoid(-beta/2 (d_w - d_l)) over a sample's pairs [b, 1], its group, the others of it:
    masks [b, m]). own: d of the samples [b, 1], whose value has the gradient of both sides of their pairs."""
    peers = unwrap(of.peers)
    group = peers.members(of.rows)
    others = group & (of.rows[:, None] != torch.arange(len(peers.statistic), device=of.rows.device))
    sign = (advantage - peers.advantage).sign()
    losses = softplus(sign * beta / 2 * (own - peers.statistic))
    value = (losses * others).sum(1, keepdim=True) / others.sum(1, keepdim=True).clamp(min=1)
    return 2 * value - value.detach(), group, others  # half of a pair's gradient is its partner's


def goodness(advantage: Tensor, most: float) -> Tensor:
    """Advantage [...] as a share of good, [...]: 0 at -most, 1/2 at 0, 1 at most."""
    return (advantage / (2 * most) + 0.5).clamp(0, 1)


def _scale_free_error(apart: Tensor) -> Tensor:
    """Mean square over the mean absolute value, detached and at least LEAST, of values [B, 1, *D]: [B, 1]."""
    apart = apart.flatten(2)
    return apart.square().mean(2) / apart.detach().abs().mean(2).clamp(min=LEAST)
