"""Which groups of an epoch are replaced, and by which prompts: `redraw(drawn) -> [(place, prompt), ...]`.

Asked again after every turn, until nothing is to be drawn any more; `drawn` (`drawn.Drawn`) holds all turns so far, of
all processes. A replaced group is neither compared with others nor trained. Pure functions of what was drawn, so that a
resumed run draws the same.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from flowgrpo.advantages import zero_variance

if TYPE_CHECKING:
    from flowgrpo.data import Prompt
    from flowgrpo.drawn import Drawn


@dataclass(frozen=True)
class Never:
    """Every group stays."""

    def __call__(self, drawn: Drawn) -> list[tuple[int, Prompt]]:
        return []


@dataclass(frozen=True)
class Refill:
    """A group whose samples all earn the same is replaced by a fresh prompt, until all differ or an epoch was drawn
    `turns` times (DAPO's dynamic sampling, 2503.14476, equation 11; 10 in its released recipe).

    What counts is the weighted sum of rewards before any shaping. Every turn draws no more prompts than are missing, so
    that none is sampled in vain. Groups that still agree after the last turn stay, with advantage 0.
    """

    turns: int = 10

    def __post_init__(self) -> None:
        if self.turns < 2:
            raise ValueError(f"Refill: turns is {self.turns}, expected 2 or more (without a redraw: Never)")

    def __call__(self, drawn: Drawn) -> list[tuple[int, Prompt]]:
        if drawn.turn >= self.turns:
            return []
        agree = zero_variance(drawn.totals).tolist()
        places = [place for place in drawn.standing() if agree[place]]
        return list(zip(places, fresh(drawn.pool, len(places), drawn.prompts, [drawn.seed, drawn.epoch, drawn.turn])))


def fresh(pool: Sequence[Prompt], count: int, drawn: Sequence[Prompt], seed: Sequence[int]) -> list[Prompt]:
    """`count` prompts of the pool, those first that were drawn least often, at random among these, by their weights.
    One comes twice only where count exceeds the pool."""
    times = Counter(prompt.key for prompt in drawn)
    lots = np.random.default_rng(seed).exponential(size=len(pool)) / [prompt.weight for prompt in pool]
    order = sorted(range(len(pool)), key=lambda place: (times[pool[place].key], lots[place]))
    return [pool[order[number % len(pool)]] for number in range(count)]
