"""Prompts of a phase, with the hardest ones of earlier phases."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from flowgrpo.curriculum.history import RATES, record
from flowgrpo.data.prompts import Prompt

if TYPE_CHECKING:
    from flowgrpo.curriculum.epoch_batch import EpochBatch

MEAN = "phase_mean"  # key of the memory: the last epoch's mean total reward
LEAST = 0.05  # of the odds of a prompt that was always solved


@dataclass(frozen=True)
class Carried:
    """Curriculum of a phase: a share of the epoch is drawn from prompts of earlier phases, the others by `inner`.

    The odds of an earlier prompt fall with its newest success rate p, as max(1 - p, 0.05) (difficulty-aware
    retrospective sampling of QwenLong-L1, 2505.17667).

    now: keys of the phase's prompts. records: rates are recorded for later phases.
    """

    inner: Any
    now: frozenset[str]
    share: float = 0.0
    records: bool = False

    @property
    def reads_diversity(self) -> bool:
        """Return True if the inner curriculum reads diversity."""
        return getattr(self.inner, "reads_diversity", False)

    @property
    def reads_norms(self) -> bool:
        """Return True if the inner curriculum reads norms of gradients."""
        return getattr(self.inner, "reads_norms", False)

    def __call__(self, pool: Sequence[Prompt], count: int, epoch: int, seed: int, weights: Sequence[float] | None,
                 memory: dict[str, Any], group: int) -> list[Prompt]:
        present = [place for place, prompt in enumerate(pool) if prompt.key in self.now]
        known = memory.get(RATES, {})
        earlier = [prompt for prompt in pool if prompt.key not in self.now and known.get(prompt.key)]
        number = min(round(self.share * count), len(earlier))
        chosen = []
        if number:
            odds = np.array([max(1 - known[prompt.key][-1], LEAST) for prompt in earlier])
            rng = np.random.default_rng([seed, epoch, 3])
            chosen = rng.choice(len(earlier), number, replace=False, p=odds / odds.sum()).tolist()
        given = weights if weights is None else [weights[place] for place in present]
        return [earlier[place] for place in chosen] + self.inner(
            [pool[place] for place in present], count - number, epoch, seed, given, memory, group)

    def learn(self, memory: dict[str, Any], drawn: EpochBatch) -> None:
        """Pass an epoch on to the inner curriculum; record its mean reward, and rates if a phase reads them."""
        before = {key: list(rates) for key, rates in memory.get(RATES, {}).items()}
        self.inner.learn(memory, drawn)
        if self.records and memory.get(RATES, {}) == before:  # the inner one recorded none
            record(memory, drawn)
        memory[MEAN] = drawn.totals.nanmean().item()
