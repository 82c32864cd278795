"""What a network predicts, told from its pipeline's scheduler, and turned into the noise that the kernels of
variance-preserving processes read.

Legend: x = sqrt(a) x0 + sqrt(1-a) noise, a the alpha-bar of the step.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from flowgrpo.errors import UserError
from flowgrpo.samplers.kernels import denoised
from flowgrpo.types import wide

VARIANCE_PRESERVING = ("epsilon", "v_prediction", "sample", "consistency")


def prediction(scheduler: Any) -> str:
    """What the pipeline's network predicts, by its scheduler: velocity for flows, consistency for an LCMScheduler, else
    epsilon, v_prediction or sample."""
    config = scheduler.config
    if "FlowMatch" in type(scheduler).__name__ or config.get("use_flow_sigmas") \
            or config.get("prediction_type") == "flow_prediction":
        return "velocity"
    if hasattr(scheduler, "get_scalings_for_boundary_condition_discrete"):
        return "consistency"
    return config.get("prediction_type", "unknown")


def process(scheduler: Any) -> str:
    """The process of a pipeline's scheduler: "flow", or "vp" where it is variance-preserving, with discrete alpha-bars.
    UserError for any other."""
    predicted = prediction(scheduler)
    if predicted == "velocity":
        return "flow"
    if predicted in VARIANCE_PRESERVING and hasattr(scheduler, "alphas_cumprod"):
        return "vp"
    raise UserError(f"{type(scheduler).__name__} (prediction {predicted!r}) cannot be driven: expected a scheduler of "
                    f"flow matching, or one with alphas_cumprod that predicts {', '.join(VARIANCE_PRESERVING)}")


def as_noise(scheduler: Any, output: Tensor, x: Tensor, alpha: Tensor, timestep: Tensor) -> Tensor:
    """The noise [B,*D] in the state x at the alpha-bar `alpha`, by the network's output of any kind; float32 or wider
    unless the output is the noise itself, which is returned as it is.

    epsilon: the output. v_prediction (2202.00512, appendix D): sqrt(a) v + sqrt(1-a) x. sample: what is left of x
    without sqrt(a) x0, over sqrt(1-a).
    consistency (LCM, 2310.04378, section 4.1): the data z0 that the network gives, in one of the other forms, counts as
    f = c_skip x + c_out z0, which is x itself at timestep 0. f is the model's answer for the data, so the noise
    returned is the one with `denoised(x, noise, a) == f`, and every kernel steps with f where it would with x0. The
    multistep consistency step of the stock scheduler, sqrt(a') f + sqrt(1-a') noise (algorithm 3 there), is the kernel
    all of whose noise is fresh, `VPCPS(1)`; DDIM(eta) keeps a part of the old noise, x - sqrt(a) f over sqrt(1-a).
    Either way the recorded density is that of the Gaussian which was drawn.
    """
    kind, consistent = scheduler.config.get("prediction_type"), prediction(scheduler) == "consistency"
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
        output = _without(x, skip * x + out * denoised(x, output, alpha), alpha)
    return output


def _without(x: Tensor, x0: Tensor, alpha: Tensor) -> Tensor:
    """The noise that is left of x without its data."""
    return (x - alpha.sqrt() * x0) / (1 - alpha).sqrt()
