"""The base's images under shuffled prompts: a reward that scores them alike cannot tell whether an image fits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from flowgrpo import rewards
from flowgrpo.config.reward_rules import WatchRule
from flowgrpo.data.prompts import Prompt
from flowgrpo.device import random_state_kept
from flowgrpo.errors import UserError
from flowgrpo.evaluation.statistics import PAIRS
from flowgrpo.rewards.reward import FPS

MOST = 32  # images of a reward


@dataclass(frozen=True)
class Shuffled:
    """Rewards, and for each the other prompt under which it scores a prompt's image, by the prompt's index."""

    rewards: dict[str, Any]
    others: dict[str, dict[int, Prompt]]

    @classmethod
    def of(cls, functions: Mapping[str, Any], prompts: Sequence[Prompt]) -> Shuffled:
        """Return the rewards that score one sample by itself in this process, if PAIRS of the first MOST prompts have
        another prompt."""
        others = {name: _others([i for i, prompt in enumerate(prompts[:MOST])
                                 if getattr(reward, "rule", WatchRule()).applies(prompt.metadata)], prompts)
                  for name, reward in functions.items() if _alone(reward)}
        others = {name: paired for name, paired in others.items() if len(paired) >= PAIRS}
        made = {name: functions[name] for name in others}
        return cls({name: rewards.tried(reward) if isinstance(reward, rewards.Composed) else reward
                    for name, reward in made.items()}, others)

    def score(self, indices: Sequence[int | None], images: Any, policy: Any) -> torch.Tensor:
        """Score images of the prompts with these indices under the other prompts -> [B, R]; NaN for an index of None,
        for a prompt without another, and where a reward fails. The random state is kept."""
        scores = torch.full((len(indices), len(self.rewards)), torch.nan)
        with random_state_kept(policy.device):
            for column, (name, reward) in enumerate(self.rewards.items()):
                paired = self.others[name]
                rows = [row for row, i in enumerate(indices) if i in paired]
                if not rows:
                    continue
                of = [paired[i] for i in indices if i is not None and i in paired]
                some = [images[row] for row in rows] if isinstance(images, list) else images[rows]
                try:
                    scores[rows, column] = rewards.score(
                        {name: reward}, some, [p.text for p in of], [p.metadata for p in of], fps=policy.fps)[:, 0]
                except UserError:  # it has just scored the same images under their own prompts
                    continue
        return scores


def _alone(reward: Any) -> bool:
    """True if a reward scores one sample by itself, in this process, and reads nothing else."""
    parts = rewards.inside(reward)
    reads = {read for part in parts for read in part.reads if not read.startswith("metadata.")}
    return all(part.unit == "sample" for part in parts) and reads <= {FPS} and not rewards.slow(reward)


def _others(indices: list[int], prompts: Sequence[Prompt]) -> dict[int, Prompt]:
    """Return another prompt for each index: that half the list away, or at the distance that gives most of them
    another text or other metadata. Those that get their own are left out."""
    found: dict[int, Prompt] = {}
    count = len(indices)
    for shift in sorted(range(1, count), key=lambda shift: abs(shift - count // 2)):
        moved = {i: prompts[j] for i, j in zip(indices, indices[shift:] + indices[:shift])
                 if (prompts[i].text, prompts[i].metadata) != (prompts[j].text, prompts[j].metadata)}
        found = moved if len(moved) > len(found) else found
    return found
