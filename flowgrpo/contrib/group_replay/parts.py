"""Replay of recorded groups: which earlier groups take the places of those whose samples all earn the same."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from flowgrpo.ranges import at_least


@dataclass(frozen=True)
class GroupReplay:
    """Buffer of the last `size` groups with advantages that are not all 0 (VL-Rethinker, 2504.08837;
    ExGRPO, 2510.02245).

    A group whose advantages are all 0 is replaced by a recorded one, drawn in proportion to |A|^alpha, its mean
    absolute advantage, while the buffer has any. A recorded group keeps its advantages and the log-probabilities of the
    policy that drew it: the ratio of the loss corrects for the policy's change since then, within its clip. Groups
    older than `age` epochs are dropped.

    certain: the odds have the further factor exp(certain * mean log-probability of a decision), which prefers groups of
        low entropy, as ExGRPO does.
    more: recorded groups that are trained besides, as a share of the epoch's own (DOTS, 2506.05316).
    recompose: an epoch trains the shorter half of a group's right samples and the longer half of its wrong ones; the
        others wait in the buffer for the compensation batches of `more` (RoRecomp). Texts alone have lengths.

    VL-Rethinker draws single samples; here the unit is a group.
    """

    size: int = 64
    age: int = 10
    alpha: float = 1.0
    certain: float = 0.0
    more: float = 0.0
    recompose: bool = False

    def __post_init__(self) -> None:
        at_least(self, 1, "size", "age")
        at_least(self, 0, "alpha", "certain", "more")

    def odds(self, sizes: Sequence[float], logps: Sequence[float]) -> np.ndarray:
        """Return the probabilities of groups by their mean |advantages| and mean log-probabilities."""
        if not len(sizes):
            return np.empty(0)
        scores = self.alpha * np.log(np.array(sizes)) + self.certain * np.array(logps)
        odds = np.exp(scores - scores.max())
        return odds / odds.sum()

    def chosen(self, sizes: Sequence[float], logps: Sequence[float], count: int, seed: Sequence[int]) -> list[int]:
        """Return the places of `count` different groups, or of all if there are fewer."""
        count = min(count, len(sizes))
        return np.random.default_rng(seed).choice(len(sizes), count, replace=False,
                                                  p=self.odds(sizes, logps)).tolist() if count else []


def priority(advantages: Tensor, lengths: Tensor) -> Tensor:
    """Return the samples [m] of a group that train at once: the shorter half, rounded up, of those with an advantage
    above 0, and the longer half of those below 0: bool [m]."""
    first = torch.zeros(len(advantages), dtype=torch.bool)
    for side, keys in ((advantages > 0, lengths), (advantages < 0, -lengths)):
        places = side.nonzero()[:, 0]
        first[places[keys[places].argsort(stable=True)[:-(-len(places) // 2)]]] = True
    return first
