"""Rewards made of rewards. The first half is pure: scores [B, R], NaN where a reward does not apply, to values [B].

    reward:
      gated: {args: {rewards: [safety, {use: ocr, args: {score: partial}}], thresholds: [0.5]}}

Each part is a name, a rule as under `eval.rewards`, or a function. If a part failed (`on_error: skip`), or had no
answer, there is no score: a gate does not open because its judge declines. A weighted sum, a threshold, a rank and a
route need none of this; a recipe's rules have them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from pydantic import ValidationError
from torch import Tensor

from flowgrpo.config.reward_rules import WatchRule
from flowgrpo.errors import UserError
from flowgrpo.rewards.about import MODALITIES, About, built_in
from flowgrpo.rewards.failures import Failed
from flowgrpo.rewards.reward import PASSED, Batch, Reward

if TYPE_CHECKING:
    from flowgrpo.rewards.compose import Composed

# --- pure ------------------------------------------------------------------------------------------------------------


def tiered_sum(scores: Tensor, thresholds: Sequence[float], weights: Sequence[float] | None = None) -> Tensor:
    """Weighted sum of the active tiers, the lowest first: one that misses its threshold still counts itself, but zeroes
    all above it (hierarchical gates, ChipSeek-R1). [B, R], R - 1 thresholds, R weights (default 1 each) -> [B].

    A tier that does not apply (NaN) blocks nothing and adds nothing; NaN if none applies.
    """
    below = scores[:, :-1]
    passed = below.isnan() | (below >= scores.new_tensor(thresholds))
    reached = torch.cat([torch.ones_like(scores[:, :1], dtype=torch.bool), passed.cumprod(1).bool()], 1)
    weighted = scores * scores.new_tensor([1.0] * scores.shape[1] if weights is None else weights)
    return where_any(scores, (weighted * reached).nansum(1))


def gate(scores: Tensor, thresholds: Sequence[float]) -> Tensor:
    """Last column where every column before it reaches its threshold, else 0. [B, R], R - 1 thresholds -> [B].

    A gate that does not apply is open; NaN where the last column does not apply.
    """
    gates = scores[:, :-1]
    opened = (gates.isnan() | (gates >= gates.new_tensor(thresholds))).all(1)
    return scores[:, -1] * opened


def harmonic(image: Tensor, text: Tensor, share: float) -> Tensor:
    """RPO's reward of subject-driven generation: 1 / (share / image + (1 - share) / text). It is the weighted harmonic
    mean of the similarities to the subject's image and to the prompt. 0 where one is not above 0. A share of 1 or 0
    ignores the other one. [B], [B] -> [B]."""
    if share in (0, 1):
        return image if share else text
    positive = (image > 0) & (text > 0)
    one = torch.ones_like(image)
    mean = 1 / (share / image.where(positive, one) + (1 - share) / text.where(positive, one))
    return (mean * positive).masked_fill(image.isnan() | text.isnan(), torch.nan)


def where_any(scores: Tensor, values: Tensor) -> Tensor:
    """NaN in place of values where no column of the scores applies."""
    return values.masked_fill(scores.isnan().all(1), torch.nan)


# --- for a recipe ----------------------------------------------------------------------------------------------------

LIKE_ITS_PARTS = About(modality="image/video/text", range=(None, None), needs="", licence="the rewards'")


@dataclass(frozen=True, eq=False)
class Combined(Reward):
    """Rewards scored together; a subclass combines their columns.

    A value is None where the parts do not apply, Failed where one of them failed or had no answer.
    smooth: `combine` has a gradient by its parts' scores.
    Raises UserError as a recipe's rules do, and for a reward that compares the samples of a group.
    """

    rewards: Sequence[Any]
    made: dict[str, Composed] = field(init=False, repr=False, compare=False)
    about = LIKE_ITS_PARTS
    smooth: ClassVar[bool] = False

    def __post_init__(self) -> None:
        from flowgrpo.rewards.compose import compose
        from flowgrpo.rewards.pairwise import sees_groups

        self._require(isinstance(self.rewards, (list, tuple)) and self.rewards, "rewards", "a list of rewards")
        given = {self._label(i): part for i, part in enumerate(self.rewards) if callable(part)}
        composed = compose({self._label(i): self._rule(i) for i in range(len(self.rewards))}, None, given)
        grouped = [part for part, reward in zip(self.rewards, composed.values()) if sees_groups(reward)]
        self._require(not grouped, "rewards", "rewards that score one sample at a time, not whole groups")
        common = [modality for modality in MODALITIES if all(modality in part.judges for part in composed.values())]
        self._require(common, "rewards", "rewards that judge the same: images, videos or texts")
        facts = {"about": replace(self.about, modality="/".join(common)), "judges": common, "made": composed,
                 "parts": [*composed.values()], "reads": frozenset().union(
                     *(part.reads.intersection(PASSED) for part in composed.values())),
                 "differentiable": self.smooth and all(part.differentiable for part in composed.values())}
        for name, value in facts.items():
            object.__setattr__(self, name, value)

    def __call__(self, batch: Batch) -> list[float | None | Failed]:
        return self.values(self.columns(batch))

    def columns(self, batch: Batch) -> list[list[float | Failed]]:
        """Scores of the parts, one list each."""
        from flowgrpo.rewards.score import of_batch

        return of_batch(self.made, batch)

    def values(self, columns: Sequence[Sequence[float | Failed]]) -> list[float | None | Failed]:
        """Combine R columns of scores."""
        rows = list(zip(*columns))
        numbers = [[math.nan if isinstance(value, Failed) else value for value in row] for row in rows]
        values = self.combine(torch.tensor(numbers, dtype=torch.float64)).tolist()
        failed = [[value for value in row if isinstance(value, Failed)] for row in rows]
        return [lost[0] if lost else None if math.isnan(value) else value for lost, value in zip(failed, values)]

    def combine(self, scores: Tensor) -> Tensor:
        """Combine the parts' scores [B, R], NaN where one does not apply, into values [B]."""
        raise NotImplementedError

    def _label(self, place: int) -> str:
        return f"{self._name}[{place}]"

    @property
    def _name(self) -> str:
        return re.sub(r"(?<!^)(?=[A-Z])", "_", type(self).__name__).lower()

    def _rule(self, place: int) -> WatchRule:
        part = self.rewards[place]
        if callable(part):
            return WatchRule()
        try:
            return WatchRule.model_validate(part if isinstance(part, dict) else {"use": part})
        except ValidationError as error:
            first = error.errors()[0]
            raise UserError(f"{self._label(place)}: {'.'.join(map(str, first['loc']))}: got {first['input']!r}, "
                            f"{first['msg'].lower()}") from None

    def _require(self, holds: object, name: str, expected: str) -> None:
        if not holds:
            raise UserError(f"reward {self._name!r}: {name} is {getattr(self, name)!r}, expected {expected}")

    def _require_thresholds(self, thresholds: Sequence[float]) -> None:
        self._require(len(thresholds) == len(self.rewards) - 1, "thresholds",
                      f"a list of {len(self.rewards) - 1}, one per reward but the last")


