"""Density of a Gaussian transition; no other module defines one.

Everything is a mean over the non-batch dimensions, never a sum (the convention of every released image trainer). The
clip ranges of the presets are in this unit. The joint log-density is D times larger, D the number of latent values.
"""

import math

import torch
from torch import Tensor

from flowgrpo.types import Gaussian, wide


def log_prob(gaussian: Gaussian, x: Tensor) -> Tensor:
    """Log-density of x [B, *D] under the Gaussian, averaged over *D: [B], float32 or wider, constants included.

    Raises ValueError if the deviation is not positive. That is checked on the CPU, where a kernel's std is when its
    grid is: a check on a GPU would make the host wait.
    """
    _require_noise(gaussian)
    mean, std, x = wide(gaussian.mean, gaussian.std, x)
    density = -((x - mean) / std).square() / 2 - std.log() - math.log(2 * math.pi) / 2
    return density.reshape(len(density), -1).mean(dim=1)


def kl(p: Gaussian, q: Gaussian) -> Tensor:
    """KL(p || q) of two Gaussians of equal std, averaged over *D: mean((mean_p - mean_q)^2) / (2 std^2), [B].

    std is the deviation of the whole step, sqrt(delta) included. It is the KL of the Flow-GRPO paper (2505.05470), and
    not the 2 g^2 denominator of its later code, whose coefficients are about ten times larger.
    Raises ValueError as `log_prob` does.
    """
    assert p.std is q.std or torch.equal(p.std, q.std), "kl is for transitions of one kernel, step and grid"
    _require_noise(p)
    mean_p, mean_q, std = wide(p.mean, q.mean, p.std)
    distance = ((mean_p - mean_q) / std).square() / 2
    return distance.reshape(len(distance), -1).mean(dim=1)


def sample(gaussian: Gaussian, noise: Tensor) -> Tensor:
    """Mean + std * noise [B, *D] for standard normal noise [B, *D], in the mean's dtype or wider, not yet rounded."""
    mean, std, noise = wide(gaussian.mean, gaussian.std, noise)
    return mean + std * noise


def _require_noise(gaussian: Gaussian) -> None:
    if gaussian.std.device.type == "cpu" and not bool((gaussian.std > 0).all()):
        raise ValueError(
            "this transition has std 0, so it has no density: train only steps that add noise "
            "(a kernel level above 0, and never the last step of the grid)"
        )
