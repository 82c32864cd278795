"""Surrogates: `surrogate(log_ratio, advantage, old) -> loss [B, N]`, for B rows of N decisions.

log_ratio: [B, N].
advantage: [B, N] or [B, 1].
old: [B, N], the log-probability under the old policy; of a DivergenceMask the divergence from it; of a surrogate that
    reads who drew a decision its `Origin`. Few surrogates read it. Those of groups and of noised finals get a
    `CompletionBatch` or a `NoisedBatch`; `ActorCritic`, the loss of an edit and its critic, gets what they have `Seen`.

clipped(...), with the same arguments, is the mask where the gradient is cut. low and high are the ratio's range, in the
unit of `gaussian.log_prob`. Masks and the division come last, in `reductions`.
"""

import math
from dataclasses import dataclass
from typing import Annotated, Any

import torch
from torch import Tensor

from flowgrpo.objectives.kl import divergence
from flowgrpo.parts import Above, AtLeast, part
from flowgrpo.types import Scored, unwrap


class Surrogate:
    """Loss of a decision: base class, with what it reads in addition to ratio and advantage.

    reads_means: the means of transitions, or the model's outputs.
    reads_reference: the reference's scores.
    reads_groups: a `statistic` of the samples of a group.
    reads_entropy: the entropy of every token's distribution.
    reads_uniform: the mean log-probability of all tokens at every place, of the old policy too.
    reads_advantages: one advantage of every completion.
    reads_labels: advantages that are rewards, not compared in their group.
    reads_guided: `Origin`, who drew a decision.
    reads_answers: answers that join their group.
    trains: False where it has no gradient, and leaves the training to a KL.
    low, high: the range of the ratio; infinite: it has none.
    """

    reads_means = reads_reference = reads_groups = reads_entropy = reads_advantages = reads_labels = False
    reads_uniform = reads_guided = reads_answers = False
    trains = True
    low: float = math.inf
    high: float = math.inf

    def __call__(self, log_ratio: Tensor, advantage: Tensor, old: Any) -> Tensor:
        """Loss [B, N]. old: `surrogate_input`, or the record of the targets that the surrogate is for."""
        raise NotImplementedError

    def clip_mask(self, log_ratio: Tensor, advantage: Tensor, old: Any) -> Tensor:
        """Mask where the gradient is cut, bool [B, N]."""
        return torch.zeros_like(log_ratio, dtype=torch.bool)

    def over_tokens(self, old: Any) -> Tensor | None:
        """Return what of the loss is a mean over tokens whatever the method's reduction, [B, N]; None: nothing."""
        return None

    def statistic(self, batch: Any) -> Tensor:
        """Statistic [b, ...] of the samples of a batch that a surrogate of groups compares."""
        raise NotImplementedError


class ClippedSurrogate(Surrogate):
    """PPO's clipped surrogate as a loss, max(-A r, -A clip(r)) with r = exp(log_ratio): [B, N]; A is the advantage."""

    def __call__(self, log_ratio: Tensor, advantage: Tensor, old: Tensor | None = None) -> Tensor:
        return ppo(log_ratio.expm1(), advantage, *self.bounds(advantage, old))

    def clip_mask(self, log_ratio: Tensor, advantage: Tensor, old: Tensor | None = None) -> Tensor:
        """Mask where the clip cuts the gradient, bool [B, N]: the ratio is out of range on the side A pushes it to."""
        return cut(log_ratio.expm1(), advantage, *self.bounds(advantage, old))

    def bounds(self, advantage: Tensor, old: Tensor | None) -> tuple[float | Tensor, float | Tensor]:
        """Lower and upper bound of r - 1: numbers, [B, 1] or [B, N]."""
        raise NotImplementedError


@part("surrogate", jointly={"low high": "0 to 1 and 0 or more"})
class Clip(ClippedSurrogate):
    """PPO's clipped surrogate as a loss, max(-A r, -A clip(r, 1-low, 1+high)) with r = exp(log_ratio): [B, N].

    The advantage A is [B, N] or [B, 1]. 0 <= low <= 1, high >= 0.
    """

    low: Annotated[float, AtLeast(0, to=1)] = 1e-4
    high: Annotated[float, AtLeast(0)] = 1e-4

    def bounds(self, advantage: Tensor, old: Tensor | None) -> tuple[float, float]:
        return -self.low, self.high


