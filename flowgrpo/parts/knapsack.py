"""How an epoch's samples are shared out among prompts: a part of a method's `curriculum`, and the advantage with it."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from flowgrpo import data
from flowgrpo.parts import beliefs

if TYPE_CHECKING:
    from flowgrpo.drawn import Drawn


@dataclass(frozen=True)
class Knapsack:
    """Of an epoch's groups more go to prompts from which more is to be learned (Knapsack RL, 2509.25849): `allocated`.

    An epoch has `each` times fewer different prompts than groups, every one with a group at least; the others are
    shared out by the success rate that is believed of each, the mean of its posterior (`beliefs`). What a prompt's
    groups earn is compared as one by the advantage `Pooled`. The paper takes the rate of the epoch before and shares
    out single samples; here the unit is a group, so that `train.group` should be small.
    """

    each: int = 4
    keep: float = 0.5
    prior: float = 1.0

    def __post_init__(self) -> None:
        if self.each < 1:
            raise ValueError(f"Knapsack: each is {self.each}, expected 1 or more")
        beliefs.require("Knapsack", self.keep, self.prior)

    def __call__(self, pool: Sequence[data.Prompt], count: int, epoch: int, seed: int, wanted: Sequence[float] | None,
                 memory: dict[str, Any], group: int) -> list[data.Prompt]:
        asked = data.draw(list(pool), min(max(count // self.each, 1), len(pool)), epoch, seed, wanted)
        a, b = beliefs.of(memory, asked, self.prior).T
        groups = allocated((a / (a + b)).tolist(), count, group)
        return [prompt for prompt, own in zip(asked, groups) for _ in range(own)]

    def learn(self, memory: dict[str, Any], drawn: Drawn) -> None:
        beliefs.learn(memory, drawn, self.keep, self.prior)


def value(samples: int, rate: float) -> float:
    """What so many samples of a prompt of this success rate p are worth: (1 - p^N - (1 - p)^N) p (1 - p)^2, the
    probability that they differ times the gain of a step on them (2509.25849)."""
    return (1 - rate ** samples - (1 - rate) ** samples) * rate * (1 - rate) ** 2


def allocated(rates: Sequence[float], units: int, size: int, least: int = 1) -> list[int]:
    """How many units of `size` samples each prompt gets, `least` at least, so that the sum of `value` is the largest:
    since that grows ever slower with N, each unit in turn goes where it adds most, ties by position."""
    found = [least] * len(rates)

    def gain(place: int) -> float:
        own = found[place]
        return math.fsum((value((own + 1) * size, rates[place]), -value(own * size, rates[place])))

    heap = [(-gain(place), place) for place in range(len(rates))]
    heapq.heapify(heap)
    for _ in range(units - least * len(rates)):
        _, place = heapq.heappop(heap)
        found[place] += 1
        heapq.heappush(heap, (-gain(place), place))
    return found
