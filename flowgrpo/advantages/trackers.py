"""Baselines from the history of a prompt: `part(rewards [P, G, R], weights [R], context) -> advantages [P, G]`.

Each compares the weighted sum of the rewards (`group.weighted_sum`) and clamps to +-clamp. The histories are kept in
the context's memory (`update_state`), by prompt and JSON-able.
"""

from collections.abc import Callable, Sequence
from typing import Annotated, Any

import torch
from torch import Tensor

from flowgrpo.advantages import group
from flowgrpo.errors import UserError
from flowgrpo.parts import Above, AtLeast, part
from flowgrpo.types import Context, RunState


def update_state(memory: dict[str, Any], part: str, key: str, epoch: int, start: list[float],
                 change: Callable[[list[float]], list[float]]) -> tuple[list[float], list[float]]:
    """State of a key before this epoch, and with it. memory[part] holds the states, which begin as `start`.

    The first call of an epoch changes them; later ones, of a tree's inner nodes or after a resume, return the same.
    """
    states = memory.setdefault(part, {})
    entry = states.get(key, {"epoch": None, "after": start})
    if entry["epoch"] != epoch:
        entry = states[key] = {"epoch": epoch, "before": entry["after"], "after": change(entry["after"])}
    return entry["before"], entry["after"]


def mean_of(counts: Sequence[float]) -> float:
    """Mean of a state [number, sum, ...]; 0 of no number."""
    return counts[1] / counts[0] if counts[0] else 0.0


def require_rates(part: str, total: Tensor) -> None:
    """Raise UserError for rewards [P, G] outside 0 to 1, which are no success rates."""
    if (total < -group.RELATIVE_NOISE).any() or (total > 1 + group.RELATIVE_NOISE).any():
        known = total[~total.isnan()]
        raise UserError(f"{part}: rewards from {known.min().item():g} to {known.max().item():g}, expected within 0 "
                        "to 1, as a success rate: scale the weights, or shape the rewards first")


class Tracked(group.AdvantageRule):
    """Comparison with the history of a prompt: base class, which goes through the prompts."""

    def compare(self, total: Tensor, context: Context | None) -> Tensor:
        assert context is not None, f"{type(self).__name__} compares with earlier epochs: it needs a context"
        assert len(context.groups.prompts) == len(total), (len(context.groups.prompts), total.shape)
        advantages = torch.zeros_like(total)
        for prompt, rows in group.rows_of(context.groups.prompts).items():
            if not total[rows].isnan().all():
                advantages[rows] = self.visit(prompt, total[rows], context.run)
        return advantages.masked_fill(total.isnan(), 0)

    def visit(self, prompt: str, rewards: Tensor, run: RunState) -> Tensor:
        """Advantages of all groups [n, G] of a prompt, and count their rewards, NaN where none applies."""
        raise NotImplementedError


@part("advantage", single=True, teaches=True, needs=("drift",),
      jointly={"evidence floor": "evidence above 0 and floor 0 or more"})
class ValueTracker(Tracked):
    """Success rate tracked for every prompt as its baseline, then normalised over the batch (SPO, 2509.13232).

    A = whitened(r - v) with v = successes / evidence, as they were before this batch; then both are multiplied by keep
    and the present samples added. Rewards, weighted and summed, lie within 0 to 1: v is the mean of a Beta
    distribution. A prompt starts with `evidence` samples' worth of rate `prior`; SPO's 8 is 1 / (1 - 0.875).

    keep = 2^(-KL / half) within `least` to `most`, with the KL between the policies of two visits of the prompt: the
    sum over the epochs between (memory["drift"]) of the mean of r - 1 - log r over an epoch's decisions after its
    updates, by one more replay. Methods without log-probabilities of recorded decisions measure none, and keep is
    `most`. The sum, and half 0.06, are ours.

    It needs no other sample of the group: `train.group` may be 1. With several samples per prompt, keep acts once per
    visit. After the first epoch, prompts are drawn by `prompt_weights`: most often those at a rate of 1/2.
    """

    half: float = 0.06
    least: float = 0.875
    most: float = 0.96
    prior: float = 0.5
    evidence: Annotated[float, Above(0)] = 8.0
    floor: Annotated[float, AtLeast(0)] = 0.05
    clamp: group.Clamp = 5.0

    def __post_init__(self) -> None:
        if not self.half > 0 or not 0 <= self.least <= self.most <= 1 or not 0 <= self.prior <= 1:
            raise ValueError(f"ValueTracker: half is {self.half}, least {self.least}, most {self.most} and prior "
                             f"{self.prior}, expected above 0, 0 <= least <= most <= 1, and 0 to 1")

    def visit(self, prompt: str, rewards: Tensor, run: RunState) -> Tensor:
        require_rates("ValueTracker", rewards)
        values = rewards[~rewards.isnan()]
        drift = run.memory.get("drift", 0.0)

        def change(state: list[float]) -> list[float]:
            keep = min(max(2 ** (-(drift - state[2]) / self.half), self.least), self.most)
            return [keep * state[0] + len(values), keep * state[1] + values.sum().item(), drift]

        before, _ = update_state(run.memory, "ValueTracker", prompt, run.epoch,
                                 [self.evidence, self.evidence * self.prior, 0.0], change)
        return rewards - mean_of(before)

    def compare(self, total: Tensor, context: Context | None) -> Tensor:
        return group.whiten(super().compare(total, context), ~total.isnan())

    def prompt_weights(self, memory: dict[str, Any], prompts: Sequence[str]) -> Tensor:
        """Sampling weights sqrt(v (1 - v)) + floor of prompts, with v `prior` before the first visit: float64 [n]."""
        tracked = memory.get("ValueTracker", {})
        rates = [mean_of(tracked[prompt]["after"]) if prompt in tracked else self.prior for prompt in prompts]
        v = torch.tensor(rates, dtype=torch.float64)
        return (v * (1 - v)).clamp(min=0).sqrt() + self.floor