@part("surrogate", jointly={"low high": "0 to 1 and 0 or more"})
class AdaptiveClip(ClippedSurrogate):
    """`Clip` whose bounds follow the advantage, 1 - e(-A) <= r <= 1 + e(A) with e(A) = low + (high - low) sigmoid(
    sensitivity * A) (LayerTuning, 2509.23352, a reconstruction).

    A good sample may become likelier by more than an average one, and a bad one less likely by more. The range is low
    + high wide for every sample. 0 <= low <= 1, low <= high.
    """

    low: Annotated[float, AtLeast(0, to=1)] = 1e-4
    high: Annotated[float, AtLeast(0)] = 2e-4
    sensitivity: float = 1.0

    def __post_init__(self) -> None:
        if self.high < self.low or not self.sensitivity >= 0:
            raise ValueError(f"AdaptiveClip: low is {self.low}, high {self.high} and sensitivity {self.sensitivity}, "
                             "expected low <= high and 0 or more")

    def bounds(self, advantage: Tensor, old: Tensor | None) -> tuple[Tensor, Tensor]:
        highest = self.low + (self.high - self.low) * torch.sigmoid(self.sensitivity * advantage)
        return highest - (self.low + self.high), highest  # sigmoid(-a) = 1 - sigmoid(a)


@part("surrogate")
class DualClip(Clip):
    """`Clip` whose loss for A < 0 is at most -dual * A, with no gradient beyond, at r above dual (1912.09729; in place
    of a KL in RIFT, 2505.03344, with ranges of 0.2).

    One bad sample that became likely cannot dominate the update.
    """

    dual: Annotated[float, Above(1, words="above 1, the ratio of an unchanged policy")] = 3.0

    def __call__(self, log_ratio: Tensor, advantage: Tensor, old: Tensor | None = None) -> Tensor:
        loss = super().__call__(log_ratio, advantage)
        return torch.where(advantage < 0, torch.minimum(loss, -self.dual * advantage), loss)

    def clip_mask(self, log_ratio: Tensor, advantage: Tensor, old: Tensor | None = None) -> Tensor:
        return super().clip_mask(log_ratio, advantage) | ((advantage < 0) & (log_ratio.expm1() > self.dual - 1))


@part("surrogate")
class SoftGate(Surrogate):
    """-A (4/t) sigmoid(t (r - 1)), [B, N], with t = `positive` where A > 0, else `negative` (SAPO, 2511.20347).

    The gradient by r is -A sech^2(t (r - 1) / 2): the unclipped one at r = 1, and it fades where r is far from 1. Bad
    decisions fade sooner: their gradient raises all other tokens.
    """

    positive: Annotated[float, Above(0)] = 1.0
    negative: Annotated[float, Above(0)] = 1.05

    def __call__(self, log_ratio: Tensor, advantage: Tensor, old: Tensor | None = None) -> Tensor:
        t = torch.where(advantage > 0, self.positive, self.negative)
        return -advantage * 4 / t * torch.sigmoid(t * log_ratio.expm1())


@part("surrogate", target="tokens", jointly={"low high": "0 to 1 and 0 or more"})
class DynamicClip(ClippedSurrogate):
    """`Clip` for tokens, wider for tokens that were unlikely under the old policy (DCPO, 2509.02333).

    With q = exp(old) the range of r is 1/2 + sqrt(max(1 - 4 low / q, 0)) / 2 to 1/2 + sqrt(1 + 4 high / q) / 2, at most
    `cap` (10 in the released code). q must be a probability: of a Gaussian transition it would be a density.
    """

    low: Annotated[float, AtLeast(0, to=1)] = 0.16
    high: Annotated[float, AtLeast(0)] = 0.2
    cap: Annotated[float, Above(1, words="above 1 (infinity for none)")] = 10.0

    def bounds(self, advantage: Tensor, old: Tensor | None) -> tuple[Tensor, Tensor]:
        assert old is not None, "DynamicClip needs the old log-probability of every decision"
        q = old.exp()
        lowest = ((1 - 4 * self.low / q).clamp(min=0).sqrt() - 1) / 2
        highest = ((1 + 4 * self.high / q).sqrt() - 1) / 2
        return lowest, highest.clamp(max=self.cap - 1)


