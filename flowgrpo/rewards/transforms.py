"""Transforms of one reward's scores before comparison: [P, G] to [P, G], P groups of G samples.

NaN, for a reward that does not apply to a sample, stays NaN and is ignored. Held-out scores are never transformed.
Values of a transform can move over the run (`reward_rules.Change`): thresholds that tighten (Vision-R1), budgets that
fall ("Train Long, Think Short").
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from flowgrpo.config.reward_rules import Band, Budget, Change, Clip, Stretch, Threshold, value_at

if TYPE_CHECKING:
    from torch import Tensor


def apply(transform: str | Clip | Threshold | Stretch | Band | Budget, scores: Tensor, progress: float = 0.0) -> Tensor:
    """Apply one transform of a recipe. progress: share of the run, 0 in the first epoch and 1 in the last."""
    def bounds(pair: tuple[float | Change, float | Change]) -> tuple[float, float]:
        return value_at(pair[0], progress), value_at(pair[1], progress)

    if isinstance(transform, Clip):
        return scores.clamp(*bounds(transform.clip))
    if isinstance(transform, Threshold):
        return threshold(scores, value_at(transform.threshold, progress))
    if isinstance(transform, Stretch):
        return stretch(scores, *bounds(transform.stretch))
    if isinstance(transform, Band):
        return band(scores, *bounds(transform.band), transform.margin)
    if isinstance(transform, Budget):
        most = value_at(transform.budget, progress)
        return band(scores, -float("inf"), most, most)
    return {"log": log, "rank": rank}[transform](scores)


def log(scores: Tensor) -> Tensor:
    """Return the natural logarithm.
    Raises ValueError for a score that is not above 0."""
    if (scores <= 0).any():
        raise ValueError(f"log of the score {scores[scores <= 0].min().item():g}, expected above 0: put a clip such as "
                         "{clip: [0.001, 1]} before it")
    return scores.log()


def threshold(scores: Tensor, least: float) -> Tensor:
    """Return 1 where a score is at least `least`, else 0."""
    return (scores >= least).to(scores).masked_fill(scores.isnan(), float("nan"))


def stretch(scores: Tensor, low: float, high: float) -> Tensor:
    """Return 0 up to `low`, 1 from `high` on, linear between."""
    return ((scores - low) / (high - low)).clamp(0, 1)


def band(scores: Tensor, low: float, high: float, margin: float) -> Tensor:
    """Return 1 within [low, high], falling linearly to 0 at a distance of `margin`; a margin of 0 is a step."""
    beyond = (low - scores).maximum(scores - high).clamp(min=0)
    return (1 - beyond / margin).clamp(min=0) if margin else (beyond == 0).to(scores).masked_fill(
        scores.isnan(), float("nan"))


def rank(scores: Tensor) -> Tensor:
    """Return each sample's rank in its group: 0 the lowest, 1 the highest, evenly spaced, ties at their mean rank.

    A sample that is alone with a score gets 1/2, and so does one in a group of equal scores.
    """
    value, other = scores[..., :, None], scores[..., None, :]
    below, equal = (other < value).sum(-1), (other == value).sum(-1) - 1
    others = (~scores.isnan()).sum(-1, keepdim=True) - 1
    places = (below + equal / 2).to(scores) / others.clamp(min=1)
    return places.masked_fill(others == 0, 0.5).masked_fill(scores.isnan(), float("nan"))
