"""Surrogates of completions: losses on some of the tokens over another surrogate (the field `surrogate`), regression on
the random policy's values, and classification by rewards that are labels.
"""

import math
from typing import Annotated, Any, Literal

import torch
from torch import Tensor
from torch.nn.functional import leaky_relu, softplus

from flowgrpo.objectives.sequence_losses import GroupLoss, SampleLoss
from flowgrpo.objectives.surrogates import Clip, DivergenceMask, Reinforce, Surrogate
from flowgrpo.parts import Above, AtLeast, OneOf, part
from flowgrpo.types import CompletionBatch, NoisedBatch, unwrap

ROUNDING = 1e-5  # of a text's log-probability: its replay in a batch of another size differs by less


@part(low=lambda loss: loss.surrogate.low, high=lambda loss: loss.surrogate.high)
class WrappedLoss(Surrogate):
    """Surrogate over another one that reads at most the old log-probability; its range is that of the inner one.

    Unless it is overridden, the loss [b, L] is that of the inner one times `weights`.
    """

    surrogate: Surrogate

    def __post_init__(self) -> None:
        taken = self.surrogate
        if isinstance(taken, (GroupLoss, DivergenceMask)) or not callable(taken) or taken.reads_guided:
            raise ValueError(f"{type(self).__name__}: surrogate is {self.surrogate!r}, expected one of single tokens, "
                             "such as Clip")

    def __call__(self, log_ratio: Tensor, advantage: Tensor, old: Any) -> Tensor:
        return self.surrogate(log_ratio, advantage, old.old.logp) * self.weights(old)

    def clip_mask(self, log_ratio: Tensor, advantage: Tensor, old: Any) -> Tensor:
        return self.surrogate.clip_mask(log_ratio, advantage, old.old.logp) & (self.weights(old) > 0)

    def weights(self, compared: CompletionBatch) -> Tensor:
        """Factor of every token's loss, [b, L]; 0 where it has none of the inner one."""
        return torch.ones_like(compared.old.logp)


@part("surrogate", reads_entropy=True)
class EntropyBonus(WrappedLoss, GroupLoss):
    """Surrogate loss minus weight * entropy of every token's distribution, in nats, [B, L]: PPO's bonus
    (1707.06347, equation 9), which keeps a policy from settling on one answer.

    It is the mean over the trained tokens, also in a loss of rows, without weights of tokens (TRL).
    """

    surrogate: Surrogate = Clip(0.2, 0.2)
    weight: Annotated[float, Above(-math.inf, below=math.inf)] = 0.01

    def __call__(self, log_ratio: Tensor, advantage: Tensor, old: CompletionBatch) -> Tensor:
        return self.surrogate(log_ratio, advantage, old.old.logp) + self.over_tokens(old)

    def over_tokens(self, old: CompletionBatch) -> Tensor:
        return -self.weight * unwrap(old.new.entropy)


@part("surrogate", reads_entropy=True, reads_groups=True, reads_advantages=lambda loss: loss.by == "advantage")
class HighEntropy(WrappedLoss, GroupLoss):
    """Surrogate loss on the `share` of tokens with the largest entropies, 0 on the others, [B, L] (2506.01939:
    0.2, on DAPO): few tokens decide the direction of a text.

    by: "entropy", or "advantage" for |A| times the entropy (D3S, 2509.22115, its token level).
    last: the share moves linearly to it over the run; None: it stays. D3S relaxes it, as `MaxVariance` its samples.

    The entropies are the present policy's. The share is of the tokens of a group, rounded up; the paper's is of a
    batch. The divisor of the loss still counts all tokens, as in the paper.
    """

    surrogate: Surrogate = Clip(0.2, 0.28)
    share: Annotated[float, Above(0, to=1, words="above 0 and at most 1")] = 0.2
    by: Literal["entropy", "advantage"] = "entropy"
    last: Annotated[float | None, Above(0, to=1, words="above 0 and at most 1")] = None

    def statistic(self, compared: CompletionBatch) -> Tensor:
        return unwrap(compared.new.entropy).masked_fill(~compared.new.mask, -math.inf)

    def __call__(self, log_ratio: Tensor, advantage: Tensor, old: CompletionBatch) -> Tensor:
        return self.surrogate(log_ratio, advantage, old.old.logp).where(self.weights(old), 0.0)

    def weights(self, compared: CompletionBatch) -> Tensor:
        """The trained tokens, bool [b, L]; all tokens tied at the threshold are trained."""
        peers = unwrap(compared.peers)
        entropies, group = peers.statistic, peers.group
        if self.by == "advantage":
            entropies = (entropies * peers.advantage.abs()[:, None]).masked_fill(~compared.mask, -math.inf)
        selected = torch.zeros_like(compared.mask)
        share = self.share if self.last is None else self.share + (self.last - self.share) * compared.progress
        for label in group.unique():
            own = entropies[group == label]
            counted = own[own > -math.inf]
            least = counted.topk(max(math.ceil(share * len(counted) - 1e-9), 1))[0][-1]
            selected[group == label] = own >= least
        return selected[compared.rows]


