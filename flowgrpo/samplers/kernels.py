"""Transition kernels: one sampler step as a Gaussian, `kernel(x, v, grid, i) -> Gaussian`.

x, v: [B, *D], the state and the model's velocity at grid[i]; grid: T+1 sigmas, 1 noise, 0 data; i: 0 to T-1.
Legend: s = grid[i], s' = grid[i+1], D = s - s', x0 = x - s*v and x1 = x + (1-s)*v the predicted data and noise.

Every flow kernel is the Euler step, less `pull` times x1, plus `std` of fresh noise:  mean = x - D*v - pull*x1.
Written so, a level of 0 is the ODE step to the last bit. All is computed in float32 or wider, whatever x's dtype, and
nothing waits for an accelerator; a grid kept on the CPU gives a std on the CPU.

A solver is the step that draws no noise, `solver(x, v, grid, i, previous) -> x_next`. previous: the x0 predicted at
step i-1 (`predict_x0`), or None: unknown, or of a solver with `multistep` False.

`LearnedNoise` is a kernel whose deviation is the output of a small network (ReinFlow, 2505.22094). Prediction types of
a pipeline's scheduler are converted to the noise that variance-preserving kernels read.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Annotated, Any

import torch
from torch import Tensor

from flowgrpo.errors import UserError
from flowgrpo.parts import AtLeast, part
from flowgrpo.types import Gaussian, wide

VARIANCE_PRESERVING = ("epsilon", "v_prediction", "sample", "consistency")
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


NOISE_NETWORK = "noise"  # its name among a policy's weights
WAVES = 4  # frequencies of the time embedding


class NoiseNet(torch.nn.Module):
    """Noise level of every latent value x at time s, from 0 (the lower bound) to 1 (the upper bound), at first 1/2.

    One hidden layer on x and on sines and cosines of s: it reads one value at a time, so it fits latents of any shape.
    """

    def __init__(self, width: int):
        super().__init__()
        self.value = torch.nn.Linear(1, width)
        self.time = torch.nn.Linear(2 * WAVES, width)
        self.level = torch.nn.Linear(width, 1)
        torch.nn.init.zeros_(self.level.weight)
        torch.nn.init.zeros_(self.level.bias)

    def forward(self, x: Tensor, sigma: Tensor) -> Tensor:
        """Levels [B,*D] of states x [B,*D] at sigma, 0-d."""
        weight = self.value.weight
        with torch.autocast(x.device.type, enabled=False):  # on in a rollout, off in its replay
            angles = sigma.to(weight) * math.pi * 2.0 ** torch.arange(WAVES, device=weight.device, dtype=weight.dtype)
            time = self.time(torch.cat([angles.sin(), angles.cos()]))
            hidden = torch.nn.functional.silu(self.value(x.to(weight)[..., None]) + time)
            return (torch.tanh(self.level(hidden)[..., 0]) + 1) / 2


@dataclass(frozen=True, eq=False)
class Noisy:
    """`LearnedNoise` with its network, between two bounds; the gradient of its deviation reaches the network."""

    network: Callable[[Tensor, Tensor], Tensor]
    low: float
    high: float

    def __call__(self, x: Tensor, v: Tensor, grid: Tensor, i: int) -> Gaussian:
        x, v, sigma, after = _at(x, v, grid, i)
        delta = sigma - after
        level = torch.exp(math.log(self.low) + math.log(self.high / self.low) * self.network(x, sigma).to(x))
        return Gaussian(x - delta * v, level * delta.sqrt())


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
        return Noisy(lambda x, sigma: torch.full_like(x, 0.5), self.low, self.high)(x, v, grid, i)

    def network(self) -> NoiseNet:
        return NoiseNet(self.width)

    def upper(self, epoch: int, epochs: int) -> float:
        """Upper bound in an epoch, counted from 0, of a run of `epochs` epochs."""
        held = self.hold * epochs
        gone = min(max(epoch - held, 0) / max(epochs - held, 1), 1)
        last = self.low + self.decay * (self.high - self.low)
        return last + (self.high - last) * (1 + math.cos(math.pi * gone)) / 2


def anneal(t: float, highest: float, lowest: float, slow: float) -> float:
    """max(1 + highest - e^(t/slow), lowest), which is `highest` at t = 0 (EAD's schedule)."""
    exponent = t / slow
    return lowest if exponent > math.log(1 + highest) else max(1 + highest - math.exp(exponent), lowest)


def scale_noise(kernel: Kernel, factor: float) -> Kernel:
    """Kernel with its one field, `level` or `eta`, times `factor`. Raises ValueError for one out of its range."""
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
    """Data x - sigma*v predicted from a state and its velocity, [B, *D], float32 or wider."""
    x, v = wide(x, v)
    return x - sigma * v


def x0_from_noise(x: Tensor, noise: Tensor, alpha: Tensor | float) -> Tensor:
    """Data predicted from a state at an alpha-bar and its predicted noise, [B, *D], float32 or wider."""
    x, noise = wide(x, noise)
    alpha = torch.as_tensor(alpha, dtype=x.dtype)
    return (x - (1 - alpha).sqrt() * noise) / alpha.sqrt()


def euler(x: Tensor, v: Tensor, grid: Tensor, i: int) -> Tensor:
    """x - D*v: [B, *D], float32 or wider."""
    x, v, sigma, after = _at(x, v, grid, i)
    return x - (sigma - after) * v


def _at(x: Tensor, v: Tensor, grid: Tensor, i: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x and v, and grid[i] and grid[i+1] as 0-d tensors, all in the dtype of the computation."""
    assert 0 <= i < len(grid) - 1, f"step {i} of a grid of {len(grid) - 1} steps"
    dtype = torch.promote_types(v.dtype, torch.promote_types(x.dtype, torch.float32))
    now, after = grid[i : i + 2].to(dtype)
    return x.to(dtype), v.to(dtype), now, after


def _euler_maruyama(x: Tensor, v: Tensor, sigma: Tensor, after: Tensor, g: Tensor | float) -> Gaussian:
    """One step of the SDE with the ODE's marginals and diffusion g: dx = (v + g^2/(2s) x1) ds + g dw."""
    delta = sigma - after
    return _pull_to_noise(x, v, sigma, after, pull=g**2 * delta / (2 * sigma), std=g * delta.sqrt())


def _posterior(x: Tensor, v: Tensor, sigma: Tensor, after: Tensor, fresh: Tensor | float, kept: Tensor | float
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
        slope: Tensor | float = 0.0
        if previous is not None:
            assert i > 0, "step 0 has no previous prediction"
            # h / h_previous; 0 on the step that ends at sigma 0, where h is infinite.
            near = grid[i - 1 : i + 2].to(x.dtype)
            first, second, third = ((1 - near) / near).log()
            slope = (m0 - previous) * torch.where(near[2] == 0, 0, (third - second) / (second - first))
        # e^-h in closed form: its logarithms are infinite at both ends of the grid.
        decay = (1 - sigma) * after / (sigma * (1 - after))
        return (after / sigma) * x - (1 - after) * (decay - 1) * (m0 + slope / 2)


def prediction(scheduler: Any) -> str:
    """Prediction type of a pipeline's network, by its scheduler: velocity for flows, consistency for an
    LCMScheduler, else epsilon, v_prediction or sample."""
    config = scheduler.config
    if any(flow in type(scheduler).__name__ for flow in ("FlowMatch", "FlowMap")) or config.get("use_flow_sigmas") \
            or config.get("prediction_type") == "flow_prediction":
        return "velocity"
    if hasattr(scheduler, "get_scalings_for_boundary_condition_discrete"):
        return "consistency"
    return config.get("prediction_type", "unknown")


def process(scheduler: Any) -> str:
    """Process of a pipeline's scheduler: "flow", or "vp" (variance-preserving, with discrete alpha-bars). Raises
    UserError for any other."""
    predicted = prediction(scheduler)
    if predicted == "velocity":
        return "flow"
    if predicted in VARIANCE_PRESERVING and hasattr(scheduler, "alphas_cumprod"):
        return "vp"
    raise UserError(f"{type(scheduler).__name__} (prediction {predicted!r}) cannot be driven: expected a scheduler of "
                    f"flow matching, or one with alphas_cumprod that predicts {', '.join(VARIANCE_PRESERVING)}")


def as_noise(scheduler: Any, output: Tensor, x: Tensor, alpha: Tensor, timestep: Tensor) -> Tensor:
    """Convert a network output of any prediction type to the noise [B,*D] in the state x at the alpha-bar `alpha`.

    x = sqrt(a) x0 + sqrt(1-a) noise, a the alpha-bar. The result is float32 or wider, unless the output is the noise
    itself, which is returned unchanged.
    epsilon: the output.
    v_prediction (2202.00512, appendix D): sqrt(a) v + sqrt(1-a) x.
    sample: (x - sqrt(a) x0) / sqrt(1-a).
    consistency (LCM, 2310.04378, section 4.1): the network gives the data z0 in one of the other forms. f = c_skip x +
        c_out z0 is the model's estimate of the data, and x itself at timestep 0.

    With consistency `x0_from_noise(x, noise, a) == f`, so every kernel steps with f in place of x0. The stock
    scheduler's multistep step, sqrt(a') f + sqrt(1-a') noise (algorithm 3 there), is the kernel with only fresh noise,
    `VPCPS(1)`; DDIM(eta) keeps a part of the old noise, x - sqrt(a) f over sqrt(1-a).
    """
    kind = scheduler.config.get("prediction_type")
    consistent = prediction(scheduler) == "consistency"
    if kind == "epsilon" and not consistent:
        return output
    x, output = wide(x, output)
    alpha = alpha.to(x.dtype)
    if kind == "v_prediction":
        output = alpha.sqrt() * output + (1 - alpha).sqrt() * x
    elif kind == "sample":
        output = _without(x, output, alpha)
    if consistent:
        skip, out = scheduler.get_scalings_for_boundary_condition_discrete(timestep.to(x.dtype))
        output = _without(x, skip * x + out * x0_from_noise(x, output, alpha), alpha)
    return output


def _without(x: Tensor, x0: Tensor, alpha: Tensor) -> Tensor:
    return (x - alpha.sqrt() * x0) / (1 - alpha).sqrt()
