"""Temporary low precision of a denoiser, for preview samples: products of low-precision weights and activations.

torchao quantises the weights of linear layers once, and their inputs in every call. A LoRA is not part of the copy: it
is added in full precision. Layers of other kinds are unchanged.
"""

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch

from flowgrpo.errors import UserError
from flowgrpo.packages import present
from flowgrpo.policies.weights.forwards import contiguous

LEAST = 1e-12  # lower bound of the largest value of an fp8 input's row; without one a row of zeros would be 0 / 0
UNIT = 16  # both sides of a weight are multiples of it: the products of every low precision need that
# By precision, the lowest compute capability of a GPU whose products are faster in it; (0, 0) is any device.
LOWEST = {"nvfp4": (10, 0), "fp8": (8, 9), "int8": (0, 0)}


def capability(device: torch.device) -> tuple[int, int]:
    """Compute capability of a CUDA device, (0, 0) of another one."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)


def resolve_auto(precision: str, device: torch.device) -> str:
    """Precision that "auto" takes on a device: the one that suits a GPU, "full" on others and without torchao. Any
    other precision itself."""
    if precision != "auto":
        return precision
    if device.type != "cuda" or not present("torchao"):
        return "full"
    return next(name for name, lowest in LOWEST.items() if capability(device) >= lowest)


def notice(precision: str, device: torch.device) -> str | None:
    """Line on the precision that "auto" takes on a device; None for any other precision."""
    if precision != "auto":
        return None
    if (taken := resolve_auto(precision, device)) != "full":
        return f"previews are drawn in {taken}"
    why = "torchao is not installed (pip install 'flowgrpo[torchao]')" if device.type == "cuda" else \
        f"a low one is for GPUs, and the device is {device.type}"
    return f"previews are drawn in full precision: {why}"


def require_low_precision(precision: str, device: torch.device) -> None:
    """Raise UserError if previews in this precision need torchao or a GPU that is not here; "auto" never does."""
    if precision in ("full", "auto"):
        return
    if not present("torchao"):
        raise UserError(f"previews in {precision} need torchao: pip install 'flowgrpo[torchao]', or set "
                        "parts: {preview: {precision: full}}")
    if (here := capability(device)) < LOWEST[precision]:
        lowest, of = ".".join(map(str, LOWEST[precision])), ".".join(map(str, here)) if any(here) else "none"
        raise UserError(f"previews in {precision} need a GPU of compute capability {lowest}, and {device} has {of}: "
                        "set parts: {preview: {precision: auto}}")


@contextlib.contextmanager
def with_quantised_weights(policy: Any, precision: str) -> Iterator[None]:
    """Context manager, without gradients: the policy's denoisers use weights quantised from their present ones, which
    come back bit for bit, and quantise their inputs.

    precision: "int8" or "fp8" (e4m3), with a scale per row of the weight and of the input; "nvfp4" (e2m1), with a scale
    per 16 values; "auto": `resolve_auto`; "full" changes nothing. Linear layers whose sides are not multiples of 16
    keep their precision, and so do inputs on a CPU whose int8 products overflow.
    """
    precision = resolve_auto(precision, policy.device)
    if precision == "full":
        yield
        return
    require_low_precision(precision, policy.device)
    layers = [layer for module in policy.denoisers.values() for name, layer in module.named_modules()
              if isinstance(layer, torch.nn.Linear) and "lora_" not in name
              and not any(side % UNIT for side in layer.weight.shape)]
    with contextlib.ExitStack() as restored, torch.no_grad():
        for layer in layers:
            weight = _quantise(layer.weight, precision)
            restored.callback(setattr, layer, "weight", layer.weight)
            # torchao's NVFP4 cannot multiply a slice of a batch, such as the text part of a joint attention.
            restored.callback(layer.register_forward_pre_hook(contiguous).remove)
            layer.weight = weight
        yield


def _quantise(weight: torch.Tensor, precision: str) -> torch.nn.Parameter:
    """Quantised copy of a weight [out, in]."""
    from torchao.quantization import quantize_

    alone = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    alone.weight = torch.nn.Parameter(weight.detach(), requires_grad=False)
    quantize_(alone, form(precision, weight.dtype, weight.device.type != "cpu" or exact_int8()))
    if precision == "fp8":
        repair_zero_rows(alone)
    return alone.weight


@torch.no_grad()
def repair_zero_rows(module: torch.nn.Module) -> None:
    """Set zero rows of torchao's fp8 weights to zeros of scale 1, in place: it leaves 0 / 0, NaN, of scale 0."""
    weights: list[Any] = [weight for weight in module.parameters() if hasattr(weight, "qdata")]
    for weight in weights:
        zero = weight.scale == 0
        weight.qdata.view(torch.uint8).masked_fill_(zero, 0)
        weight.scale.masked_fill_(zero, 1)


@functools.cache
def exact_int8() -> bool:
    """True if this CPU's products of int8 matrices do not overflow, as those of a CPU without VNNI may."""
    a, b = torch.full((32, 64), 127, dtype=torch.int8), torch.full((64, 32), 127, dtype=torch.int8)
    return bool((torch._int_mm(a, b) == 64 * 127 * 127).all())


def form(precision: str, dtype: torch.dtype, inputs: bool = True) -> Any:
    """Torchao's configuration of a low precision for weights of this dtype. inputs: of int8 layers too."""
    if precision == "nvfp4":
        from torchao.prototype.mx_formats import NVFP4DynamicActivationNVFP4WeightConfig

        return NVFP4DynamicActivationNVFP4WeightConfig(use_triton_kernel=False)  # that one needs a further package
    from torchao import quantization

    # The settings of torch's compiler are global to the process.
    if precision == "int8":
        kind = quantization.Int8DynamicActivationInt8WeightConfig if inputs else quantization.Int8WeightOnlyConfig
        return kind(set_inductor_config=False)
    from torchao.quantization.quantize_.common import KernelPreference

    # Rows are for bf16 alone.
    granularity = quantization.PerRow() if dtype == torch.bfloat16 else quantization.PerTensor()
    return quantization.Float8DynamicActivationFloat8WeightConfig(
        granularity=granularity, activation_value_lb=max(LEAST, torch.finfo(dtype).tiny),
        kernel_preference=KernelPreference.TORCH,  # the other one, mslk, has no lower bound
        set_inductor_config=False)
