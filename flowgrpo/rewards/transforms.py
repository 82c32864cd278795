"""Transforms of one reward's scores before comparison: [P, G] to [P, G], P groups of G samples.

NaN, for a reward that does not apply to a sample, stays NaN and is ignored. Held-out scores are never transformed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from flowgrpo.config.reward_rules import Clip, Threshold

if TYPE_CHECKING:
    from torch import Tensor


def apply(transform: str | Clip | Threshold, scores: Tensor) -> Tensor:
    """Apply one transform of a recipe."""
    if isinstance(transform, Clip):
        return scores.clamp(*transform.clip)
    if isinstance(transform, Threshold):
        return threshold(scores, transform.threshold)
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


def rank(scores: Tensor) -> Tensor:
    """Return each sample's rank in its group: 0 the lowest, 1 the highest, evenly spaced, ties at their mean rank.

    A sample that is alone with a score gets 1/2, and so does one in a group of equal scores.
    """
    value, other = scores[..., :, None], scores[..., None, :]
    below, equal = (other < value).sum(-1), (other == value).sum(-1) - 1
    others = (~scores.isnan()).sum(-1, keepdim=True) - 1
    places = (below + equal / 2).to(scores) / others.clamp(min=1)
    return places.masked_fill(others == 0, 0.5).masked_fill(scores.isnan(), float("nan"))
