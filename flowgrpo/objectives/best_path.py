"""LayerTuning (Dynamic-TreeRPO, 2509.23352), a reconstruction: a supervised term in a policy-gradient loss.

Its abstract and reviews give these facts. The clip bounds lie between two values and depend on the reward with a
sensitivity (its equation 11). A regression to the prediction along the best path of the group, dynamically weighted as
a progress reward, is added with a coefficient (equation 13). The equations themselves could not be read. The forms here
(the sigmoid in both bounds, progress as the gain of the mean advantage below) are ours.
"""

from __future__ import annotations

from typing import Annotated, Literal

from torch import Tensor

from flowgrpo.objectives.kl import beside
from flowgrpo.parts import AtLeast, part
from flowgrpo.types import RegressionTarget, Scored


@part("tuning")
class LayerTuning:
    """weight * w * mean((v - v*)^2) per decision, [B, 1] (LayerTuning, 2509.23352, a reconstruction).

    v is the model's output on a sample's own state. v* is the old policy's at the same step on the path to the best
    sample of its group. Weight 0 omits the term and reads no means.

    by: what w is, 0 where it is negative. "advantage": that of the best sample, at every step. "progress": what its
        path gained at this step, the mean advantage of the samples below its edge less that of the samples below the
        state that the edge leaves. Over the steps of a tree these gains add up to the best sample's advantage above its
        root's mean; a step that splits nothing gains nothing.
    A group without variance has no pull (`towards_best`).
    """

    weight: Annotated[float, AtLeast(0)] = 0.0
    by: Literal["advantage", "progress"] = "advantage"

    def weights(self, advantages: Tensor, edges: int, states: int) -> Tensor:
        """Return the weight w [N] of each group at one step.

        advantages: [N, G] of the samples. edges, states: transitions of the step in a group, and states that they
        leave.
        """
        top, best = advantages.max(dim=1)
        if self.by == "advantage":
            return top.clamp(min=0)
        width = advantages.shape[1]
        after, before = (advantages.unflatten(1, (count, -1)).mean(2).gather(1, (best * count // width)[:, None])
                         for count in (edges, states))
        return (after - before)[:, 0].clamp(min=0)

    def __call__(self, new: Scored, goal: RegressionTarget) -> Tensor:
        assert new.mean is not None and new.slope is not None, "LayerTuning needs means and slopes"
        # A mean is affine in the output: the difference of outputs is that of means over the slope.
        apart = (new.mean - goal.mean).square().flatten(2).mean(dim=2)
        return self.weight * goal.weight * apart / beside(new.slope, apart).square()
