"""Rewards made of rewards: scores [B, R], NaN where a reward does not apply, to values [B].

    reward:
      gated: {args: {rewards: [safety, {use: ocr, args: {score: partial}}], thresholds: [0.5]}}

Each part is a name, a rule as under `eval.rewards`, or a function. If a part failed (`on_error: skip`), or had no
answer, there is no score: a gate does not open because its judge declines. A weighted sum, a threshold, a rank and a
route need none of this; a recipe's rules have them.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from pydantic import ValidationError
from torch import Tensor

from flowgrpo.config.reward_rules import WatchRule
from flowgrpo.errors import UserError
from flowgrpo.rewards.about import MODALITIES, About, built_in
from flowgrpo.rewards.compose import Composed, compose
from flowgrpo.rewards.failures import Failed, first_failed, numbers
from flowgrpo.rewards.pairwise import sees_groups
from flowgrpo.rewards.reward import PASSED, Batch, Reward
from flowgrpo.rewards.score import of_batch


def where_any(scores: Tensor, values: Tensor) -> Tensor:
    """NaN in place of values where no column of the scores applies."""
    return values.masked_fill(scores.isnan().all(1), torch.nan)


LIKE_ITS_PARTS = About(modality="image/video/text", range=(None, None), needs="", licence="the rewards'")


@dataclass(frozen=True, eq=False)
class Combined(Reward):
    """Rewards scored together; a subclass combines their columns.

    A value is None where the parts do not apply, Failed where one of them failed or had no answer.
    smooth: `combine` has a gradient by its parts' scores. count: number of parts, None for any.
    Raises UserError as a recipe's rules do, and for a reward that compares the samples of a group.
    """

    rewards: Sequence[Any]
    made: dict[str, Composed] = field(init=False, repr=False, compare=False)
    about = LIKE_ITS_PARTS
    reward: ClassVar[str]
    smooth: ClassVar[bool] = False
    count: ClassVar[int | None] = None

    def __post_init__(self) -> None:
        self._require(isinstance(self.rewards, (list, tuple)) and self.rewards, "rewards", "a list of rewards")
        parts = {f"{self.reward}[{place}]": part for place, part in enumerate(self.rewards)}
        composed = compose({label: _rule(label, part) for label, part in parts.items()}, None,
                           {label: part for label, part in parts.items() if callable(part)})
        grouped = [part for part, reward in zip(self.rewards, composed.values()) if sees_groups(reward)]
        self._require(not grouped, "rewards", "rewards that score one sample at a time, not whole groups")
        common = [modality for modality in MODALITIES if all(modality in part.judges for part in composed.values())]
        self._require(common, "rewards", "rewards that judge the same: images, videos or texts")
        if self.count is not None:
            self._require(len(composed) == self.count, "rewards", "one reward" if self.count == 1 else "two rewards")
        vars(self).update(
            about=replace(self.about, modality="/".join(common)), judges=common, made=composed,
            parts=[*composed.values()],
            reads=frozenset().union(*(part.reads.intersection(PASSED) for part in composed.values())),
            differentiable=self.smooth and all(part.differentiable for part in composed.values()))

    def __call__(self, batch: Batch) -> list[float | None | Failed]:
        rows = list(zip(*self.columns(batch)))
        values = self.combine(torch.tensor(list(map(numbers, rows)), dtype=torch.float64)).tolist()
        return [first_failed(row) or (None if math.isnan(value) else value) for row, value in zip(rows, values)]

    def columns(self, batch: Batch) -> list[list[float | Failed]]:
        """Scores of the parts, one list each."""
        return of_batch(self.made, batch)

    def combine(self, scores: Tensor) -> Tensor:
        """Combine the parts' scores [B, R], NaN where one does not apply, into values [B]."""
        raise NotImplementedError

    def _require(self, holds: object, name: str, expected: str) -> None:
        if not holds:
            raise UserError(f"reward {self.reward!r}: {name} is {getattr(self, name)!r}, expected {expected}")


def _rule(label: str, part: Any) -> WatchRule:
    if callable(part):
        return WatchRule()
    try:
        return WatchRule.model_validate(part if isinstance(part, dict) else {"use": part})
    except ValidationError as error:
        first = error.errors()[0]
        raise UserError(f"{label}: {'.'.join(map(str, first['loc']))}: got {first['input']!r}, "
                        f"{first['msg'].lower()}") from None


@built_in("gated", "combine several condition only if", eq=False)
class Gated(Combined):
    """Last of several rewards if the others reach their thresholds, else 0."""

    thresholds: Sequence[float] = ()
    smooth = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require(len(self.thresholds) == len(self.rewards) - 1, "thresholds",
                      f"a list of {len(self.rewards) - 1}, one per reward but the last")

    def _open(self, scores: Tensor) -> Tensor:
        """True for each gate that is open, also one that does not apply: [B, R - 1]."""
        gates = scores[:, :-1]
        return gates.isnan() | (gates >= gates.new_tensor(self.thresholds))

    def combine(self, scores: Tensor) -> Tensor:
        return scores[:, -1] * self._open(scores).all(1)


@built_in("tiered", "combine several weighted", eq=False)
class Tiered(Gated):
    """Weighted sum of tiers, lowest first; one that misses its threshold zeroes those above it.

    It still counts itself (hierarchical gates, ChipSeek-R1). A tier that does not apply blocks and adds nothing.
    """

    weights: Sequence[float] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require(self.weights is None or len(self.weights) == len(self.rewards), "weights",
                      f"{len(self.rewards)}, one per reward")

    def combine(self, scores: Tensor) -> Tensor:
        reached = torch.cat([torch.ones_like(scores[:, :1], dtype=torch.bool),
                             self._open(scores).cumprod(1).bool()], 1)
        weighted = scores * scores.new_tensor([1.0] * scores.shape[1] if self.weights is None else self.weights)
        return where_any(scores, (weighted * reached).nansum(1))


@built_in("harmonic", "likeness person dreambooth", eq=False)
class Harmonic(Combined):
    """Weighted harmonic mean of the similarities to a subject's image and to the prompt (RPO), in this order.
    share: weight of the first. cosines: the rewards are cosines, each counted as (cos + 1) / 2.

    A share of 1 or 0 ignores the other one; else the mean is 0 where one is not above 0.
    """

    share: float = 0.5
    cosines: bool = False
    smooth = True
    count = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require(0 <= self.share <= 1, "share", "a number from 0 to 1")

    def combine(self, scores: Tensor) -> Tensor:
        image, text = ((scores + 1) / 2 if self.cosines else scores).unbind(1)
        if self.share in (0, 1):
            return image if self.share else text
        positive = (image > 0) & (text > 0)
        one = torch.ones_like(image)
        mean = 1 / (self.share / image.where(positive, one) + (1 - self.share) / text.where(positive, one))
        return (mean * positive).masked_fill(image.isnan() | text.isnan(), torch.nan)