@built_in("tiered", "combine several weighted")
@dataclass(frozen=True, eq=False)
class Tiered(Combined):
    """Weighted sum of tiers, lowest first; one that misses its threshold zeroes those above it."""

    thresholds: Sequence[float] = ()
    weights: Sequence[float] | None = None
    smooth = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require_thresholds(self.thresholds)
        self._require(self.weights is None or len(self.weights) == len(self.rewards), "weights",
                      f"{len(self.rewards)}, one per reward")

    def combine(self, scores: Tensor) -> Tensor:
        return tiered_sum(scores, self.thresholds, self.weights)


@built_in("gated", "combine several condition only if")
@dataclass(frozen=True, eq=False)
class Gated(Combined):
    """Last of several rewards if the others reach their thresholds, else 0."""

    thresholds: Sequence[float] = ()
    smooth = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require_thresholds(self.thresholds)

    def combine(self, scores: Tensor) -> Tensor:
        return gate(scores, self.thresholds)


@built_in("harmonic", "likeness person dreambooth")
@dataclass(frozen=True, eq=False)
class Harmonic(Combined):
    """Weighted harmonic mean of the similarities to a subject's image and to the prompt (RPO), in this order.
    share: weight of the first. cosines: the rewards are cosines, each counted as (cos + 1) / 2."""

    share: float = 0.5
    cosines: bool = False
    smooth = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require(len(self.rewards) == 2, "rewards", "two rewards")
        self._require(0 <= self.share <= 1, "share", "a number from 0 to 1")

    def combine(self, scores: Tensor) -> Tensor:
        image, text = ((scores + 1) / 2 if self.cosines else scores).unbind(1)
        return harmonic(image, text, self.share)