@part("surrogate", reads_means=True)
class DivergenceMask(ClippedSurrogate):
    """-A r, without a gradient where a far policy would move further: away from the old one (Flow-DPPO, 2606.11025).

    Far: the divergence mean((mean_new - mean_old)^2) / (2 std^2) is at least `bound`. Further: A > 0 with r > 1, or A <
    0 with r < 1. It is a `Clip` whose range is opened or closed by the divergence.
    """

    bound: Annotated[float, Above(0)] = 1e-5

    def bounds(self, advantage: Tensor, old: Tensor | None) -> tuple[Tensor, Tensor]:
        assert old is not None, "DivergenceMask needs the divergence of every decision"
        width = torch.where(old >= self.bound, 0.0, math.inf)
        return -width, width


@dataclass(frozen=True, eq=False)
class Origin:
    """Origin of decisions, with their log-probabilities new and old [B, N].

    guided: bool [B], those drawn under another input than the one that is learned.
    answers: bool [B], those that came with their prompts.
    """

    new: Tensor
    old: Tensor
    guided: Tensor
    answers: Tensor


def surrogate_input(surrogate: Surrogate, new: Scored, old: Scored, answers: Tensor | None = None) -> Tensor | Origin:
    """Third argument of a surrogate: of a DivergenceMask the divergence from the old policy [B, N], of one that reads
    it the `Origin`, otherwise the old log-probability. answers: as of an `Origin`."""
    if surrogate.reads_guided:
        none = torch.zeros_like(old.mask[:, 0])
        return Origin(new.logp, old.logp, none if old.guided is None else old.guided,
                      none if answers is None else answers)
    return divergence(new, old).detach() if isinstance(surrogate, DivergenceMask) else old.logp


@part("surrogate")
class Reinforce(Surrogate):
    """-A (1 + log_ratio), [B, N], whose gradient is -A grad log p at every ratio: no importance weight, no clip
    (DDPO_SF, 2305.13301).

    It is the surrogate -A r to first order, meant for one update per batch.
    """

    def __call__(self, log_ratio: Tensor, advantage: Tensor, old: Tensor | None = None) -> Tensor:
        assert advantage.ndim == 2, advantage.shape
        return -advantage * (1 + log_ratio)


@part("surrogate", trains=False)
class KLOnly(Surrogate):
    """0, [B, N]: the KL alone trains, as distillation from a Teacher or SelfTeacher does."""

    def __call__(self, log_ratio: Tensor, advantage: Tensor, old: Tensor | None = None) -> Tensor:
        return 0.0 * log_ratio  # with a graph, for epochs in which the KL has no weight


@part("surrogate", jointly={"low high": "0 to 1 and 0 or more"})
class TruncatedIS(Surrogate):
    """-A clip(r, 1-low, 1+high) log p, [B, N], with the clipped ratio r a constant: an importance weight with bounds
    (CISPO, 2506.13585, equations 4 and 5, which bounds above alone: low is 1).

    Every decision has a gradient, also where PPO's clip leaves none.
    """

    low: Annotated[float, AtLeast(0, to=1)] = 1.0
    high: Annotated[float, AtLeast(0)] = 4.0

    def __call__(self, log_ratio: Tensor, advantage: Tensor, old: Tensor | None = None) -> Tensor:
        assert advantage.ndim == 2 and old is not None, advantage.shape
        weight = 1 + log_ratio.detach().expm1().clamp(-self.low, self.high)
        return -weight * advantage * (old + log_ratio)

    def clip_mask(self, log_ratio: Tensor, advantage: Tensor, old: Tensor | None = None) -> Tensor:
        """Mask where the weight is bounded, which cuts no gradient, bool [B, N]."""
        excess = log_ratio.expm1()
        return (excess > self.high) | (excess < -self.low)


