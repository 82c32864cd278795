"""Advantages over another comparison, the field `advantage`: each changes its result by something known of samples.

`part(rewards [P, G, R], weights [R], context) -> advantages [P, G]`. A sample to which no reward applies keeps
advantage 0.
"""

import math
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import softplus

from flowgrpo.advantages.group import (
    RELATIVE_NOISE,
    Advantage,
    AdvantageRule,
    of_samples,
    weighted_sum,
    whiten,
    zero_variance,
)
from flowgrpo.parts import Above, AtLeast, OneOf, part
from flowgrpo.types import Context

STANDARDISED = Advantage(scale="group", order="rewards")
CURVES = ("exp", "power", "log", "none")
SIDES = ("negative", "positive", "both")
AGAINST = ("reference", "group")


@part(single=lambda rule: rule.advantage.single, teaches=lambda rule: rule.advantage.teaches,
      needs=lambda rule: (*rule.further, *rule.advantage.needs))
class Reshaped(AdvantageRule):
    """Advantage over another one: base class."""

    further: ClassVar[tuple[str, ...]] = ()  # `needs` besides those of the inner one
    advantage: AdvantageRule = STANDARDISED

    def prompt_weights(self, memory: dict[str, Any], prompts: Sequence[str]) -> Tensor | None:
        return self.advantage.prompt_weights(memory, prompts)

    def __call__(self, rewards: Tensor, weights: Tensor | Sequence[float], context: Context | None = None) -> Tensor:
        advantages, total = self.advantage(rewards, weights, context), weighted_sum(rewards, weights)
        return self.reshape(advantages, total, context).masked_fill(total.isnan(), 0)

    def reshape(self, advantages: Tensor, total: Tensor, context: Context | None) -> Tensor:
        """Advantages [P, G]. total: the weighted sums of the rewards [P, G], NaN where none applies."""
        raise NotImplementedError

    def __post_init__(self) -> None:
        if not isinstance(self.advantage, AdvantageRule):
            raise ValueError(f"{type(self).__name__}: advantage is {self.advantage!r}, expected a comparison such as "
                             "Advantage")


@part("advantage", jointly={"curve power": f"one of {', '.join(CURVES)}, and above 0"})
class Difficulty(Reshaped):
    """Advantages times `difficulty`, a weight of the group that falls with its mean reward m, within 0 to 1.

    curve: "exp", exp(1 - m) (UniVG-R1, 2505.14231), "power", (1.05 - m)^power, or "log", -log(0.02 + m), which its code
    also has; "none", 1. task: a key of the prompts' metadata; the weight of a group is also multiplied by the curve at
    the mean of all groups of the epoch whose prompts have the same value there: weights of tasks and of samples
    (VITAL, 2508.04416). given: a key of the metadata that holds a prompt's stated difficulty, a factor of 0 or more
    (RewardMap, 2510.02240); 1 without it. VITAL's own curve is not known to us.
    """

    curve: Annotated[str, OneOf(CURVES)] = "exp"
    power: Annotated[float, Above(0)] = 1.0
    task: str | None = None
    given: str | None = None

    def reshape(self, advantages: Tensor, total: Tensor, context: Context | None) -> Tensor:
        mean = total.nanmean(1).nan_to_num(0)
        weight = difficulty(mean, self.curve, self.power)
        if self.task is not None or self.given is not None:
            assert context is not None, "Difficulty needs the prompts' metadata"
            metadata = context.groups.metadata
            assert len(metadata) == len(total), (len(metadata), total.shape)
        if self.task is not None:
            tasks = [of.get(self.task) for of in metadata]
            alike = torch.tensor([[one == other for other in tasks] for one in tasks]).to(total)
            weight = weight * difficulty(alike @ mean / alike.sum(1), self.curve, self.power)
        if self.given is not None:
            stated = [of.get(str(self.given), 1.0) for of in metadata]
            for value in stated:
                if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < math.inf:
                    raise ValueError(f"Difficulty: a prompt's metadata has {self.given}: {value!r}, expected a number "
                                     "of 0 or more")
            weight = weight * total.new_tensor([float(value) for value in stated])
        return advantages * weight[:, None]


def difficulty(mean: Tensor, curve: str, power: float) -> Tensor:
    """Weight of groups with the mean rewards `mean` [P], by a curve of `Difficulty`: [P]. Raises ValueError for a mean
    outside 0 to 1, where a curve may not fall or not exist."""
    if curve != "none" and ((mean < -RELATIVE_NOISE) | (mean > 1 + RELATIVE_NOISE)).any():
        raise ValueError(f"Difficulty: mean rewards from {mean.min().item():g} to {mean.max().item():g}, expected "
                         "within 0 to 1: scale the weights, or shape the rewards first")
    mean = mean.clamp(0, 1)
    curves = {"exp": (1 - mean).exp(), "power": (1.05 - mean) ** power, "log": -(0.02 + mean).log(),
              "none": torch.ones_like(mean)}
    return curves[curve]