@part("advantage", teaches=True)
class SmoothStandardised(Tracked):
    """Advantage by the present group's mean and std, smoothed with that by all rewards of the prompt so far
    (DCPO, 2509.02333).

    With N the reward less the mean, over the deviation, of the present samples, T the same of all samples of the
    prompt and i the number of its visits, this one included: the smaller in absolute value of ((i - 1) N + T) / i and
    (N + (i - 1) T) / i. A group that agrees has N = 0, and learns where its prompt's history differs. Deviations have
    ddof 1 and eps 1e-8; N or T is 0 where its deviation is rounding. That of T is of all rewards, where the released
    code pools the deviations of the visits, which is some percent apart.
    """

    clamp: group.Clamp = 5.0

    def visit(self, prompt: str, rewards: Tensor, run: RunState) -> Tensor:
        values = rewards[~rewards.isnan()]
        added = [1.0, float(len(values)), values.sum().item(), values.square().sum().item()]
        _, (visits, count, total, squares) = update_state(
            run.memory, "SmoothStandardised", prompt, run.epoch, [0.0] * 4,
            lambda state: [old + new for old, new in zip(state, added)])
        mean = total / count
        spread = (max(squares - count * mean * mean, 0.0) / max(count - 1, 1)) ** 0.5
        history = torch.zeros_like(rewards)
        if spread > group.RELATIVE_NOISE * max(abs(mean), spread):
            history = (rewards - mean) / (spread + 1e-8)
        present = group.group_relative(rewards.reshape(1, -1)).view_as(rewards)
        by_present = ((visits - 1) * present + history) / visits
        by_history = (present + (visits - 1) * history) / visits
        return torch.where(by_present.abs() < by_history.abs(), by_present, by_history)


@part("advantage", keeps_prior=True, teaches=True, jointly={"keep prior evidence": "0 to 1 each, and above 0"})
class PriorBlend(Tracked):
    """Reward less a baseline between a prior value of the prompt and the group's mean, weighted for the smallest mean
    squared error (V0.5).

    b = w V + (1 - w) mean, w = s / (s + bias^2). s is the variance of the mean of the group's n rewards under a success
    rate V, V (1 - V) / n, and bias^2 the squared difference of mean and V.

    V is the mean of the last rewards of the prompt: every visit multiplies the evidence by `keep`. It starts with
    `evidence` samples' worth of `prior`. Rewards lie within 0 to 1. In the paper V is a generalist value model;
    the estimate of the bias is ours. Where both conflict, the paper's test asks for more samples: `redraw: {type:
    AdditionalGroups}`.
    """

    keep: Annotated[float, AtLeast(0, to=1)] = 0.7
    prior: Annotated[float, AtLeast(0, to=1)] = 0.5
    evidence: Annotated[float, Above(0)] = 2.0
    clamp: group.Clamp = 5.0

    def visit(self, prompt: str, rewards: Tensor, run: RunState) -> Tensor:
        require_rates("PriorBlend", rewards)
        values = rewards[~rewards.isnan()]
        before, _ = update_state(
            run.memory, "PriorBlend", prompt, run.epoch, [self.evidence, self.evidence * self.prior],
            lambda state: [self.keep * state[0] + len(values), self.keep * state[1] + values.sum().item()])
        prior = mean_of(before)
        mean = values.mean().item()
        weight = prior_weight(prior, mean, len(values))
        return rewards - (weight * prior + (1 - weight) * mean)


def prior_weight(prior: float, mean: float, count: int) -> float:
    """Weight of a prior success rate beside the mean of `count` rewards: s / (s + bias^2), 1 where both are 0. s =
    prior (1 - prior) / count; bias^2 = (mean - prior)^2."""
    noise = prior * (1 - prior) / count
    bias = (mean - prior) ** 2
    return noise / (noise + bias) if noise + bias else 1.0
