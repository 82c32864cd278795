"""KL regularisers: `kl(new, reference) -> loss [B, N]`, for B rows of N decisions, and the divergence [B, N] of two
policies from recorded means and deviations.

`at_epoch` returns the regulariser with the weight of an epoch, by its schedule `schedule(weight, run) -> weight`; None:
every epoch has the recipe's weight. With weight 0 the reference is not read, and may be None.

memory["kl"] of the run holds the weight of the previous epoch and its measured KL, the mean over the decisions of its
updates (None if it trained nothing). The first epoch has no such entry.
"""

from dataclasses import replace
from typing import Annotated, Any, Protocol

import torch
from torch import Tensor

from flowgrpo.device import to_device
from flowgrpo.gaussian import kl
from flowgrpo.parts import Above, AtLeast, OneOf, part
from flowgrpo.types import Gaussian, RunState, Scored, unwrap


class Schedule(Protocol):
    """Weight of each epoch."""

    def __call__(self, weight: float, run: RunState) -> float:
        """Weight of the run's epoch. weight: the recipe's."""

    def silent(self, weight: float) -> bool:
        """True if the weight is 0 in every epoch. Raises ValueError for one that it cannot change."""


@part("kl.schedule")
class Linear:
    """From the recipe's weight in the first epoch to `last` in the run's last one: the dynamic KL of GRPO-D, weak while
    the policy explores and strong later (OThink-MR1, 2503.16081).

    The straight line between the two is our choice.
    """

    last: Annotated[float, AtLeast(0)]

    def __call__(self, weight: float, run: RunState) -> float:
        return weight + (self.last - weight) * run.epoch / max(run.epochs - 1, 1)

    def silent(self, weight: float) -> bool:
        return weight == self.last == 0


@part("kl.schedule", jointly={"target factor": "above 0 and above 1"})
class Adaptive:
    """Multiply the weight by `factor` after an epoch with a KL above 1.5 target, divide it after one below target / 1.5
    (PPO, 1707.06347, section 4).

    The first epoch has the recipe's weight, which must be above 0. A KL of exactly 0 is that of a policy that has not
    left its reference yet: it changes nothing. target is in the unit of the KL, a mean over the latent's values.
    """

    target: Annotated[float, Above(0)]
    factor: Annotated[float, Above(1)] = 2.0

    def __call__(self, weight: float, run: RunState) -> float:
        before = run.memory.get("kl")
        if before is None:
            return weight
        weight, measured = before["weight"], before["measured"]
        if not measured:
            return weight
        if measured > 1.5 * self.target:
            return weight * self.factor
        return weight / self.factor if measured < self.target / 1.5 else weight

    def silent(self, weight: float) -> bool:
        if weight == 0:
            raise ValueError("Adaptive: the KL's weight is 0, which no factor raises, expected above 0")
        return False


class Penalty:
    """weight * distance(new, reference), [B, N]; base class of parts with a weight and a schedule.

    reads_means: it reads the means of transitions, or the model's outputs.
    """

    weight: float
    schedule: Schedule | None
    reads_means = False

    def __post_init__(self) -> None:
        if not self.weight >= 0:
            raise ValueError(f"{type(self).__name__}: weight is {self.weight}, expected 0 or more")
        is_active(self)  # raises for a weight that the schedule could not change

    def __call__(self, new: Scored, reference: Scored | None) -> Tensor:
        if self.weight == 0:
            return torch.zeros_like(new.logp)
        assert reference is not None, "a KL of positive weight needs the reference's score"
        return self.weight * self.distance(new, reference)

    def distance(self, new: Scored, reference: Scored) -> Tensor:
        """Distance of every decision, [B, N]."""
        raise NotImplementedError


@part("kl", reads_means=True)
class GaussianKL(Penalty):
    """weight * KL to the reference policy per decision, [B, N]; its gradient reaches the new mean (Flow-GRPO,
    2505.05470, and DPOK, 2305.16381: the sum over steps of KL(new || reference) on the policy's own samples).

    The KL is `gaussian.kl`, with the deviation of the whole step.
    """

    weight: float = 0.0
    schedule: Schedule | None = None

    def distance(self, new: Scored, reference: Scored) -> Tensor:
        return divergence(new, reference)


@part("kl", reads_means=True)
class OutputError(Penalty):
    """weight * mean squared difference of the model's outputs, [B, N]: every step has the same weight at any noise
    (DPOK's released code, 2305.16381, which calls it KL: of predicted noises, guidance applied, with weights 0.01 and
    0.1 where advantages count 10 and 1000 times).

    A transition's mean is affine in the output, so this is the squared difference of means over their `slope`.
    """

    weight: float = 0.0
    schedule: Schedule | None = None

    def distance(self, new: Scored, reference: Scored) -> Tensor:
        assert new.slope is not None, "this part of the method needs recorded slopes"
        apart = (unwrap(new.mean) - unwrap(reference.mean)).square().flatten(2).mean(dim=2)
        return apart / like_tensor(new.slope, apart).square()


