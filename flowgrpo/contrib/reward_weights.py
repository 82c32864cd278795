"""Adaptive weights of rewards, of epochs and of prompts: parts in place of `group.Advantage`."""

import math
from collections.abc import Sequence
from typing import Annotated

import torch
from torch import Tensor

from flowgrpo.advantages.group import SCALES, Advantage, AdvantageRule, Clamp, group_relative, weights_like
from flowgrpo.parts import AtLeast, OneOf, part
from flowgrpo.types import Context


@part("advantage", adapts_weights=True)
class Influence(AdvantageRule):
    """One advantage per reward, standardised in its group, then their sum under weights that `mirror_descent` moves.

    After the gradient-based weights of 2509.11452. There the inner products are those of gradients of all parameters.
    Here they are those of gradients by the samples' log-probabilities, the advantages. The moves add up from epoch to
    epoch, from the recipe's weights on; without a context every call starts from these. rate: 0 leaves them unchanged.
    The sum is clamped to +-clamp.
    """

    rate: Annotated[float, AtLeast(0)] = 1.0
    clamp: Clamp = 5.0

    def require(self, weights: Sequence[float]) -> None:
        if min(weights) < 0 or not sum(weights) > 0:
            raise ValueError(f"Influence: the weights are {list(weights)}, expected 0 or more, and one above")

    def __call__(self, rewards: Tensor, weights: Tensor | Sequence[float], context: Context | None = None) -> Tensor:
        weights = weights_like(rewards, weights)
        self.require(weights.tolist())
        advantages = torch.stack([group_relative(reward) for reward in rewards.unbind(2)], dim=2)
        moved = mirror_descent(advantages, self._initial_weights(weights, context), self.rate)
        if context is not None:
            context.run.memory["influence"]["after"] = moved.tolist()
        return (advantages * moved).sum(2).clamp(-self.clamp, self.clamp)

    def _initial_weights(self, weights: Tensor, context: Context | None) -> Tensor:
        """Weights as of the end of the epoch before; calls of one epoch all start from them."""
        if context is None:
            return weights
        run = context.run
        known = run.memory.get("influence", {})
        fits = len(known.get("after", [])) == len(weights)
        if not fits or known["epoch"] != run.epoch:
            before = known["after"] if fits else weights.tolist()
            known = run.memory["influence"] = {"epoch": run.epoch, "before": before}
        return weights.new_tensor(known["before"])


def mirror_descent(advantages: Tensor, weights: Tensor, rate: float) -> Tensor:
    """Weights [R] after a step of mirror descent on their simplex: w_k exp(rate I_k), scaled to the sum they
    had.

    I_k = mean(A_k sum_j v_j A_j) over all samples, v the weights over their sum. It measures how far the common step
    raises reward k: 0 for a reward without variance in any group, below 0 for one that the others pull down.
    advantages: A [P, G, R]. Of the weights none is below 0, and one above.
    """
    total = weights.sum()
    common = (advantages * (weights / total)).sum(2, keepdim=True)
    influence = (advantages * common).mean((0, 1))
    moved = weights * (rate * (influence - influence.max())).exp()
    return total * moved / moved.sum()


@part("advantage")
class Hypervolume(AdvantageRule):
    """Weighted sum of advantages, larger when the Pareto front grows: in an epoch whose mean rewards enlarge the run's.

    The factor is the meta-reward of hypervolume guidance (2509.11452, its released code): 1/2 + 3/2 tanh(h), h the
    hypervolume above the point `least` that the epoch's means add to the front; 1 in the first epoch. The code
    multiplies the next step's rewards by that of held-out means; here the epoch's own advantages are multiplied, which
    a division by their deviation would undo. Rewards are at most 4, with weights of 0 or more. The sum is clamped to
    +-clamp.
    """

    least: float = 0.0
    clamp: Clamp = 5.0

    def require(self, weights: Sequence[float]) -> None:
        if len(weights) > 4 or min(weights) < 0:
            raise ValueError(f"Hypervolume: the weights are {list(weights)}, expected at most 4 of 0 or more")

    def __call__(self, rewards: Tensor, weights: Tensor | Sequence[float], context: Context | None = None) -> Tensor:
        assert context is not None, "Hypervolume compares with earlier epochs: it needs a context"
        means = [value - self.least for value in rewards.flatten(0, 1).nanmean(0).nan_to_num(self.least).tolist()]
        run = context.run
        known = run.memory.setdefault("hypervolume", {"epoch": run.epoch, "front": [], "present": means})
        if known["epoch"] != run.epoch:
            known = {"epoch": run.epoch, "front": front([*known["front"], known["present"]]), "present": means}
            run.memory["hypervolume"] = known
        added = hypervolume([*known["front"], means]) - hypervolume(known["front"])
        factor = 0.5 + 1.5 * math.tanh(added) if known["front"] else 1.0
        return (Advantage(clamp=float("inf"))(rewards, weights) * factor).clamp(-self.clamp, self.clamp)


