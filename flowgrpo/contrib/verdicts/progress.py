"""Reward of a failure by its distance to the successes of its group (SRPO)."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from flowgrpo.rewards.combine import LIKE_ITS_PARTS, Combined
from flowgrpo.rewards.failures import Failed, numbers
from flowgrpo.rewards.reward import Batch

# --- pure ------------------------------------------------------------------------------------------------------------


def ngrams(text: str, n: int) -> set[tuple[str, ...]]:
    """Return the word n-grams of a text in lower case; of a shorter text, all its words."""
    words = text.casefold().split()
    return {tuple(words[i:i + n]) for i in range(max(1, len(words) - n + 1))}


def progress(success: Tensor, apart: Tensor, most: float) -> Tensor:
    """Return 1 for successes, and for failures most * sigmoid(-z), z the distance to the nearest success, standardised
    over the group's failures; 0 for failures of a group without a success.

    success: bool [G]. apart: [G, G], distances between samples. Returns [G].
    """
    values = success.to(apart)
    if not success.any() or success.all():
        return values
    nearest = apart[~success][:, success].amin(1)
    z = (nearest - nearest.mean()) / (nearest.std(correction=0) + 1e-8)
    values[~success] = most * (-z).sigmoid()
    return values


# --- for a recipe ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Progress(Combined):
    """1 for a success, and for a failure its nearness to the successes of its group, below 1 (SRPO).

    rewards: one verdict, with `right`, the score from which on it is a success. features: of pictures as in
    `diversity`; texts are compared by their words, 1 less the Jaccard similarity. most: bound of a failure's reward.
    After SRPO, whose distance is one to the centre of a cluster of successes; here it is that to the nearest success,
    standardised within the group. A group without a success falls back to 0 for all.
    """

    right: float = 1.0
    most: float = 0.8
    features: Any = "pixels"
    unit = "group"
    about = replace(LIKE_ITS_PARTS, modality="image/text", range=(0, 1))

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require(len(self.rewards) == 1, "rewards", "one reward")
        self._require(0 < self.most < 1, "most", "above 0 and below 1")

    def __call__(self, batch: Batch) -> list[float | None | Failed]:
        [column] = self.columns(batch)
        verdicts = torch.tensor(numbers(column), dtype=torch.float64)
        values: list[float | None | Failed] = []
        for start in range(0, len(batch), batch.group):
            at = slice(start, start + batch.group)
            found = progress(verdicts[at] >= self.right, self._apart(batch.samples[at]), self.most).tolist()
            values += [answer if isinstance(answer, Failed) else None if math.isnan(answer) else value
                       for answer, value in zip(column[at], found)]
        return values

    def _apart(self, outputs: Tensor | list[str]) -> Tensor:
        """Return the distances between the samples of a group, [G, G]."""
        if isinstance(outputs, Tensor):
            from flowgrpo.rewards.guards import extractor

            features = torch.as_tensor(extractor(self.features)(outputs)).double()
            return (features[:, None] - features[None]).norm(dim=-1)
        from flowgrpo.text.rewards.diversity import likeness

        words = [ngrams(text, 1) for text in outputs]
        return torch.tensor([[1 - likeness(one, other) for other in words] for one in words], dtype=torch.float64)
