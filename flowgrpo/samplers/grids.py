"""Noise grids, kept on the CPU: 1-D tensors of T+1 sigmas from 1 (noise) down to 0 (data).

A variance-preserving process has T+1 rising alpha-bars instead, and the timesteps that its network was trained on.
"""

from collections.abc import Callable
from typing import Annotated, Any

import torch
from torch import Tensor

from flowgrpo.errors import UserError
from flowgrpo.parts import Above, part
from flowgrpo.samplers.kernels import prediction, process
from flowgrpo.types import unwrap


def make_grid(kind: str, steps: int, shift: float, scheduler: Any, strength: float = 1.0,
              stock: Callable[[int], Tensor] | None = None) -> tuple[Tensor, Tensor | None]:
    """Grid [T+1] and its timesteps [T], with T = int(steps * strength).

    Flow: sigmas, of the kind "shifted", or "stock": the pipeline's own [steps+1], by `stock`; and None. A
    variance-preserving process has alpha-bars at the scheduler's spacing, for any kind. A pipeline that starts from an
    image or a video skips the first steps.
    Raises UserError if no step is left, or the scheduler has no such grid.
    """
    if process(scheduler) == "vp":
        whole, timesteps = alpha_bars(scheduler, steps)
    else:
        whole, timesteps = shift_grid(steps, shift) if kind == "shifted" else unwrap(stock)(steps), None
    skipped = steps - min(int(steps * strength), steps)
    if skipped == steps:
        raise UserError(f"a strength of {strength} leaves none of {steps} steps: take more steps or a larger strength")
    return whole[skipped:], None if timesteps is None else timesteps[skipped:]


def shift_grid(steps: int, shift: float) -> Tensor:
    """Grid shift(linspace(1, 0, steps+1)), float64 [steps+1], with shift(t) = s*t / (1 + (s-1)*t).

    DanceGRPO, MixGRPO and G2RPO train on it (s = 3), and the FLUX family samples with it (s = exp(mu)).
    """
    if steps < 1:
        raise ValueError(f"steps is {steps}, expected 1 or more")
    _require_shift(shift)
    return _shift(torch.linspace(1, 0, steps + 1, dtype=torch.float64), shift)


def require_steps(scheduler: Any, steps: object) -> None:
    """Raise UserError for a single step of a scheduler that stretches its sigmas up to a last one, `shift_terminal`: it
    divides by zero."""
    config = getattr(scheduler, "config", {})
    if steps == 1 and (last := config.get("shift_terminal")):
        raise UserError(f"got 1 step, which {type(scheduler).__name__} does not take with its shift_terminal of "
                        f"{last:g}: expected 2 or more")


def stock(scheduler: Any, steps: int) -> Tensor:
    """Grid that a diffusers flow scheduler has set, unchanged (float32 [steps+1]): the pipeline's own, if that set it,
    with separate sigmas (FLUX, Qwen-Image: linspace(1, 1/steps, steps)) and a mu of the image size.
    Raises ValueError for a scheduler whose sigmas do not run from 1 to 0 in `steps` steps.
    """
    name = type(scheduler).__name__
    grid = getattr(scheduler, "sigmas", None)
    if grid is None:
        raise ValueError(f"{name} has no sigmas: a grid needs a flow-matching scheduler")
    if scheduler.config.get("invert_sigmas"):
        grid = 1 - grid
    if len(grid) != steps + 1 or grid[0] > 1 or grid[-1] != 0 or not (grid.diff() < 0).all():
        ends = "" if grid.is_meta else f" from {grid[0]:.4g} to {grid[-1]:.4g}"  # a dry run has no values
        raise ValueError(f"{name} sets {len(grid)} sigmas{ends} for {steps} steps, expected {steps + 1} falling from "
                         "at most 1 to 0: use a first-order flow-matching scheduler")
    return grid.detach().cpu().clone()


def alpha_bars(scheduler: Any, steps: int) -> tuple[Tensor, Tensor]:
    """Grid of a variance-preserving process: (alpha-bars [steps+1] rising, float32; timesteps [steps], int64).

    The timesteps are those of a DDIMScheduler of the same spacing and steps_offset, of a distilled model (LCM, TCD) its
    scheduler's own; the alpha-bars are the scheduler's there. The last is 1 or, without set_alpha_to_one, that of
    timestep 0 (but 1 of a consistency model, whose last step gives the data). A step goes to the next timestep;
    DDIMScheduler itself steps by 1000 // steps, which differs for some spacings. A first alpha-bar of 0 (zero terminal
    SNR) becomes 2^-24, as in the stock EulerDiscreteScheduler.
    Raises UserError if there are no such timesteps, if the scheduler clips, or if the network predicts noise at an
    alpha-bar of 0, which then says nothing of the data.
    """
    name = type(scheduler).__name__
    table = scheduler.alphas_cumprod.detach().cpu().float()
    for key in ("clip_sample", "thresholding"):
        if scheduler.config.get(key):
            raise UserError(f"{name} has {key}, which makes a step no Gaussian of the model's output: set it to false")
    if not 1 <= steps <= len(table):
        raise UserError(f"{name} has {len(table)} timesteps, expected 1 to as many steps, got {steps}")
    timesteps = _timesteps(scheduler, steps)
    first = timesteps[0]
    blind = scheduler.config.get("prediction_type") == "epsilon"
    if first >= len(table) or (blind and table[first] <= 0):
        raise UserError(f"{name} starts {steps} steps at timestep {first}, expected one with an alpha-bar "
                         "above 0: take fewer steps or, with rescale_betas_zero_snr, timestep_spacing leading")
    clean = scheduler.config.get("set_alpha_to_one", True) or prediction(scheduler) == "consistency"
    last = table.new_ones(1) if clean else table[:1]
    return torch.cat([table[timesteps].clamp(min=2.0**-24), last]), timesteps