def k1(new: Tensor, reference: Tensor) -> Tensor:
    """log p - log q of log-probabilities [B, N] of samples of p, the new policy; q is the reference. Returns [B, N].

    Its mean is KL(p || q), but its gradient, grad log p, has mean 0: use it as a metric, not as a loss. (k1, k2, k3: J.
    Schulman, Approximating KL Divergence, 2020.)
    """
    return new - reference


def k2(new: Tensor, reference: Tensor) -> Tensor:
    """(log p - log q)^2 / 2, [B, N], biased from the third order of the difference on.

    Its gradient, (log p - log q) grad log p, has the mean grad KL(p || q) on samples of p.
    """
    return (new - reference).square() / 2


def k3(new: Tensor, reference: Tensor) -> Tensor:
    """q/p - 1 - log(q/p), [B, N]: its mean is KL(p || q) and it is never negative (the term of GRPO, 2402.03300,
    equation 4).

    Its gradient, (1 - q/p) grad log p, has the mean grad KL(q || p) on samples of p.
    """
    log_ratio = reference - new
    return log_ratio.expm1() - log_ratio


ESTIMATORS = {"k1": k1, "k2": k2, "k3": k3}


@part("kl")
class SampledKL(Penalty):
    """weight * an estimate of the KL from the samples' log-probabilities, [B, N] (`k1`, `k2` or `k3`), to the reference
    policy.

    For tokens, and for transitions without means. A transition's log-probability is a mean over the latent's values. So
    k1 estimates the KL per value, while k2 and k3 see the difference of a whole sample divided by the number of values.
    """

    weight: float = 0.0
    estimator: Annotated[str, OneOf(ESTIMATORS)] = "k3"
    schedule: Schedule | None = None

    def distance(self, new: Scored, reference: Scored) -> Tensor:
        return ESTIMATORS[self.estimator](new.logp, reference.logp)


@part("kl", target="texts")
class SpanKL(SampledKL):
    """`SampledKL` with a factor on the weight by span, [B, N]: one attempt of a completion is held to the reference,
    the others less or not at all (stage I of SCoRe, 2409.12917, with the draws `SecondAttempt`).

    A span is a run of trained tokens; those that are not trained, such as an inserted text, part it from the next.
    factors: of a row's spans in order; later ones have the last factor.
    """

    factors: tuple[float, ...] = (1.0, 0.0)

    def __post_init__(self) -> None:
        if not self.factors or min(self.factors) < 0 or max(self.factors) == 0:
            raise ValueError(f"SpanKL: factors is {list(self.factors)}, expected numbers of 0 or more, one above 0")

    def distance(self, new: Scored, reference: Scored) -> Tensor:
        numbers = spans(new.mask).clamp(max=len(self.factors) - 1)
        return super().distance(new, reference) * to_device(torch.tensor(self.factors), numbers.device)[numbers]


def spans(mask: Tensor) -> Tensor:
    """Number, from 0, of the span to which each place of a mask [B, N] belongs, the runs of False before it: int64 [B,
    N]. A row that begins with one has no tokens in span 0."""
    before = torch.nn.functional.pad(mask[:, :-1], (1, 0), value=True)
    return (before & ~mask).cumsum(1)


def is_active(kl: Penalty) -> bool:
    """True if a KL has a weight above 0 in any epoch, so a reference is read."""
    return kl.weight > 0 if kl.schedule is None else not kl.schedule.silent(kl.weight)


def at_epoch(kl: Penalty, run: RunState) -> Penalty:
    """Return the KL with its scheduled weight for the run's epoch."""
    part: Any = kl  # a dataclass
    return kl if kl.schedule is None else replace(part, weight=kl.schedule(kl.weight, run), schedule=None)


def divergence(new: Scored, other: Scored) -> Tensor:
    """Return gaussian.kl of every decision, at the new policy's std: [B, N]."""
    assert new.mean is not None and other.mean is not None, "this part of the method needs recorded means"
    std = deviations(new)
    std = std.reshape(-1, *[1] * (new.mean.ndim - 2)) if std.ndim else std
    means = new.mean.flatten(0, 1), other.mean.flatten(0, 1)
    return kl(Gaussian(means[0], std), Gaussian(means[1], std)).view(new.logp.shape)


def deviations(scored: Scored) -> Tensor:
    """Std of every decision, [B, N], shaped as logp; a number that all share is 0-d, as `like_tensor` has it."""
    assert scored.std is not None, "this part of the method needs recorded deviations"
    std = like_tensor(scored.std, scored.logp)
    return std.expand(scored.logp.shape) if std.ndim else std


def like_tensor(values: Tensor, other: Tensor) -> Tensor:
    """Few values, [N] or [B, N], for arithmetic with a tensor of another device, in its dtype. A single one gets 0-d,
    which torch takes from the CPU without a copy: no host waits for a GPU."""
    if values.numel() == 1:
        return values.reshape(()).to(other.dtype)
    return to_device(values, other.device).to(other.dtype)
