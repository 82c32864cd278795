"""Transition kernels: one sampler step as a Gaussian, `kernel(x, v, grid, i) -> Gaussian`.

x, v: [B, *D], the state and the model's velocity at grid[i]; grid: T+1 sigmas, 1 noise, 0 data; i: 0 to T-1.
Legend: s = grid[i], s' = grid[i+1], D = s - s', x0 = x - s*v and x1 = x + (1-s)*v the predicted data and noise.

Every flow kernel is the Euler step, less `pull` times x1, plus `std` of fresh noise:  mean = x - D*v - pull*x1.
Written so, a level of 0 is the ODE step to the last bit. All is computed in float32 or wider, whatever x's dtype, and
nothing waits for an accelerator; a grid kept on the CPU gives a std on the CPU.

A solver is the step that draws no noise, `solver(x, v, grid, i, previous) -> x_next`. previous: the x0 predicted at
step i-1 (`predict_x0`), or None: unknown, or of a solver with `multistep` False.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Annotated, Any

import torch
from torch import Tensor

from flowgrpo.parts import AtLeast, part
from flowgrpo.types import Gaussian, wide

Kernel = Callable[[Tensor, Tensor, Tensor, int], Gaussian]


@part("kernel")
class ODE:
    """Deterministic Euler step x - D*v, with std 0."""

    def __call__(self, x: Tensor, v: Tensor, grid: Tensor, i: int) -> Gaussian:
        mean = euler(x, v, grid, i)
        return Gaussian(mean, torch.zeros((), dtype=mean.dtype, device=grid.device))


@part("kernel")
class FlowSDE:
    """Euler-Maruyama with g = level * sqrt(s / (1-s)) (Flow-GRPO, 2505.05470).

    From s = 0.999 up, the 1-s in g alone becomes 1 - grid[1]; the released code does so at s = 1. Multistep flow
    schedulers start just below 1 (0.999999, 0.9997), where g would reach 700. level >= 0: 0.7 on SD3.5, 0.9 on FLUX.
    """

    level: Annotated[float, AtLeast(0)] = 0.7

    def __call__(self, x: Tensor, v: Tensor, grid: Tensor, i: int) -> Gaussian:
        x, v, sigma, after = _at(x, v, grid, i)
        data = 1 - sigma
        second = 1 - grid[1].to(sigma.dtype)
        data = torch.where(data < 1e-3, torch.maximum(data, second), data)
        return _euler_maruyama(x, v, sigma, after, self.level * (sigma / data).sqrt())


@part("kernel")
class DanceSDE:
    """Euler-Maruyama with the constant g = level (DanceGRPO, 2505.07818). level >= 0: 0.3 on FLUX."""

    level: Annotated[float, AtLeast(0)] = 0.3

    def __call__(self, x: Tensor, v: Tensor, grid: Tensor, i: int) -> Gaussian:
        return _euler_maruyama(*_at(x, v, grid, i), self.level)


@part("kernel")
class CPS:
    """Coefficient-preserving sampling (Flow-CPS, 2509.05952): std = s' * sin(level * pi/2), 0 <= level <= 1.

    The weights of data and noise are those of s', but the states' marginal is not the flow's: the std does not shrink
    with the step, and the data and noise are predicted means. The std is 0 on the last step. The released
    log-probability drops the 1/(2 std^2) that `gaussian.log_prob` keeps. Clip ranges published for CPS go with the
    log-ratio SquaredErrorRatio.
    """

    level: Annotated[float, AtLeast(0, to=1)] = 0.8

    def __call__(self, x: Tensor, v: Tensor, grid: Tensor, i: int) -> Gaussian:
        angle = self.level * math.pi / 2
        return _posterior(*_at(x, v, grid, i), fresh=math.sin(angle), kept=math.cos(angle))


@part("kernel")
class FlowDDIM:
    """DDIM's eta for flows: std = eta * s' * sqrt(1 - (s'(1-s) / (s(1-s')))^2), 0 <= eta <= 1 (Flow-GRPO's code).

    eta = 1 is the posterior of s' given s and x0: ancestral sampling. The std is 0 on the last step.
    """

    eta: Annotated[float, AtLeast(0, to=1)] = 1.0

    def __call__(self, x: Tensor, v: Tensor, grid: Tensor, i: int) -> Gaussian:
        x, v, sigma, after = _at(x, v, grid, i)
        overlap = after * (1 - sigma) / (sigma * (1 - after))
        fresh = self.eta**2 * (1 - overlap.square())
        return _posterior(x, v, sigma, after, fresh=fresh.sqrt(), kept=(1 - fresh).sqrt())


@part("kernel")
class DDIM:
    """DDIM step of variance-preserving models with noise eta (2010.02502 eq. 16; DDPO, 2305.13301), 0 <= eta <= 1.

    The grid holds T+1 alpha-bars, rising towards 1 and all above 0; v is the model's predicted noise. std = eta *
    sqrt((1-a') / (1-a) * (1 - a/a')). eta = 0 is the deterministic DDIM step.
    """

    eta: Annotated[float, AtLeast(0, to=1)] = 1.0

    def __call__(self, x: Tensor, v: Tensor, grid: Tensor, i: int) -> Gaussian:
        x, noise, alpha, after = _at(x, v, grid, i)
        x0 = x0_from_noise(x, noise, alpha)
        fresh = self.eta**2 * (1 - alpha / after) / (1 - alpha)
        mean = after.sqrt() * x0 + ((1 - after) * (1 - fresh)).sqrt() * noise
        return Gaussian(mean, ((1 - after) * fresh).sqrt())


@part("kernel")
class VPCPS:
    """CPS of variance-preserving models: std = sqrt(1-a') * sin(level * pi/2), 0 <= level <= 1; x0 keeps sqrt(a').

    The grid and v are those of DDIM. At level 1 all noise is fresh, sqrt(a') x0 + sqrt(1-a') noise, whatever the noise
    of the step before: the multistep sampling of consistency models (2303.01469, algorithm 1; LCM, 2310.04378,
    algorithm 3), with x0 the consistency function's value.
    """

    level: Annotated[float, AtLeast(0, to=1)] = 1.0

    def __call__(self, x: Tensor, v: Tensor, grid: Tensor, i: int) -> Gaussian:
        x, noise, alpha, after = _at(x, v, grid, i)
        angle = self.level * math.pi / 2
        deviation = (1 - after).sqrt()
        mean = after.sqrt() * x0_from_noise(x, noise, alpha) + deviation * math.cos(angle) * noise
        return Gaussian(mean, deviation * math.sin(angle))


@part("kernel")
class AnnealedNoise:
    """Kernel whose noise falls along the rollout: its level at step i times max(1 + highest - e^(i/slow), lowest).

    EAD's annealed temperature (Let it Calm), with the noise of a step in its place: exploration is strong early, where
    steps decide what an image shows, and weak late. kernel: what is annealed; its level is that of factor 1. The
    factor is `highest` at step 0.
    """

    kernel: FlowSDE | DanceSDE | CPS | FlowDDIM | DDIM | VPCPS = FlowSDE()
    highest: float = 1.2
    lowest: float = 0.2
    slow: float = 10.0

    def __post_init__(self) -> None:
        if not 0 < self.lowest <= self.highest or not self.slow > 0:
            raise ValueError(f"AnnealedNoise: highest is {self.highest}, lowest {self.lowest} and slow {self.slow}, "
                             "expected 0 < lowest <= highest, and slow above 0")
        if isinstance(self.kernel, (ODE, AnnealedNoise)):
            raise ValueError(f"AnnealedNoise: kernel is {type(self.kernel).__name__}, expected one with a "
                             "level of noise")

    def __call__(self, x: Tensor, v: Tensor, grid: Tensor, i: int) -> Gaussian:
        return scale_noise(self.kernel, anneal(i, self.highest, self.lowest, self.slow))(x, v, grid, i)


def anneal(t: float, highest: float, lowest: float, slow: float) -> float:
    """Return max(1 + highest - e^(t/slow), lowest), which is `highest` at t = 0 (EAD's schedule)."""
    exponent = t / slow
    return lowest if exponent > math.log(1 + highest) else max(1 + highest - math.exp(exponent), lowest)


def scale_noise(kernel: Kernel, factor: float) -> Kernel:
    """Return the kernel with its noise, its one field (`level` or `eta`), multiplied by `factor`.

    Raises ValueError if the product is out of the field's range.
    """
    if isinstance(kernel, AnnealedNoise):
        inner: Any = scale_noise(kernel.kernel, factor)
        return replace(kernel, kernel=inner)
    parts: Any = kernel  # a dataclass
    [noise] = fields(parts)
    try:
        return replace(parts, **{noise.name: getattr(kernel, noise.name) * factor})
    except ValueError as error:
        raise ValueError(f"{error}: it is the kernel's times {factor:g}, the plan's factor on the noise of a step; "
                         f"lower the plan's growth or the kernel's {noise.name}") from None


def predict_x0(x: Tensor, v: Tensor, sigma: Tensor | float) -> Tensor:
    """Return the data x - sigma*v predicted from a state and its velocity, [B, *D], float32 or wider."""
    x, v = wide(x, v)
    return x - sigma * v


def x0_from_noise(x: Tensor, noise: Tensor, alpha: Tensor | float) -> Tensor:
    """Return the data predicted from a state at an alpha-bar and its predicted noise, [B, *D], float32 or wider."""
    x, noise = wide(x, noise)
    alpha = torch.as_tensor(alpha, dtype=x.dtype)
    return (x - (1 - alpha).sqrt() * noise) / alpha.sqrt()


def euler(x: Tensor, v: Tensor, grid: Tensor, i: int) -> Tensor:
    """Return x - D*v: [B, *D], float32 or wider."""
    x, v, sigma, after = _at(x, v, grid, i)
    return x - (sigma - after) * v


def _at(x: Tensor, v: Tensor, grid: Tensor, i: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return x and v, and grid[i] and grid[i+1] as 0-d tensors, all in the dtype of the computation."""
    assert 0 <= i < len(grid) - 1, f"step {i} of a grid of {len(grid) - 1} steps"
    dtype = torch.promote_types(v.dtype, torch.promote_types(x.dtype, torch.float32))
    now, after = grid[i : i + 2].to(dtype)
    return x.to(dtype), v.to(dtype), now, after


def _euler_maruyama(x: Tensor, v: Tensor, sigma: Tensor, after: Tensor, g: Tensor | float) -> Gaussian:
    """Return one step of the SDE with the ODE's marginals and diffusion g: dx = (v + g^2/(2s) x1) ds + g dw."""
    delta = sigma - after
    return _pull_to_noise(x, v, sigma, after, pull=g**2 * delta / (2 * sigma), std=g * delta.sqrt())


def _posterior(
    x: Tensor, v: Tensor, sigma: Tensor, after: Tensor, fresh: Tensor | float, kept: Tensor | float
) -> Gaussian:
    """(1-s') x0 + s' (kept * x1 + fresh * noise), where fresh^2 + kept^2 = 1."""
    return _pull_to_noise(x, v, sigma, after, pull=after * (1 - kept), std=after * fresh)


def _pull_to_noise(x: Tensor, v: Tensor, sigma: Tensor, after: Tensor, pull: Tensor, std: Tensor) -> Gaussian:
    x1 = x + (1 - sigma) * v
    return Gaussian(x - (sigma - after) * v - pull * x1, std)


@part("solver", multistep=False)
class Euler:
    """First-order step x - D*v, [B, *D]; `previous` is not read."""

    def __call__(self, x: Tensor, v: Tensor, grid: Tensor, i: int, previous: Tensor | None) -> Tensor:
        return euler(x, v, grid, i)


@part("solver", multistep=True)
class DPMSolver2M:
    """DPM-Solver++ (2M) (2211.01095, algorithm 2), for the steps after the window in MixGRPO-Flash (2507.21802).

    With lambda = log((1-s)/s), h = lambda' - lambda, and m0, m1 the x0 predicted now and one step earlier:
        x' = (s'/s) x - (1-s') (e^-h - 1) (m0 + D1/2),  D1 = (m0 - m1) h / h_previous.
    D1 is 0, the first-order step, in three cases: no `previous`; the previous step started at s = 1 (infinite
    h_previous); this step ends at 0 (it gives m0).
    """

    def __call__(self, x: Tensor, v: Tensor, grid: Tensor, i: int, previous: Tensor | None) -> Tensor:
        x, v = wide(x, v)
        sigma, after = grid[i : i + 2].to(x.dtype)
        m0 = predict_x0(x, v, sigma)
        slope = 0 if previous is None else (m0 - previous) * _step_ratio(grid.to(x.dtype), i)
        # e^-h in closed form: its logarithms are infinite at both ends of the grid.
        decay = (1 - sigma) * after / (sigma * (1 - after))
        return (after / sigma) * x - (1 - after) * (decay - 1) * (m0 + slope / 2)


def _step_ratio(grid: Tensor, i: int) -> Tensor:
    """Return h / h_previous at step i, 0-d; 0 on the step that ends at sigma 0, where h is infinite."""
    assert i > 0, "step 0 has no previous prediction"
    before, now, after = ((1 - grid[i - 1 : i + 2]) / grid[i - 1 : i + 2]).log()
    return torch.where(grid[i + 1] == 0, 0, (after - now) / (now - before))