def _timesteps(scheduler: Any, steps: int) -> Tensor:
    from diffusers import DDIMScheduler

    config = scheduler.config
    if distilled := config.get("original_inference_steps"):
        if steps > distilled:
            raise UserError(f"{type(scheduler).__name__} has {distilled} original_inference_steps, expected 1 to as "
                             f"many steps, got {steps}")
        fresh = type(scheduler).from_config(config)
    else:
        spacing = {key: config[key] for key in ("timestep_spacing", "steps_offset") if key in config}
        fresh = DDIMScheduler(num_train_timesteps=config.num_train_timesteps, **spacing)
    fresh.set_timesteps(steps)
    return fresh.timesteps


@part("tail")
class TailPoints:
    """Tail of a grid as the released MixGRPO-Flash (2507.21802) counts it: n = int((T - last) * share) points.

    `last` is the last step that draws noise, and the first point is the sigma behind it, so n points are n - 1 steps.
    A number in its place, such as `tail: 0.4`, counts steps behind the noise: int((T - last - 1) * 0.4) of them.
    One step is left at least and ends at 0; with n below 2 the released code stops above it.
    """

    share: Annotated[float, Above(0, to=1, words="above 0 and at most 1")] = 0.4


def compress_tail(grid: Tensor, after: int, ratio: float | TailPoints, shift: float | None) -> Tensor:
    """Replace the intervals after index `after` by fewer: n = max(int((T - after) * ratio), 1) of them (MixGRPO-Flash).

    The new sigmas are shift(linspace(t, 0, n+1)) with t the unshifted time of grid[after]; those before stay bit for
    bit, and the last is always 0 (in the released code not when n is 1).
    shift: the grid's; None: the new sigmas are n of the pipeline's own, evenly spread by index.
    ratio: of the steps, or `TailPoints`, by which n = max(int((T - after + 1) * share) - 1, 1).
    """
    steps = len(grid) - 1
    if not 0 <= after < steps:
        raise ValueError(f"after is {after}, expected 0 to {steps - 1} on a grid of {steps} steps")
    if not isinstance(ratio, TailPoints) and not 0 < ratio <= 1:
        raise ValueError(f"ratio is {ratio}, expected above 0 and at most 1")
    rest = steps - after
    count = max(int((rest + 1) * ratio.share) - 1 if isinstance(ratio, TailPoints) else int(rest * ratio), 1)
    if shift is None:
        chosen = [after + (2 * place * rest + count) // (2 * count) for place in range(1, count + 1)]
        return torch.cat([grid[: after + 1], grid[chosen]])
    _require_shift(shift)
    start = _shift(grid[after].double(), 1 / shift)
    tail = _shift(start * torch.linspace(1, 0, count + 1, dtype=torch.float64, device=grid.device), shift)
    return torch.cat([grid[: after + 1], tail[1:].to(grid.dtype)])


def thin_grid(grid: Tensor, after: int, stride: int) -> Tensor:
    """grid[:after+1], then the first and every `stride`-th of the sigmas behind it (G2RPO, 2510.01982).

    The result always ends at 0, which a stride can step over in the released code.
    """
    steps = len(grid) - 1
    if not 0 <= after < steps or stride < 1:
        raise ValueError(f"after is {after} and stride {stride}, expected 0 to {steps - 1} and 1 or more")
    tail = grid[after + 1::stride]
    return torch.cat([grid[:after + 1], tail, grid[-1:] if tail[-1] != grid[-1] else grid[:0]])


def _shift(t: Tensor, shift: float) -> Tensor:
    # s*t / (1 + (s-1)*t), in the form that gives 1 exactly at t = 1: kernels single out sigma == 1. The inverse is the
    # shift by 1/s.
    return t / (t + (1 - t) / shift)


def _require_shift(shift: float) -> None:
    if not shift > 0:
        raise ValueError(f"shift is {shift}, expected above 0 (1 leaves the grid uniform)")