@part("surrogate", reads_advantages=True,
      jointly={"amplify most_entropy": "0 or more, and above 0 (infinity for no limit)"},
      reads_entropy=lambda loss: loss.most_entropy < math.inf, reads_groups=lambda loss: loss.reads_entropy)
class ConflictTokens(WrappedLoss, GroupLoss):
    """Surrogate loss whose conflict tokens are not pushed down: they are pulled up `amplify` times as strongly, [B, L]
    (GTPO, 2508.03772, and its code).

    A conflict token is at the same place, counted from the start or from the end, of a good and of a bad completion of
    the group (A above and below 0). So are all tokens before it, or after it.

    most_entropy: completions with a larger mean entropy are left out; the paper's threshold is log 2, for models that
    start below it. A group without a completion below it is of another model: it keeps all of them (ours).
    """

    surrogate: Surrogate = Reinforce()
    amplify: Annotated[float, AtLeast(0)] = 2.0
    most_entropy: Annotated[float, Above(0)] = math.inf

    def statistic(self, compared: CompletionBatch) -> Tensor:
        mask = compared.new.mask
        return (unwrap(compared.new.entropy) * mask).sum(1) / mask.sum(1).clamp(min=1)

    def weights(self, compared: CompletionBatch) -> Tensor:
        peers, conflicting = unwrap(compared.peers), torch.zeros_like(compared.mask)
        for label in peers.group.unique():
            at = peers.group == label
            conflicting[at] = conflicts(compared.ids[at], compared.mask[at], peers.advantage[at])
        good = peers.advantage[compared.rows, None] > 0
        weights = torch.where(conflicting[compared.rows], torch.where(good, self.amplify, 0.0), 1.0)
        if not self.reads_entropy:
            return weights
        certain = peers.statistic <= self.most_entropy
        some = (peers.members(compared.rows) & certain).any(1)
        return weights * (certain[compared.rows] | ~some)[:, None]


@part("surrogate", target="tokens")
class LikelihoodFloor(WrappedLoss):
    """Surrogate loss plus weight * max(log p_old - log p, 0) on good completions: the tokens, [B, L], of those with
    A >= 0 whose log-probability fell as a whole (LLDS, 2512.04220).

    It keeps good texts from becoming unlikely with the bad ones they resemble. The term is 0, with no gradient, at the
    first update: a text that fell by ROUNDING or less has not fallen.
    """

    surrogate: Surrogate = Clip(0.2, 0.2)
    weight: Annotated[float, AtLeast(0)] = 0.1

    def __call__(self, log_ratio: Tensor, advantage: Tensor, old: Tensor | None = None) -> Tensor:
        fell = (advantage >= 0) & (log_ratio.sum(1, keepdim=True) < -ROUNDING)
        return self.surrogate(log_ratio, advantage, old) + self.weight * torch.relu(-log_ratio) * fell

    def clip_mask(self, log_ratio: Tensor, advantage: Tensor, old: Tensor | None = None) -> Tensor:
        return self.surrogate.clip_mask(log_ratio, advantage, old)