def front(points: Sequence[Sequence[float]]) -> list[list[float]]:
    """Points that no other one equals or exceeds everywhere, in their order; of equal ones the first."""
    kept: list[list[float]] = []
    for point in map(list, points):
        if not any(all(a >= b for a, b in zip(other, point)) for other in kept):
            kept = [other for other in kept if not all(a <= b for a, b in zip(other, point))] + [point]
    return kept


def hypervolume(points: Sequence[Sequence[float]]) -> float:
    """Volume of the union of the boxes from 0 to each of the points, of which all have the same length."""
    inside = [list(point) for point in points if min(point) > 0]
    if not inside:
        return 0.0
    if len(inside[0]) == 1:
        return max(point[0] for point in inside)
    heights = sorted({point[-1] for point in inside})
    return sum((high - low) * hypervolume([point[:-1] for point in inside if point[-1] >= high])
               for low, high in zip([0.0, *heights], heights))


@part("advantage")
class HardPrompts(AdvantageRule):
    """Advantages of the weighted sum, times the difficulty of their prompt: hardness times responsiveness (DR-IRL).

    The paper's hardness is a CLIP similarity, its responsiveness the gap between two rewards. Here the hardness is
    sigmoid(-z) of the group's mean reward, the responsiveness sigmoid(z) of the gap between its best and mean reward, z
    standardised over the batch. Their product is divided by its mean over the batch and raised to `strength`.
    """

    strength: float = 1.0
    scale: Annotated[str, OneOf(SCALES)] = "group"
    clamp: Clamp = 5.0

    def compare(self, total: Tensor, context: Context | None) -> Tensor:
        return group_relative(total, self.scale) * difficulty(total)[:, None] ** self.strength


def difficulty(rewards: Tensor) -> Tensor:
    """Difficulty [P] of groups of rewards [P, G], 1 in the mean; 1 for a group without a reward."""
    means = rewards.nanmean(1)
    gaps = rewards.nan_to_num(-torch.inf).amax(1) - means

    def standardise(values: Tensor) -> Tensor:
        known = values[~values.isnan()]
        return (values - known.mean()) / (known.std(correction=0) + 1e-8)

    product = (-standardise(means)).sigmoid() * standardise(gaps).sigmoid()
    return (product / product.nanmean()).nan_to_num(1.0)


@part("advantage", teaches=True)
class ForwardCorrected(AdvantageRule):
    """Weights of a verdict, 0 or 1, of a verifier that misses right samples at a rate: the rate for 1, less 1 for 0.

    Forward correction of "RL with Verifiable yet Noisy Rewards under Imperfect Verifiers": no baseline, no division. In
    the mean over the verifier's errors a right sample gets 0, a wrong one minus (1 - false positives - misses). misses:
    None: a second reward rechecks some of the rejected samples (`rechecked`), and the rate is s r / (s r + a) over the
    whole run, s the share of rejected samples that are right, of r rejected and a accepted ones.
    """

    misses: Annotated[float | None, AtLeast(0, below=1, words="a rate from 0 to below 1, or None")] = None

    def require(self, weights: Sequence[float]) -> None:
        if len(weights) != (1 if self.misses is not None else 2):
            raise ValueError(f"ForwardCorrected with misses {self.misses}: {len(weights)} rewards, expected one "
                             "verdict with misses set, or the verdict and its recheck without")

    def __call__(self, rewards: Tensor, weights: Tensor | Sequence[float], context: Context | None = None) -> Tensor:
        verdict = rewards[..., 0]
        rate = self.misses if self.misses is not None else self._false_negative_rate(rewards, context)
        return (rate - 1 + verdict).masked_fill(verdict.isnan(), 0)

    def _false_negative_rate(self, rewards: Tensor, context: Context | None) -> float:
        assert context is not None, "ForwardCorrected counts over the run: it needs a context"
        verdict, recheck = rewards.unbind(2)
        asked = (verdict == 0) & ~recheck.isnan()
        counts = [int((verdict == 1).sum()), int((verdict == 0).sum()), int(asked.sum()), float(recheck[asked].sum())]
        run = context.run
        known = run.memory.setdefault("misses", {"epoch": run.epoch, "before": [0, 0, 0, 0], "after": counts})
        if known["epoch"] != run.epoch:
            known = run.memory["misses"] = {"epoch": run.epoch, "before": known["after"]}
        known["after"] = [a + b for a, b in zip(known["before"], counts)]
        accepted, rejected, rechecked, right = known["after"]
        missed = rejected * right / rechecked if rechecked else 0
        return missed / (missed + accepted) if missed else 0.0
