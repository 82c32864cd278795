"""Forward of LoRA layers in the precision of their input: a denoiser with frozen weights in it needs no autocast.

peft casts the input of a LoRA in fp32 up to fp32, and autocast casts it down again, for every layer. Autocast also
lets normalisations answer in fp32, which the stock pipeline does not. Here y = W x + (x A') (s B)', with A and B cast
to the dtype of x; their gradients arrive in fp32.
"""

from __future__ import annotations

from collections.abc import Iterable
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F


def without_casts(layers: Iterable[Any]) -> bool:
    """Give LoRA layers the forward of this module. Return False, and change none, if one is of another kind.

    layers: of peft. Of another kind are those with DoRA, dropout, or a base other than a linear layer.
    """
    layers = list(layers)
    if not layers or not all(map(_plain, layers)):
        return False
    for layer in layers:
        layer.forward = MethodType(_forward, layer)
    return True


def _plain(layer: Any) -> bool:
    dropped = any(not isinstance(dropout, torch.nn.Identity) for dropout in layer.lora_dropout.values())
    biased = any(up.bias is not None for up in layer.lora_B.values())
    return isinstance(layer.get_base_layer(), torch.nn.Linear) and not layer.lora_variant and not dropped and not biased


def _forward(layer: Any, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Return the base layer's output plus those of the active LoRAs, [..., out], for x [..., in]."""
    y = layer.base_layer(x, *args, **kwargs)
    if layer.disable_adapters or layer.merged:
        return y
    for name in layer.active_adapters:
        if name in layer.lora_A:
            up = (layer.lora_B[name].weight * layer.scaling[name]).to(x.dtype)
            hidden = F.linear(x, layer.lora_A[name].weight.to(x.dtype))
            y = torch.addmm(y.flatten(0, -2), hidden.flatten(0, -2), up.t()).view(y.shape)
    return y