@part("surrogate", reads_answers=True, jointly={"focus probability": "0 or more, and above 0 to 1"})
class ExpertMixture(WrappedLoss, GroupLoss):
    """Surrogate loss on sampled completions, and on a prompt's own answer -r A (1 - p)^focus, r = 2 p / (p_expert
    + p_old), the last factor held constant, [B, L] (RL-PLUS, 2508.00222).

    With a kernel whose `expert` is above 0. r is bounded where either policy finds the token likely, and is not
    clipped. Tokens that are already likely have less weight, by `focus`, the paper's gamma, 1/2 in its code. The policy
    of the answers is unknown. probability: p_expert of every token; None: (1 + p_old) / 2, the estimate of its code.
    """

    surrogate: Surrogate = Clip(0.2, 0.2)
    focus: Annotated[float, AtLeast(0)] = 0.5
    probability: Annotated[float | None, Above(0, to=1)] = None

    def __call__(self, log_ratio: Tensor, advantage: Tensor, old: CompletionBatch) -> Tensor:
        assert old.expert is not None, "ExpertMixture needs to know which completions are answers"
        present, past = old.new.logp.exp(), old.old.logp.exp()
        ratio = 2 * present / (past + ((1 + past) / 2 if self.probability is None else self.probability))
        guided = -ratio * advantage * (1 - present.detach()).clamp(min=0).pow(self.focus)
        return guided.where(old.expert[old.rows, None], self.surrogate(log_ratio, advantage, old.old.logp))

    def clip_mask(self, log_ratio: Tensor, advantage: Tensor, old: CompletionBatch) -> Tensor:
        return self.surrogate.clip_mask(log_ratio, advantage, old.old.logp) & ~unwrap(old.expert)[old.rows, None]


@part("surrogate", reads_groups=True, reads_answers=True)
class Calibrated(WrappedLoss, GroupLoss):
    """Surrogate loss plus weight * |A| * LeakyReLU(-s d, slope) on sampled completions, 0 on answers, [B, L]
    (CalibRL, 2602.20197, and its code).

    s: the sign of the advantage A, that of the sample's correctness for rewards 0 and 1.
    d: log p less the old log-probability of the token at the same place of the group's first answer, 0 beyond its end.
        A right text less likely than the answer, and a wrong one likelier, has the full slope; others have `slope`.

    With a kernel whose `expert` is above 0. A group without an answer has the surrogate loss alone. The code's mean and
    deviation are those of the drawn completions; here the answer counts in its group, and in the divisor of the loss.
    """

    surrogate: Surrogate = Clip(0.2, 0.2)
    weight: Annotated[float, AtLeast(0)] = 0.1
    slope: Annotated[float, AtLeast(0, to=1)] = 0.5

    def statistic(self, compared: CompletionBatch) -> Tensor:
        return compared.old.logp

    def __call__(self, log_ratio: Tensor, advantage: Tensor, old: CompletionBatch) -> Tensor:
        answers = unwrap(old.peers).members(old.rows) & unwrap(old.expert)
        gap = old.new.logp - unwrap(old.peers).statistic[answers.int().argmax(1)]
        term = self.weight * advantage.abs() * leaky_relu(-advantage.sign() * gap, self.slope)
        loss = self.surrogate(log_ratio, advantage, old.old.logp) + term * answers.any(1, keepdim=True)
        return loss.masked_fill(unwrap(old.expert)[old.rows, None], 0)

    def clip_mask(self, log_ratio: Tensor, advantage: Tensor, old: CompletionBatch) -> Tensor:
        return self.surrogate.clip_mask(log_ratio, advantage, old.old.logp) & ~unwrap(old.expert)[old.rows, None]


def conflicts(ids: Tensor, mask: Tensor, advantage: Tensor) -> Tensor:
    """The conflict tokens of one group's completions ids [n, L]: bool [n, L].
    mask: the tokens that count, bool [n, L]; advantage: [n]."""
    lengths = torch.arange(1, mask.shape[1] + 1, device=ids.device).mul(mask).amax(1)
    places = torch.arange(ids.shape[1], device=ids.device)
    from_end = (lengths[:, None] - 1 - places) % ids.shape[1]  # its own inverse among the places that count
    ahead = _run(ids, mask, advantage)
    behind = _run(ids.gather(1, from_end), mask.gather(1, from_end), advantage).gather(1, from_end)
    return (ahead | behind) & mask


def _run(ids: Tensor, mask: Tensor, advantage: Tensor) -> Tensor:
    same = (ids[:, None] == ids) & mask[:, None] & mask
    good, bad = (same & sign[:, None] for sign in (advantage > 0, advantage < 0))
    return (good.any(1) & bad.any(1)).long().cumprod(1).bool()