@part("advantage", jointly={"alpha side against clamp": f"0 or more, one of {', '.join(SIDES)}, one of "
                                                       f"{', '.join(AGAINST)}, and above 0"},
      further=lambda rule: ("reference",) if rule.against == "reference" else ())
class Confidence(Reshaped):
    """Advantages times 1 + alpha softplus(-sign(A) c), c the confidence in the sample: overconfident errors are pushed
    down harder, and unexpected successes pulled up harder (ACE).

    against: "reference", c = log p_old - log p_reference of the whole sample, ACE's shift of confidence, by one more
    replay under the reference (the base model, or `reference`); "group", the mean log-probability of the sample's
    decisions less the group's mean of it. side: "negative", ACE's, changes wrong samples alone; "positive" right ones
    alone, so that of two equal successes the less likely counts more (VeriRL's weights by reward and probability, whose
    formula is not known to us); "both".

    ACE's numerator is the present policy, here the one that drew the sample, which is the same at the first update.
    """

    alpha: Annotated[float, AtLeast(0)] = 1.0
    side: Annotated[str, OneOf(SIDES)] = "negative"
    against: Annotated[str, OneOf(AGAINST)] = "reference"
    clamp: Annotated[float, Above(0)] = 10.0

    def reshape(self, advantages: Tensor, total: Tensor, context: Context | None) -> Tensor:
        logp = of_samples(context, "logp", total, "Confidence").to(total)
        if self.against == "group":
            shift = logp - logp.mean(1, keepdim=True)
        else:
            reference = of_samples(context, "reference", total, "Confidence").to(total)
            shift = (logp - reference) * of_samples(context, "lengths", total, "Confidence").to(total)
        factor = 1 + self.alpha * softplus(-advantages.sign() * shift)
        changed = {"negative": advantages < 0, "positive": advantages > 0, "both": advantages != 0}[self.side]
        return torch.where(changed, advantages * factor, advantages).clamp(-self.clamp, self.clamp)


@part("advantage", teaches=True, jointly={"alpha kappa clamp": "0 or more each, and above 0"})
class Unconfident(Reshaped):
    """Advantages plus alpha times how unlikely the sample is: how far its mean log-probability is below its group's, in
    groups with a right sample (ARM of ProGRPO). Of two equal samples the less likely has the larger advantage.

    Right is a weighted sum of at least `right`; other groups are unchanged. ARM compares with the log-probability of
    the prompt, which is the same for a whole group, and reads unlikely tokens alone; here it is the group's mean, and
    all decisions are read. kappa: the term is within +-|A| / kappa, so above 1 it turns no sign around; 0, as in the
    paper, bounds nothing.
    """

    alpha: Annotated[float, AtLeast(0)] = 0.3
    right: float = 0.5
    kappa: Annotated[float, AtLeast(0)] = 0.0
    clamp: Annotated[float, Above(0)] = 5.0

    def reshape(self, advantages: Tensor, total: Tensor, context: Context | None) -> Tensor:
        logp = of_samples(context, "logp", total, "Unconfident").to(total)
        term = self.alpha * (logp.mean(1, keepdim=True) - logp)
        if self.kappa:
            bound = advantages.abs() / self.kappa
            term = term.clamp(-bound, bound)
        solved = (total >= self.right).any(1, keepdim=True)
        return torch.where(solved, advantages + term, advantages).clamp(-self.clamp, self.clamp)


@part("advantage", teaches=True)
class Consistency(Reshaped):
    """Advantages blended with those of whole groups, so that a group that agrees still learns: w A + (1 - w) g (COPO,
    2508.04138).

    g is the group's mean reward, standardised over all groups of the epoch (`group.whiten`). w is `outcome_entropy`: of
    right and wrong samples 1 where half are right, 0 where all agree; 1 for rewards that all differ. COPO blends two
    losses, which is the same for a loss that is linear in the advantage; its weight is another function of the entropy.
    """

    clamp: Annotated[float, Above(0)] = 5.0

    def reshape(self, advantages: Tensor, total: Tensor, context: Context | None) -> Tensor:
        mean = total.nanmean(1, keepdim=True)
        weight = outcome_entropy(total).masked_fill(zero_variance(total), 0)[:, None]
        return (weight * advantages + (1 - weight) * whiten(mean, ~mean.isnan())).clamp(-self.clamp, self.clamp)


def outcome_entropy(rewards: Tensor) -> Tensor:
    """Entropy of the outcomes, equal rewards, of each group of rewards [P, G], over the logarithm of their number: [P].
    0 for a single outcome; NaN is left out."""
    entropies = []
    for group in rewards:
        counts = group[~group.isnan()].unique(return_counts=True)[1].to(rewards)
        share = counts / counts.sum()
        entropies.append(-(share * share.log()).sum() / max(math.log(len(counts)) if len(counts) else 0.0, 1e-12))
    return torch.stack(entropies).clamp(0, 1)
