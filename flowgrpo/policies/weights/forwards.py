"""Forwards of a model's layers that start fewer kernels than stock's: LoRA layers and RMS normalisation.

LoRA. peft casts the input of a LoRA in fp32 up to fp32, and autocast casts it down again, for every layer. Autocast
also lets normalisations answer in fp32, which the stock pipeline does not. Here y = W x + s (x A') B', with A and B
cast to the dtype of x; their gradients arrive in fp32. A denoiser with frozen weights in that dtype needs no autocast.

RMS normalisation. Those of diffusers and transformers are seven kernels, whose fp32 activations wait for the backward.
torch's is one each way on a GPU. In fp32 they agree to rounding; in bf16 torch's rounds once, the others twice.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F

ONE_KERNEL = ("cuda", "meta")  # devices whose rms_norm is one kernel; meta stands for a GPU in a dry run


def without_casts(layers: Iterable[Any]) -> bool:
    """Give LoRA layers the forward of this module. Return False, and change none, if one is of another kind.

    layers: of peft. Of another kind are those with DoRA, dropout, or a base other than a linear layer.
    """
    layers = list(layers)
    if not layers or not all(map(_plain, layers)):
        return False
    for layer in layers:
        layer.forward = MethodType(_lora, layer)
    return True


def _plain(layer: Any) -> bool:
    dropped = any(not isinstance(dropout, torch.nn.Identity) for dropout in layer.lora_dropout.values())
    biased = any(up.bias is not None for up in layer.lora_B.values())
    return isinstance(layer.get_base_layer(), torch.nn.Linear) and not layer.lora_variant and not dropped and not biased


def _lora(layer: Any, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Return the base layer's output plus those of the active LoRAs, [..., out], for x [..., in]."""
    if layer.disable_adapters or layer.merged:
        return layer.base_layer(x, *args, **kwargs)
    y = layer.base_layer(x.flatten(0, -2) if x.is_contiguous() else x, *args, **kwargs)
    for name in layer.active_adapters:
        if name in layer.lora_A:
            up = (layer.lora_B[name].weight * layer.scaling[name]).to(x.dtype)
            hidden = F.linear(x, layer.lora_A[name].weight.to(x.dtype)).flatten(0, -2)
            rows = y.flatten(0, -2)
            # In place where y is no view: CUDA's addmm copies y first, and autograd copies the gradient of a view.
            y = rows.addmm_(hidden, up.t()) if rows is y else torch.addmm(rows, hidden, up.t())
    return y.view(*x.shape[:-1], -1)


def fuse_norms(module: torch.nn.Module, device: torch.device) -> int:
    """Give the RMS normalisations of diffusers in a module torch's kernel; return their number.

    None on a device where torch's is no single kernel. A layer with a bias, or over several dimensions, stays as it is.
    """
    if device.type not in ONE_KERNEL:
        return 0
    from diffusers.models.normalization import MochiRMSNorm, RMSNorm

    layers: list[Any] = [layer for layer in module.modules() if isinstance(layer, (RMSNorm, MochiRMSNorm))
                         and getattr(layer, "bias", None) is None and len(layer.dim) == 1]
    return _fused(layers)


def fuse_text_norms(model: torch.nn.Module, device: torch.device) -> int:
    """Give the RMS normalisations of a language model of transformers torch's kernel; return their number.

    None on a device where torch's is no single kernel. Those whose class computes another value stay, as Gemma's, which
    adds 1 to its weight.
    """
    if device.type not in ONE_KERNEL:
        return 0
    layers: list[Any] = [layer for layer in model.modules() if type(layer).__name__.endswith("RMSNorm")
                         and type(layer) is not torch.nn.RMSNorm and len(list(layer.parameters(recurse=False))) == 1
                         and getattr(getattr(layer, "weight", None), "ndim", 0) == 1 and _eps(layer) is not None]
    one_of = {type(layer): layer for layer in layers}
    agreeing = {kind for kind, layer in one_of.items() if _agrees(layer)}
    return _fused([layer for layer in layers if type(layer) in agreeing])


@torch.no_grad()
def _agrees(layer: Any) -> bool:
    """Return True if a layer's class computes what torch's kernel does, in a trial in fp32."""
    trial, generator = copy.deepcopy(layer).to_empty(device="cpu").float(), torch.Generator().manual_seed(0)
    trial.weight.copy_(torch.randn(trial.weight.shape, generator=generator))
    x = torch.randn(3, len(trial.weight), generator=generator)
    try:
        found = type(layer).forward(trial, x)
    except TypeError:  # one with a gate
        return False
    return bool(torch.allclose(found, F.rms_norm(x, x.shape[-1:], trial.weight, _eps(trial)), atol=1e-5))


def _fused(layers: list[Any]) -> int:
    for layer in layers:
        layer.forward = MethodType(_rms_norm, layer)
    return len(layers)


def _eps(layer: Any) -> float | None:
    return getattr(layer, "variance_epsilon", getattr(layer, "eps", None))


def _rms_norm(layer: Any, x: torch.Tensor) -> torch.Tensor:
    """Return x [..., D] over its root mean square, times the weight [D]; stock's where their dtypes differ."""
    if layer.weight is not None and layer.weight.dtype != x.dtype:
        return type(layer).forward(layer, x)
    return F.rms_norm(x, x.shape[-1:], layer.weight, _eps(layer))
