"""What the scores of one reward become before they are compared: [P, G] to [P, G], P groups of G samples.

NaN, a reward that does not apply to a sample, stays NaN and counts for nothing. Held-out scores are never transformed:
they stay what the reward said.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from flowgrpo.config.reward_rules import Clip, Threshold

if TYPE_CHECKING:
    from torch import Tensor


def apply(transform: str | Clip | Threshold, scores: Tensor) -> Tensor:
    """One transform of a recipe."""
    if isinstance(transform, Clip):
        return scores.clamp(*transform.clip)
    if isinstance(transform, Threshold):
        return threshold(scores, transform.threshold)
    return {"log": log, "rank": rank}[transform](scores)


def log(scores: Tensor) -> Tensor:
    """The natural logarithm. ValueError for a score that is not above 0."""
    if (scores <= 0).any():
        raise ValueError(f"log of the score {scores[scores <= 0].min().item():g}, expected above 0: put a clip such as "
                         "{clip: [0.001, 1]} before it")
    return scores.log()


def threshold(scores: Tensor, least: float) -> Tensor:
    """1 where a score is at least `least`, else 0."""
    return (scores >= least).to(scores).masked_fill(scores.isnan(), float("nan"))


def rank(scores: Tensor) -> Tensor:
    """The place of each sample in its group: 0 the lowest, 1 the highest, evenly between, ties at their mean place.

    A sample that is alone with a score stands at 1/2, as one does whose equals all others are.
    """
    each, other = scores[..., :, None], scores[..., None, :]
    below, equal = (other < each).sum(-1), (other == each).sum(-1) - 1
    others = (~scores.isnan()).sum(-1, keepdim=True) - 1
    places = (below + equal / 2).to(scores) / others.clamp(min=1)
    return places.masked_fill(others == 0, 0.5).masked_fill(scores.isnan(), float("nan"))
