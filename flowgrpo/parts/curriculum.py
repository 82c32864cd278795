"""Which prompts an epoch begins with: `curriculum(pool, count, epoch, seed, wanted, memory, group) -> count prompts`.

pool: the training prompts; wanted: how often the method's advantage wants each of them drawn, or None; memory: what is
kept between epochs and in checkpoints; group: the samples of each prompt. After an epoch's sampling `learn(memory,
drawn)` tells what was found. All of it is the same on every process, and after a resume.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from flowgrpo import data
from flowgrpo.parts import beliefs

if TYPE_CHECKING:
    from flowgrpo.drawn import Drawn


@dataclass(frozen=True)
class Walk:
    """Through all prompts in turn, or by their weights where these differ: `data.draw`."""

    def __call__(self, pool: Sequence[data.Prompt], count: int, epoch: int, seed: int, wanted: Sequence[float] | None,
                 memory: dict[str, Any], group: int) -> list[data.Prompt]:
        return data.draw(list(pool), count, epoch, seed, wanted)

    def learn(self, memory: dict[str, Any], drawn: Drawn) -> None:
        """Nothing is remembered."""


@dataclass(frozen=True)
class Posterior:
    """Of `candidates` times as many prompts those whose success rate, drawn from its posterior, is nearest to `target`
    (MoPPS, 2507.04632).

    The rate of a prompt has the posterior Beta(a, b), which begins as Beta(prior, prior). After k samples with the mean
    reward s, within 0 to 1: a = keep a + (1 - keep) prior + s k, and b the same with 1 - s; keep < 1 forgets. Draws
    are Thompson's: one number per candidate and epoch, so that uncertain prompts are tried. That only prompts that were
    sampled forget, and the default numbers but target 1/2 and prior 1, are a reconstruction.
    """

    target: float = 0.5
    candidates: int = 4
    keep: float = 0.5
    prior: float = 1.0

    def __post_init__(self) -> None:
        if not 0 <= self.target <= 1 or self.candidates < 1:
            raise ValueError(f"Posterior: target is {self.target} and candidates {self.candidates}, expected 0 to 1 "
                             "and 1 or more")
        beliefs.require("Posterior", self.keep, self.prior)

    def __call__(self, pool: Sequence[data.Prompt], count: int, epoch: int, seed: int, wanted: Sequence[float] | None,
                 memory: dict[str, Any], group: int) -> list[data.Prompt]:
        most = max(min(self.candidates * count, len(pool)), count)
        asked = data.draw(list(pool), most, epoch, seed, wanted)
        rates = np.random.default_rng([seed, epoch, 0]).beta(*beliefs.of(memory, asked, self.prior).T)
        return [asked[place] for place in np.abs(rates - self.target).argsort(kind="stable")[:count]]

    def learn(self, memory: dict[str, Any], drawn: Drawn) -> None:
        beliefs.learn(memory, drawn, self.keep, self.prior)
