"""A denoiser in low precision for a while: weight-only forms by torchao, for samples that are only looked at.

The linear layers hold quantised copies of their weights and compute in the precision of their inputs. A LoRA is no part
of the copy: it is added in full precision, as it stands. Layers of other kinds stay as they are.
"""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Iterator
from typing import Any

import torch

from flowgrpo.errors import UserError

NVFP4_UNIT = 16  # of a weight whose sides are no multiples of it, torchao makes no NVFP4


def require_torchao(precision: str) -> None:
    """UserError where a low precision is asked for and torchao is absent."""
    if precision != "full" and importlib.util.find_spec("torchao") is None:
        raise UserError(f"previews in {precision} need torchao: pip install 'flowgrpo[torchao]', or set "
                        "parts: {preview: {precision: full}}")


@contextlib.contextmanager
def quantised(policy, precision: str) -> Iterator[None]:
    """Inside, the policy's denoisers have quantised weights, made from their present ones: "int8" (a scale per row of
    the weight), "fp8" (e4m3, likewise) or "nvfp4" (e2m1 with a scale per 16 values); with "full" nothing happens.

    Behind it the very same weights are back, to the bit, and the copies are freed. Gradients are not recorded inside.
    Linear layers whose sides NVFP4 cannot divide by 16 keep their precision.
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


def _layers(policy, precision: str) -> list[torch.nn.Linear]:
    """The linear layers of the denoisers that have such a form, without those of a LoRA."""
    found = [layer for module in policy.denoisers.values() for name, layer in module.named_modules()
             if isinstance(layer, torch.nn.Linear) and "lora_" not in name]
    return [layer for layer in found if precision != "nvfp4" or not any(n % NVFP4_UNIT for n in layer.weight.shape)]


def _quantised(weight: torch.nn.Parameter, precision: str) -> torch.nn.Parameter:
    """A quantised copy of a weight [out, in]."""
    from torchao.quantization import quantize_

    alone = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    alone.weight = torch.nn.Parameter(weight.detach(), requires_grad=False)
    quantize_(alone, _config(precision))
    return alone.weight


def _contiguous(_layer: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """torchao's NVFP4 multiplies no slice of a batch, such as the text's part of a joint attention."""
    return tuple(value.contiguous() for value in inputs)


def _config(precision: str) -> Any:
    if precision == "nvfp4":
        from torchao.prototype.mx_formats import NVFP4WeightOnlyConfig

        return NVFP4WeightOnlyConfig()
    from torchao.quantization import Float8WeightOnlyConfig, Int8WeightOnlyConfig

    # The settings of torch's compiler belong to the whole process.
    return {"int8": Int8WeightOnlyConfig, "fp8": Float8WeightOnlyConfig}[precision](set_inductor_config=False)
