"""How far apart two policies are in a decision: [B, N], from recorded means and deviations."""

from __future__ import annotations

from torch import Tensor

from flowgrpo.gaussian import kl
from flowgrpo.types import Gaussian, Scored


def divergence(new: Scored, other: Scored) -> Tensor:
    """gaussian.kl of every decision, at the new policy's std: [B, N]."""
    assert new.mean is not None and other.mean is not None, "this part of the method needs recorded means"
    std = deviations(new).reshape(-1, *[1] * (new.mean.ndim - 2))
    means = new.mean.flatten(0, 1), other.mean.flatten(0, 1)
    return kl(Gaussian(means[0], std), Gaussian(means[1], std)).view(new.logp.shape)


def output_error(new: Scored, other: Scored) -> Tensor:
    """The mean squared difference of the outputs that two policies' means come from: [B, N]."""
    assert new.slope is not None, "this part of the method needs recorded slopes"
    apart = (new.mean - other.mean).square().flatten(2).mean(dim=2)
    return apart / new.slope.to(apart).square()


def deviations(scored: Scored) -> Tensor:
    """The std of every decision, [B, N], beside logp."""
    assert scored.std is not None, "this part of the method needs recorded deviations"
    return scored.std.to(scored.logp).expand(scored.logp.shape)