@part("surrogate", target="reward gradient")
class RewardAscent(Surrogate):
    """-R, the reward itself in place of an advantage, or with a margin max(margin - R, 0), which ignores samples that
    are good enough (ReFL, 2304.05977: a margin of 2).

    For methods with `backprop`, whose scores are rewards.
    """

    margin: float | None = None

    def __call__(self, log_ratio: Tensor, advantage: Tensor, old: Tensor | None = None) -> Tensor:
        assert old is not None, "RewardAscent needs the old reward of every sample"
        reward = old + log_ratio
        return -reward if self.margin is None else (self.margin - reward).clamp(min=0)

    def clip_mask(self, log_ratio: Tensor, advantage: Tensor, old: Tensor | None = None) -> Tensor:
        assert old is not None, "RewardAscent needs the old reward of every sample"
        return old + log_ratio >= (math.inf if self.margin is None else self.margin)


def ppo(excess: Tensor, advantage: Tensor, lowest: float | Tensor, highest: float | Tensor) -> Tensor:
    """Return max(-A r, -A clip(r)) of excess = r - 1 within lowest to highest, [B, N]. It clips r - 1: near 1 float32
    has steps of 1.2e-7, too coarse for a clip range of 2e-6."""
    assert advantage.ndim == 2, advantage.shape
    clipped = excess.clamp(lowest, highest)  # type: ignore[arg-type]
    return -advantage - torch.minimum(advantage * excess, advantage * clipped)


def cut(excess: Tensor, advantage: Tensor, lowest: float | Tensor, highest: float | Tensor) -> Tensor:
    """Mask where `ppo` has no gradient for a non-zero advantage, bool [B, N]."""
    return ((advantage > 0) & (excess > highest)) | ((advantage < 0) & (excess < lowest))


@dataclass(frozen=True, eq=False)
class Seen:
    """Inputs of the loss in addition to ratio and advantage.

    value: [b, 1], the critic's value of the samples' final states, with its gradient.
    reward: [b, 1], their rewards.
    edited: [b, 1], the value of their bases, edited by the present weights with the noise that the rollout drew, with
        the gradient of the edit alone; None if the loss does not read it.
    """

    value: Tensor
    reward: Tensor
    edited: Tensor | None = None


@part("surrogate", target="edits", reads_means=lambda loss: loss.through > 0,
      jointly={"low high": "0 to 1 and 0 or more"})
class ActorCritic(Surrogate):
    """Loss of an edit and its critic, [B, 1] (EXPO, 2507.07986).

    Critic: critic * (Q - R)^2 of its value Q of every sample, with R the weighted sum of its rewards.
    That is EXPO's TD loss with one step. Its target is r + gamma (1 - done) max Q(s', a'), the maximum over n bases of
    the next state and their n edits. An edit of a finished latent ends its episode: done is 1, no next state has
    candidates, and the target is r for every gamma.
    Edit: through * -Q(x0 + edit), as published; its gradient passes the critic and leaves it unchanged, and reaches the
    edit's mean through the decision m + std * noise. Plus ratio * PPO's clipped loss with bounds low and high, which is
    ours and reads no critic.
    The two networks share no weights.
    """

    low: Annotated[float, AtLeast(0, to=1)] = 1e-3
    high: Annotated[float, AtLeast(0)] = 1e-3
    critic: Annotated[float, AtLeast(0, words="0 or more, the weight of its loss")] = 0.5
    through: float = 1.0
    ratio: float = 0.0

    def __post_init__(self) -> None:
        if min(self.through, self.ratio) < 0 or not self.through + self.ratio > 0:
            raise ValueError(f"ActorCritic: through is {self.through} and ratio {self.ratio}, expected 0 or more and "
                             "one of them above 0: nothing else trains the edit")

    def __call__(self, log_ratio: Tensor, advantage: Tensor, old: Seen) -> Tensor:
        loss = self.critic * (old.value - old.reward).square().to(log_ratio)
        if self.ratio:
            loss = loss + self.ratio * ppo(log_ratio.expm1(), advantage, -self.low, self.high)
        return loss - self.through * unwrap(old.edited).to(log_ratio) if self.through else loss

    def clip_mask(self, log_ratio: Tensor, advantage: Tensor, old: Seen | None = None) -> Tensor:
        """Mask where the clip cuts the edit's gradient, bool [B, N]; false without the clipped loss."""
        return (self.ratio > 0) & cut(log_ratio.expm1(), advantage, -self.low, self.high)
