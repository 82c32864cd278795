"""Noise of steps: learned (ReinFlow, 2505.22094), and too small to be trained.

`LearnedNoise` is a kernel whose deviation is the output of a small network. Legend as in `kernels`: s = grid[i], s' =
grid[i+1], D = s - s'.

The gradient of a step's log-probability grows with 1 / std^2. On a grid that ends in a short step, such as SD3.5's own
(0.278, 0.009, 0), the last trained step of a posterior kernel has nearly all of an epoch's squared gradient, and a
half-precision state is rounded by a fifth of its deviation. `drop_quiet_steps` leaves such steps out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any

import torch
from torch import Tensor

from flowgrpo.parts import AtLeast, part
from flowgrpo.samplers.kernels import _at
from flowgrpo.samplers.rollout import RolloutSpec
from flowgrpo.types import Gaussian

NAME = "noise"  # name of the network among a policy's weights
WAVES = 4  # frequencies of the time embedding


class NoiseNet(torch.nn.Module):
    """Noise level of every latent value x at time s, from 0 (the lower bound) to 1 (the upper bound).

    One hidden layer on x and on sines and cosines of s. It reads one value at a time, so it fits latents of any shape.
    Its initial output is 1/2 everywhere.
    """

    def __init__(self, width: int):
        super().__init__()
        self.value = torch.nn.Linear(1, width)
        self.time = torch.nn.Linear(2 * WAVES, width)
        self.level = torch.nn.Linear(width, 1)
        torch.nn.init.zeros_(self.level.weight)
        torch.nn.init.zeros_(self.level.bias)

    def forward(self, x: Tensor, sigma: Tensor) -> Tensor:
        """Return the levels [B,*D] of states x [B,*D] at sigma, 0-d."""
        weight = self.value.weight
        with torch.autocast(x.device.type, enabled=False):  # on in a rollout, off in its replay
            angles = sigma.to(weight) * math.pi * 2.0 ** torch.arange(WAVES, device=weight.device, dtype=weight.dtype)
            time = self.time(torch.cat([angles.sin(), angles.cos()]))
            hidden = torch.nn.functional.silu(self.value(x.to(weight)[..., None]) + time)
            return (torch.tanh(self.level(hidden)[..., 0]) + 1) / 2


class Noisy:
    """`LearnedNoise` with its network, between two bounds; the gradient of its deviation reaches the network."""

    def __init__(self, network: NoiseNet, low: float, high: float):
        self.network = network
        self.low = low
        self.high = high

    def __call__(self, x: Tensor, v: Tensor, grid: Tensor, i: int) -> Gaussian:
        return _noisy(x, v, grid, i, self.low, self.high, self.network)


@part("kernel", jointly={"hold decay width": "0 to 1, 0 to 1, and 1 or more"})
class LearnedNoise:
    """Euler step with noise of std l * sqrt(D), its level l between low and high for every latent value: log l =
    log low + n (log high - log low), n of a `NoiseNet` on state and time (ReinFlow, 2505.22094).

    The network is trained with the policy and left out at inference. The upper bound stays for the share `hold` of the
    epochs, then falls along a cosine to low + decay * (high - low). 0 < low <= high.
    width: of the network's hidden layer.

    Called without a network, it is the kernel that the network starts as. The paper's bounds, deviations of 0.10 and
    0.24 in four equal steps, are levels of 0.20 and 0.48.
    """

    low: float = 0.2
    high: float = 0.48
    hold: Annotated[float, AtLeast(0, to=1)] = 0.35
    decay: Annotated[float, AtLeast(0, to=1)] = 0.7
    width: Annotated[int, AtLeast(1)] = 16

    def __post_init__(self) -> None:
        if not 0 < self.low <= self.high < math.inf:
            raise ValueError(f"LearnedNoise: low is {self.low} and high {self.high}, expected 0 < low <= high")

    def __call__(self, x: Tensor, v: Tensor, grid: Tensor, i: int) -> Gaussian:
        return _noisy(x, v, grid, i, self.low, self.high, lambda x, sigma: torch.full_like(x, 0.5))

    def network(self) -> NoiseNet:
        return NoiseNet(self.width)

    def upper(self, epoch: int, epochs: int) -> float:
        """Return the upper bound in an epoch, counted from 0, of a run of `epochs` epochs."""
        held = self.hold * epochs
        gone = min(max(epoch - held, 0) / max(epochs - held, 1), 1)
        last = self.low + self.decay * (self.high - self.low)
        return last + (self.high - last) * (1 + math.cos(math.pi * gone)) / 2

    def with_network(self, network: NoiseNet, epoch: int, epochs: int) -> Noisy:
        """Return the kernel of an epoch."""
        return Noisy(network, self.low, self.upper(epoch, epochs))


def _noisy(x: Tensor, v: Tensor, grid: Tensor, i: int, low: float, high: float, network: Any) -> Gaussian:
    x, v, sigma, after = _at(x, v, grid, i)
    delta = sigma - after
    level = torch.exp(math.log(low) + math.log(high / low) * network(x, sigma).to(x))
    return Gaussian(x - delta * v, level * delta.sqrt())


LEAST = 0.02  # deviation of a step that is trained


def deviation(spec: RolloutSpec, step: int) -> float:
    """Return the deviation of the whole step of a rollout, in units of the latent; of learned noise its lower bound."""
    if isinstance(spec.kernel, (LearnedNoise, Noisy)):
        return spec.kernel.low * (spec.grid[step] - spec.grid[step + 1]).abs().sqrt().item()
    zero = spec.grid.new_zeros(1, 1)
    return spec.transition(zero, zero, spec.grid, step).std.item()


def quiet(spec: RolloutSpec) -> tuple[int, ...]:
    """Return the trained steps of a rollout whose deviation is below `LEAST`."""
    return tuple(step for step in spec.schedule.trained if deviation(spec, step) < LEAST)


def drop_quiet_steps(specs: Sequence[RolloutSpec]) -> list[RolloutSpec]:
    """Return an epoch's rollouts without their quiet steps among the trained ones; one that trains no other is left
    out.

    Quiet steps are drawn as before. Raises ValueError where no trained step is left.
    """
    found = [(spec, quiet(spec)) for spec in specs]
    if not any(steps for _, steps in found):
        return list(specs)
    kept = [(spec, tuple(step for step in spec.schedule.trained if step not in steps)) for spec, steps in found]
    left = [replace(spec, schedule=replace(spec.schedule, trained=steps)) for spec, steps in kept if steps]
    if not left:
        spec, steps = found[0]
        raise ValueError(f"the trained steps {list(steps)} of {spec.steps} have a std of at most "
                         f"{max(deviation(spec, step) for step in steps):.2g} under {spec.kernel}, expected {LEAST} or "
                         "more: use more noise, fewer steps, train.grid: shifted, or a plan that trains earlier ones")
    return left


def message(found: Mapping[int, float], steps: int) -> str:
    """Return a line on the quiet steps of a run, by their deviations, among the steps of its grid."""
    listed = ", ".join(f"{step} ({found[step]:.2g})" for step in sorted(found))
    return f"of the steps 0 to {steps - 1} these are not trained, their deviation is below {LEAST}: {listed}"
