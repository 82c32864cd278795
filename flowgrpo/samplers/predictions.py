"""Prediction types of a pipeline's scheduler, converted to the noise that variance-preserving kernels read.

Legend: x = sqrt(a) x0 + sqrt(1-a) noise, a the alpha-bar of the step.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from flowgrpo.errors import UserError
from flowgrpo.samplers.kernels import x0_from_noise
from flowgrpo.types import wide

VARIANCE_PRESERVING = ("epsilon", "v_prediction", "sample", "consistency")


def prediction(scheduler: Any) -> str:
    """Return the prediction type of a pipeline's network, by its scheduler.

    velocity for flows, consistency for an LCMScheduler, else epsilon, v_prediction or sample.
    """
    config = scheduler.config
    if "FlowMatch" in type(scheduler).__name__ or config.get("use_flow_sigmas") \
            or config.get("prediction_type") == "flow_prediction":
        return "velocity"
    if hasattr(scheduler, "get_scalings_for_boundary_condition_discrete"):
        return "consistency"
    return config.get("prediction_type", "unknown")


def process(scheduler: Any) -> str:
    """Return the process of a pipeline's scheduler: "flow", or "vp" (variance-preserving, with discrete alpha-bars).

    Raises UserError for any other scheduler.
    """
    predicted = prediction(scheduler)
    if predicted == "velocity":
        return "flow"
    if predicted in VARIANCE_PRESERVING and hasattr(scheduler, "alphas_cumprod"):
        return "vp"
    raise UserError(f"{type(scheduler).__name__} (prediction {predicted!r}) cannot be driven: expected a scheduler of "
                    f"flow matching, or one with alphas_cumprod that predicts {', '.join(VARIANCE_PRESERVING)}")


def as_noise(scheduler: Any, output: Tensor, x: Tensor, alpha: Tensor, timestep: Tensor) -> Tensor:
    """Return the noise [B,*D] in the state x at the alpha-bar `alpha`, from a network output of any prediction type.

    The result is float32 or wider, unless the output is the noise itself, which is returned unchanged.
    epsilon: the output.
    v_prediction (2202.00512, appendix D): sqrt(a) v + sqrt(1-a) x.
    sample: (x - sqrt(a) x0) / sqrt(1-a).
    consistency (LCM, 2310.04378, section 4.1): the network gives the data z0 in one of the other forms. f = c_skip x +
        c_out z0 is the model's estimate of the data, and x itself at timestep 0.

    With consistency the returned noise satisfies `x0_from_noise(x, noise, a) == f`, so every kernel steps with f in
    place of x0. The stock scheduler's multistep consistency step, sqrt(a') f + sqrt(1-a') noise (algorithm 3 there), is
    the kernel with only fresh noise, `VPCPS(1)`. DDIM(eta) keeps a part of the old noise, x - sqrt(a) f over sqrt(1-a).
    Either way the recorded density is that of the Gaussian that was drawn.
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
    """Return the noise [B,*D] of x without its data x0."""
    return (x - alpha.sqrt() * x0) / (1 - alpha).sqrt()
