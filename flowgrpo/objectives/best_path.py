"""LayerTuning (Dynamic-TreeRPO, 2509.23352), a reconstruction: a supervised term in a policy-gradient loss.

Its abstract and reviews give these facts. The clip bounds lie between two values and depend on the reward with a
sensitivity (its equation 11). A regression to the prediction along the best path of the group, weighted as a progress
reward, is added with a coefficient (equation 13). The equations themselves could not be read. The forms here (the
sigmoid, the upper bound alone, the weight by the best advantage) are ours.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from flowgrpo.objectives.kl import beside
from flowgrpo.types import RegressionTarget, Scored


@dataclass(frozen=True)
class LayerTuning:
    """weight * w * mean((v - v*)^2) per decision, [B, 1] (LayerTuning, 2509.23352, a reconstruction).

    v is the model's output on a sample's own state. v* is the old policy's at the same step on the path to the best
    sample of its group, and w that sample's advantage. A best sample far above its group pulls strongly; a group
    without variance has no pull (`towards_best`). Weight 0 omits the term and reads no means.
    """

    weight: float = 0.0

    def __post_init__(self) -> None:
        if not self.weight >= 0:
            raise ValueError(f"LayerTuning: weight is {self.weight}, expected 0 or more")

    def __call__(self, new: Scored, goal: RegressionTarget) -> Tensor:
        assert new.mean is not None and new.slope is not None, "LayerTuning needs means and slopes"
        # A mean is affine in the output: the difference of outputs is that of means over the slope.
        apart = (new.mean - goal.mean).square().flatten(2).mean(dim=2)
        return self.weight * goal.weight * apart / beside(new.slope, apart).square()
