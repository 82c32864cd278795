"""Prompts of an epoch: `curriculum(pool, count, epoch, seed, weights, memory, group) -> count prompts`.

pool: the training prompts. weights: of these by the method's advantage, or None. memory: state kept between epochs and
in checkpoints, such as Beta posteriors of each prompt's success rate. group: samples per prompt.

`learn(memory, drawn)` updates the state after an epoch's sampling. Both are the same on every process, and after a
resume.
"""

import heapq
import math
from collections.abc import Sequence
from typing import Annotated, Any

import numpy as np

from flowgrpo.advantages.group import RELATIVE_NOISE
from flowgrpo.curriculum.epoch_batch import EpochBatch
from flowgrpo.data import sets
from flowgrpo.data.prompts import Prompt
from flowgrpo.errors import UserError
from flowgrpo.parts import Above, AtLeast, part


@part("curriculum")
class EpochPermutation:
    """All prompts in turn, or in proportion to their weights if these differ: `splits.draw`."""

    def __call__(self, pool: Sequence[Prompt], count: int, epoch: int, seed: int, weights: Sequence[float] | None,
                 memory: dict[str, Any], group: int) -> list[Prompt]:
        return sets.draw(list(pool), count, epoch, seed, weights)

    def learn(self, memory: dict[str, Any], drawn: EpochBatch) -> None:
        """Do nothing."""


KEY = "beliefs"


class OfBeliefs:
    """Prompts by the posteriors of their success rates: base class. keep, prior: as of `ThompsonSampling`."""

    keep: float
    prior: float

    def learn(self, memory: dict[str, Any], drawn: EpochBatch) -> None:
        """Count an epoch's rewards, within 0 to 1, one group after the other, including replaced groups."""
        known = memory.setdefault(KEY, {})
        keys = {prompt.key for prompt in drawn.pool}
        for prompt, totals in zip(drawn.prompts, drawn.totals):
            if prompt.key in keys and len(rewards := totals[~totals.isnan()].double()):
                require_rate(prompt.key, rewards.min().item(), rewards.max().item())
                a, b = known.get(prompt.key, (self.prior, self.prior))
                known[prompt.key] = list(update_beta(a, b, rewards.mean().item(), len(rewards), self.keep, self.prior))


@part("curriculum", jointly={"target candidates": "0 to 1 and 1 or more", "keep prior": "0 to 1 and above 0"})
class ThompsonSampling(OfBeliefs):
    """Prompts with success rates nearest to `target`, sampled from their posteriors, among `candidates` times as many
    (MoPPS, 2507.04632).

    The rate of a prompt has the posterior Beta(a, b), which begins as Beta(prior, prior). After k samples with the mean
    reward s, within 0 to 1: a = keep a + (1 - keep) prior + s k, and b the same with 1 - s; keep < 1 forgets. That only
    sampled prompts forget, and the defaults other than target 1/2 and prior 1, are a reconstruction.
    """

    target: Annotated[float, AtLeast(0, to=1)] = 0.5
    candidates: Annotated[int, AtLeast(1)] = 4
    keep: Annotated[float, AtLeast(0, to=1)] = 0.5
    prior: Annotated[float, Above(0)] = 1.0

    def __call__(self, pool: Sequence[Prompt], count: int, epoch: int, seed: int, weights: Sequence[float] | None,
                 memory: dict[str, Any], group: int) -> list[Prompt]:
        most = max(min(self.candidates * count, len(pool)), count)
        candidates = sets.draw(list(pool), most, epoch, seed, weights)
        rates = np.random.default_rng([seed, epoch, 0]).beta(*posteriors(memory, candidates, self.prior).T)
        return [candidates[place] for place in np.abs(rates - self.target).argsort(kind="stable")[:count]]


def posteriors(memory: dict[str, Any], prompts: Sequence[Prompt], prior: float) -> np.ndarray:
    """(a, b) of the posterior Beta(a, b) of every prompt: [n, 2]; Beta(prior, prior) if it was never sampled."""
    known = memory.get(KEY, {})
    return np.array([known.get(prompt.key, (prior, prior)) for prompt in prompts])


def update_beta(a: float, b: float, share: float, samples: int, keep: float, prior: float) -> tuple[float, float]:
    """(a, b) after `samples` samples, a share of them right; keep < 1 forgets, towards the prior."""
    begin = (1 - keep) * prior
    return keep * a + begin + share * samples, keep * b + begin + (1 - share) * samples


def require_rate(prompt: str, least: float, most: float) -> None:
    """Raise UserError for rewards of a prompt that are no success rates, within 0 to 1."""
    if least < -RELATIVE_NOISE or most > 1 + RELATIVE_NOISE:
        raise UserError(f"rewards from {least:g} to {most:g} (prompt: {prompt!r}), but a curriculum counts them as "
                        "success rates, within 0 to 1: scale the rewards' weights")


@part("curriculum", jointly={"keep prior": "0 to 1 and above 0"})
class Knapsack(OfBeliefs):
    """More of an epoch's groups for prompts with more to learn from (Knapsack RL, 2509.25849): `allocate`.

    An epoch has `each` times fewer different prompts than groups, at least one group each. The others are allocated by
    each prompt's estimated success rate, the mean of its posterior, and compared as one by the advantage `Pooled`. The
    paper takes the rate of the previous epoch and allocates single samples; here `train.group` should be small.
    """

    each: Annotated[int, AtLeast(1)] = 4
    keep: Annotated[float, AtLeast(0, to=1)] = 0.5
    prior: Annotated[float, Above(0)] = 1.0

    def __call__(self, pool: Sequence[Prompt], count: int, epoch: int, seed: int, weights: Sequence[float] | None,
                 memory: dict[str, Any], group: int) -> list[Prompt]:
        drawn = sets.draw(list(pool), min(max(count // self.each, 1), len(pool)), epoch, seed, weights)
        a, b = posteriors(memory, drawn, self.prior).T
        groups = allocate((a / (a + b)).tolist(), count, group)
        return [prompt for prompt, number in zip(drawn, groups) for _ in range(number)]


def value(samples: int, rate: float) -> float:
    """The value of `samples` samples N of a prompt of success rate p: (1 - p^N - (1 - p)^N) p (1 - p)^2, the
    probability that they differ times the gain of a step on them (2509.25849)."""
    return (1 - rate ** samples - (1 - rate) ** samples) * rate * (1 - rate) ** 2


def allocate(rates: Sequence[float], units: int, size: int, least: int = 1) -> list[int]:
    """The number of units of `size` samples per prompt, `least` at least, that maximises the sum of `value`.
    The value is concave in N, so each unit in turn goes where it adds most, ties by position."""
    counts = [least] * len(rates)

    def gain(place: int) -> float:
        count = counts[place]
        return math.fsum((value((count + 1) * size, rates[place]), -value(count * size, rates[place])))

    heap = [(-gain(place), place) for place in range(len(rates))]
    heapq.heapify(heap)
    for _ in range(units - least * len(rates)):
        _, place = heapq.heappop(heap)
        counts[place] += 1
        heapq.heappush(heap, (-gain(place), place))
    return counts
