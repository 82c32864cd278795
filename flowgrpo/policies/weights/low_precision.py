"""Temporary low precision of a denoiser: weight-only quantisation by torchao, for preview samples.

The linear layers hold quantised copies of their weights and compute in the precision of their inputs. A LoRA is not
part of the copy: it is added in full precision. Layers of other kinds are unchanged.
"""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Iterator
from typing import Any, Protocol

import torch

from flowgrpo.errors import UserError

NVFP4_UNIT = 16  # torchao requires both sides of an NVFP4 weight to be multiples of it


class Denoising(Protocol):
    """Policy with denoisers, by name."""

    denoisers: dict[str, torch.nn.Module]


def require_torchao(precision: str) -> None:
    """Raise UserError if a low precision is requested and torchao is missing."""
    if precision != "full" and importlib.util.find_spec("torchao") is None:
        raise UserError(f"previews in {precision} need torchao: pip install 'flowgrpo[torchao]', or set "
                        "parts: {preview: {precision: full}}")


@contextlib.contextmanager
def quantised(policy: Denoising, precision: str) -> Iterator[None]:
    """Context manager: the policy's denoisers use weights quantised from their present ones.

    precision: "int8" (a scale per row of the weight), "fp8" (e4m3, likewise) or "nvfp4" (e2m1 with a scale per 16
    values); "full" changes nothing.
    At exit the original weights are restored bit for bit, and the copies are freed. Gradients are not recorded inside.
    Linear layers whose sides are not multiples of 16 keep their precision under NVFP4.
    """
    if precision == "full":
        yield
        return
    require_torchao(precision)
    with contextlib.ExitStack() as restored, torch.no_grad():
        for layer in _layers(policy, precision):
            weight = _quantised(layer.weight, precision)
            restored.callback(setattr, layer, "weight", layer.weight)
            restored.callback(layer.register_forward_pre_hook(_contiguous).remove)
            layer.weight = weight
        yield


def _layers(policy: Denoising, precision: str) -> list[torch.nn.Linear]:
    """Return the linear layers of the denoisers that this precision can quantise, without those of a LoRA."""
    layers = [layer for module in policy.denoisers.values() for name, layer in module.named_modules()
              if isinstance(layer, torch.nn.Linear) and "lora_" not in name]
    return [layer for layer in layers if precision != "nvfp4" or not any(n % NVFP4_UNIT for n in layer.weight.shape)]


def _quantised(weight: torch.Tensor, precision: str) -> torch.nn.Parameter:
    """Return a quantised copy of a weight [out, in]."""
    from torchao.quantization import quantize_

    alone = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    alone.weight = torch.nn.Parameter(weight.detach(), requires_grad=False)
    quantize_(alone, _config(precision))
    return alone.weight


def _contiguous(_layer: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """Make inputs contiguous: torchao's NVFP4 cannot multiply a slice of a batch, such as the text part of a joint
    attention."""
    return tuple(value.contiguous() for value in inputs)


def _config(precision: str) -> Any:
    if precision == "nvfp4":
        from torchao.prototype.mx_formats import NVFP4WeightOnlyConfig

        return NVFP4WeightOnlyConfig()
    from torchao.quantization import Float8WeightOnlyConfig, Int8WeightOnlyConfig

    # The settings of torch's compiler are global to the process.
    return {"int8": Int8WeightOnlyConfig, "fp8": Float8WeightOnlyConfig}[precision](set_inductor_config=False)