@part("surrogate", reads_uniform=True)
class RandomPolicyValue(GroupLoss):
    """(Q - r - Q')^2 of every token, [B, L] (ROVER, 2509.24981).

    Q = scale * log(p / p_old) of the token, a value of the uniformly random policy. Q' = scale * the mean over all
    tokens of log(p / p_old) in the next state, held constant; 0 behind the last token. r is the advantage, the reward
    less its group's mean, which every token has. Policies that follow softmax(Q) keep all ways to a reward.
    """

    scale: Annotated[float, Above(0)] = 1.0

    def __call__(self, log_ratio: Tensor, advantage: Tensor, old: CompletionBatch) -> Tensor:
        mask = old.new.mask
        value = self.scale * (unwrap(old.new.entropy) - unwrap(old.old.entropy).to(log_ratio)).detach() * mask
        ahead = torch.cat([value[:, 1:], torch.zeros_like(value[:, :1])], 1)
        return (self.scale * log_ratio - advantage - ahead).square()


@part("surrogate", reads_groups=True, reads_advantages=True, reads_labels=True,
      reads_reference=lambda loss: loss.reference)
class RewardLabels(SampleLoss):
    """Cross-entropy of a group's labels under the logits z = scale * s, s the mean log-ratio of a sample's decisions,
    [B, N] (REAL, 2602.05630; PACS, 2509.02522).

    y: the label, the advantage within 0 to 1: with `NoBaseline` the reward itself, right 1 and wrong 0, or between.
    form: "anchor": log(1 + sum y e^-z) + log(1 + sum (1 - y) e^z), REAL's with scale = 1 / temperature: one softmax of
        the right and one of the wrong samples, each with an anchor logit 0, so that all slopes are bounded. The paper
        and its code leave out groups of one class; here they are trained too.
        "each": the mean of -y log sigmoid(z) - (1 - y) log sigmoid(-z).
        "leave_one_out": the same of psi = z less the mean z of the others, PACS's; psi adds up to 0 over the group.
    reference: s is the log-ratio to the reference, in place of that to the old policy.

    Of completions s is a mean over tokens with `PlainRatio` and `SequenceMean`, the log-ratio of the whole with
    `CompletionRatio` and `SequenceSum`. The returned values have the loss and its gradient. Every token has the loss of
    its group, whose mean over tokens is logged.
    """

    form: Annotated[str, OneOf(("anchor", "each", "leave_one_out"))] = "anchor"
    scale: Annotated[float, Above(0)] = 1.0
    reference: bool = False

    def _ratio(self, batch: CompletionBatch | NoisedBatch) -> Tensor:
        other = unwrap(batch.reference) if self.reference else batch.old
        return unwrap(batch.measure)(batch.new, other)

    def statistic(self, batch: CompletionBatch | NoisedBatch) -> Tensor:
        return (self._ratio(batch) * batch.new.mask).sum(1) / batch.new.mask.sum(1).clamp(min=1)

    def __call__(self, log_ratio: Tensor, advantage: Tensor, old: CompletionBatch | NoisedBatch) -> Tensor:
        peers, ratio = unwrap(old.peers), self._ratio(old)
        same = peers.group[:, None] == peers.group
        labels = peers.advantage.clamp(0, 1).to(peers.statistic)
        value, slope = self.losses(self.scale * peers.statistic, labels, same.to(peers.statistic))
        value, slope = value[old.rows, None].to(ratio), self.scale * slope[old.rows, None].to(ratio)
        return value + slope * (ratio - ratio.detach())

    def losses(self, logits: Tensor, labels: Tensor, same: Tensor) -> tuple[Tensor, Tensor]:
        """The loss of each sample's group and its slope by the sample's logit times the group's size, [m] both.
        logits, labels: [m]; same: [m, m], 1 for two samples of one group."""
        size = same.sum(1)
        if self.form == "anchor":
            right, wrong = (self._log_partition(z, weight, same) for z,
                            weight in ((-logits, labels), (logits, 1 - labels)))
            return right[0] + wrong[0], (wrong[1] - right[1]) * size
        psi = logits
        if self.form == "leave_one_out":
            others = (size - 1).clamp(min=1)
            psi = logits - (same @ logits - logits) / others
        value = same @ (softplus(psi) - labels * psi) / size
        error = torch.sigmoid(psi) - labels
        return value, error if self.form == "each" else error - (same @ error - error) / others

    @staticmethod
    def _log_partition(z: Tensor, weight: Tensor, same: Tensor) -> tuple[Tensor, Tensor]:
        """log(1 + sum w e^z) over each sample's group, and the sample's share of that sum: [m] both."""
        scores = z + weight.log()
        total = torch.logaddexp((scores + same.log()).logsumexp(1), torch.zeros_like(z))
        return total, (scores - total).exp()
