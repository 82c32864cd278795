"""Rewards made of rewards, by thresholds and error rates: `ternary`, `checklist` and `corrected`.

The first half is pure, as in rewards/combine.py: scores [B, R], NaN where a reward does not apply, to values [B].
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from flowgrpo.rewards.combine import LIKE_ITS_PARTS, Combined, where_any


def ternary(score: Tensor, right: float, wrong: float) -> Tensor:
    """Return 1 from `right` on, -1 up to `wrong`, and 0 between and for a sample without an answer (NaN): abstaining
    costs less than being wrong (TruthRL). [B] -> [B]."""
    return (score >= right).to(score) - (score <= wrong).to(score)


def checklist(scores: Tensor, thresholds: Sequence[float]) -> Tensor:
    """Return the share of applicable items that reach their threshold (ACE-RL); NaN if none applies. [B, R] -> [B]."""
    met = (scores >= scores.new_tensor(thresholds)).sum(1)
    return where_any(scores, met / (~scores.isnan()).sum(1).clamp(min=1).to(scores))


def corrected(score: Tensor, false_positive: float, false_negative: float) -> Tensor:
    """Correct a verdict r in {0, 1} of a verifier with known error rates: (r - fp) / (1 - fp - fn), whose mean over the
    errors is the true verdict (backward correction, "RL with Verifiable yet Noisy Rewards under Imperfect Verifiers").
    [B] -> [B]."""
    return (score - false_positive) / (1 - false_positive - false_negative)


@dataclass(frozen=True, eq=False)
class Ternary(Combined):
    """1 where a reward reaches `right`, -1 where it is at most `wrong`, 0 between and where it answers None."""

    right: float = 1.0
    wrong: float = 0.0
    about = replace(LIKE_ITS_PARTS, range=(-1, 1))

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require(len(self.rewards) == 1, "rewards", "one reward")
        self._require(self.wrong < self.right, "wrong", f"less than right, which is {self.right!r}")

    def combined(self, scores: Tensor) -> Tensor:
        return ternary(scores[:, 0], self.right, self.wrong)


@dataclass(frozen=True, eq=False)
class Checklist(Combined):
    """Share of several rewards, among those that apply, that reach their thresholds (1 for each by default)."""

    thresholds: Sequence[float] | None = None
    about = replace(LIKE_ITS_PARTS, range=(0, 1))

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require(self.thresholds is None or len(self.thresholds) == len(self.rewards), "thresholds",
                      f"{len(self.rewards)}, one per reward")

    def combined(self, scores: Tensor) -> Tensor:
        return checklist(scores, [1.0] * scores.shape[1] if self.thresholds is None else self.thresholds)


@dataclass(frozen=True, eq=False)
class Corrected(Combined):
    """Verdict, 0 or 1, of a verifier with known error rates, corrected to be unbiased."""

    false_positive: float = 0.0
    false_negative: float = 0.0
    smooth = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require(len(self.rewards) == 1, "rewards", "one reward")
        for name in ("false_positive", "false_negative"):
            self._require(0 <= getattr(self, name) < 1, name, "a rate from 0 to below 1")
        self._require(self.false_positive + self.false_negative < 1, "false_positive",
                      f"less than 1 - false_negative, {1 - self.false_negative:g}: such a verdict says nothing")

    def combined(self, scores: Tensor) -> Tensor:
        return corrected(scores[:, 0], self.false_positive, self.false_negative)
