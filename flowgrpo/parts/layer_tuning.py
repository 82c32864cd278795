"""LayerTuning (Dynamic-TreeRPO, 2509.23352), a reconstruction: a supervised term in a policy-gradient loss.

Its abstract and reviews say this much: the clip bounds lie between two values and depend on the reward with a
sensitivity (its equation 11), and a regression to the prediction along the best path of the group, weighted as a
progress reward, is added with a coefficient (equation 13). The equations themselves could not be read. The forms here
(the sigmoid, the upper bound alone, the weight by the best advantage) are ours.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from flowgrpo.samplers.rollout import Part
from flowgrpo.types import Goal, Scored, Transitions


@dataclass(frozen=True)
class LayerTuning:
    """weight * w * mean((v - v*)^2) per decision, [B, 1] (LayerTuning, 2509.23352, a reconstruction).

    v is the model's output on a sample's own state, v* the old policy's at the same step on the path to the best sample
    of its group, and w that sample's advantage: the farther it stands out, the stronger the pull, and a group without
    variance has none (`towards_best`). Weight 0 leaves it out and reads no means.
    """

    weight: float = 0.0

    def __post_init__(self) -> None:
        if not self.weight >= 0:
            raise ValueError(f"LayerTuning: weight is {self.weight}, expected 0 or more")

    def __call__(self, new: Scored, goal: Goal) -> Tensor:
        assert new.mean is not None and new.slope is not None, "LayerTuning needs means and slopes"
        # A mean is affine in the output: the difference of outputs is that of means over the slope.
        apart = (new.mean - goal.mean).square().flatten(2).mean(dim=2)
        return self.weight * goal.weight * apart / new.slope.to(apart).square()


def towards_best(part: Part, advantages: Tensor) -> Part:
    """The part with a goal for each of its transitions: the mean that it would have with the output v* that the policy
    gave on the path to the best leaf of its group, and that leaf's advantage.

    advantages: [N, G] of the leaves of the part's N groups. The part has to have its means recorded.
    """
    weight, best = advantages.max(dim=1)
    weight = weight.clamp(min=0)
    return replace(part, transitions=tuple(_aimed(taken, part, weight, best) for taken in part.transitions))


def _aimed(taken: Transitions, part: Part, weight: Tensor, best: Tensor) -> Transitions:
    assert taken.old.mean is not None, "LayerTuning needs recorded means"
    exploration, groups, edges = part.exploration, len(best), len(taken.parent)
    width = len(part.prompts) // edges
    of_best = torch.arange(groups) * (edges // groups) + best.cpu() // width
    parent, group = taken.parent, torch.arange(edges) // (edges // groups)
    rest = exploration.transition(taken.x, torch.zeros_like(taken.x), exploration.grid, taken.step).mean
    device = rest.device
    drawn = taken.old.mean[of_best.to(device), 0] - rest[parent[of_best].to(device)]  # slope * v*
    mean = rest[parent.to(device)] + drawn[group.to(device)]
    return replace(taken, goal=Goal(mean[:, None], weight.cpu()[group, None].to(mean)))
