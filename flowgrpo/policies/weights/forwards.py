"""Faster forwards of a model's layers: fewer kernels of LoRA layers and RMS normalisation, block-wise compilation, and
arithmetic that a CPU does faster. Results differ by rounding alone.
"""

import contextlib
import copy
from collections.abc import Iterable, Iterator
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

ONE_KERNEL = ("cuda", "meta")  # devices whose rms_norm is one kernel; meta stands for a GPU in a dry run
FUSED = F.scaled_dot_product_attention
LARGEST = 2**28  # scores of one call; they have to fit in memory; above, the fused kernel's smaller one counts for more
KINDS = 64  # most graphs per block: one per shape, grad mode, adapter on or off


def modules_of(pipe: Any) -> dict[str, torch.nn.Module]:
    """Components of a pipeline that have weights, by name."""
    return {name: part for name, part in pipe.components.items() if isinstance(part, torch.nn.Module)}


@contextlib.contextmanager
def replaced(name: str, *values: tuple[Any, Any]) -> Iterator[None]:
    """Context manager: objects have the attribute of that name that each comes with, past any setter; behind it what
    they had, be it their own or their class's."""
    before = [(vars(each), name in vars(each), vars(each).get(name)) for each, _ in values]
    for each, value in values:
        vars(each)[name] = value
    try:
        yield
    finally:
        for held, own, value in before:
            if own:  # in one step, since another thread may read it
                held[name] = value
            else:
                held.pop(name, None)


def without_casts(layers: Iterable[Any]) -> bool:
    """Give peft's LoRA layers the forward of this module. Return False, and change none, if one is of another kind:
    with DoRA, dropout, or a base other than a linear layer."""
    layers = list(layers)
    if not layers or not all(map(_plain, layers)):
        return False
    for layer in layers:
        layer.forward, layer.folded = MethodType(_lora, layer), None
    return True


@torch.no_grad()
def folded(layers: Iterable[Any]) -> contextlib.AbstractContextManager[None]:
    """Context manager: LoRA layers with the forward of this module multiply by one matrix each, W + s B A in W's dtype,
    in calls without gradients. It is held beside W until the end. Weights that train meanwhile have no effect. A
    quantised W, which is a class of its own, stays as it is."""
    return replaced("folded", *((layer, sum((layer.get_delta_weight(name).to(layer.weight.dtype)
                                             for name in layer.active_adapters if name in layer.lora_A), layer.weight))
                                for layer in list(layers) if type(layer.weight) is torch.nn.Parameter))


def _plain(layer: Any) -> bool:
    dropped = any(not isinstance(dropout, torch.nn.Identity) for dropout in layer.lora_dropout.values())
    biased = any(up.bias is not None for up in layer.lora_B.values())
    return isinstance(layer.get_base_layer(), torch.nn.Linear) and not layer.lora_variant and not dropped and not biased


def _lora(layer: Any, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """The base layer's output plus those of the active LoRAs, [..., out], for x [..., in]."""
    if layer.disable_adapters or layer.merged:
        return layer.base_layer(x, *args, **kwargs)
    if layer.folded is not None and not torch.is_grad_enabled():
        return F.linear(x, layer.folded, layer.base_layer.bias)
    if x.ndim == 1:
        return _lora(layer, x[None], *args, **kwargs)[0]
    y = layer.base_layer(x.flatten(0, -2) if x.is_contiguous() else x, *args, **kwargs)
    for name in layer.active_adapters:
        if name in layer.lora_A:
            up = (layer.lora_B[name].weight * layer.scaling[name]).to(x.dtype)
            hidden = F.linear(x, layer.lora_A[name].weight.to(x.dtype)).flatten(0, -2)
            rows = y.flatten(0, -2)
            # In place where y is no view: CUDA's addmm copies y first, and autograd copies the gradient of a view.
            y = rows.addmm_(hidden, up.t()) if rows is y else torch.addmm(rows, hidden, up.t())
    return y.view(*x.shape[:-1], y.shape[-1])


def fuse_norms(module: torch.nn.Module, device: torch.device) -> int:
    """Give the RMS normalisations of diffusers in a module torch's kernel; return their number, 0 on a device where it
    is no single kernel. A layer with a bias, or over several dimensions, stays as it is."""
    if device.type not in ONE_KERNEL:
        return 0
    from diffusers.models.normalization import MochiRMSNorm, RMSNorm

    layers: list[Any] = [layer for layer in module.modules() if isinstance(layer, (RMSNorm, MochiRMSNorm))
                         and getattr(layer, "bias", None) is None and len(layer.dim) == 1]
    return _fuse_rms_norms(layers)


def fuse_text_norms(model: torch.nn.Module, device: torch.device) -> int:
    """Give the RMS normalisations of a language model of transformers torch's kernel; return their number, as
    `fuse_norms`. Those whose class computes another value stay, as Gemma's, which adds 1 to its weight."""
    if device.type not in ONE_KERNEL:
        return 0
    layers: list[Any] = [layer for layer in model.modules() if type(layer).__name__.endswith("RMSNorm")
                         and type(layer) is not torch.nn.RMSNorm and len(list(layer.parameters(recurse=False))) == 1
                         and getattr(getattr(layer, "weight", None), "ndim", 0) == 1 and _eps(layer) is not None]
    one_of = {type(layer): layer for layer in layers}
    agreeing = {kind for kind, layer in one_of.items() if _agrees(layer)}
    return _fuse_rms_norms([layer for layer in layers if type(layer) in agreeing])


@torch.no_grad()
def _agrees(layer: Any) -> bool:
    """True if a layer's class computes what torch's kernel does, in a trial in fp32."""
    trial, generator = copy.deepcopy(layer).to_empty(device="cpu").float(), torch.Generator().manual_seed(0)
    trial.weight.copy_(torch.randn(trial.weight.shape, generator=generator))
    x = torch.randn(3, len(trial.weight), generator=generator)
    try:
        found = type(layer).forward(trial, x)
    except TypeError:  # one with a gate
        return False
    return bool(torch.allclose(found, F.rms_norm(x, x.shape[-1:], trial.weight, _eps(trial)), atol=1e-5))


def _rms_norm(layer: Any, x: torch.Tensor) -> torch.Tensor:
    """X [..., D] over its root mean square, times the weight [D]; stock's where their dtypes differ."""
    if layer.weight is not None and layer.weight.dtype != x.dtype:
        return type(layer).forward(layer, x)
    return F.rms_norm(x, x.shape[-1:], layer.weight, _eps(layer))


def _fuse_rms_norms(layers: list[Any]) -> int:
    for layer in layers:
        layer.forward = MethodType(_rms_norm, layer)
    return len(layers)


def _eps(layer: Any) -> float | None:
    return getattr(layer, "variance_epsilon", getattr(layer, "eps", None))


def plain(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_mask: torch.Tensor | None = None,
          dropout_p: float = 0.0, is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False
          ) -> torch.Tensor:
    """Softmax(q k^T * scale + mask) v, [..., N, D], as `F.scaled_dot_product_attention`. What it lacks goes there."""
    size = query.shape[:-1].numel() * key.shape[-2]
    boolean = attn_mask is not None and attn_mask.dtype == torch.bool
    if dropout_p or enable_gqa or is_causal or boolean or size > LARGEST:
        return FUSED(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    scores = (query * (scale or query.shape[-1] ** -0.5)) @ key.transpose(-1, -2)
    if attn_mask is not None:
        scores = scores + attn_mask
    return scores.softmax(-1) @ value


def contiguous_inputs(modules: Iterable[torch.nn.Module], device: torch.device) -> None:
    """Make linear layers on a CPU read contiguous rows, by a hook that copies other input, such as one half of a joint
    attention's output: for that torch copies the weights once per row of the batch and calls aten::bmm."""
    for module in modules if device.type == "cpu" else ():
        for layer in module.modules():
            if isinstance(layer, torch.nn.Linear):
                layer.register_forward_pre_hook(contiguous)


def contiguous(_layer: torch.nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(value.contiguous() if isinstance(value, Tensor) else value for value in args)


def blocks(module: torch.nn.Module) -> list[torch.nn.Module]:
    """Blocks of a denoiser, the entries of its module lists."""
    return [block for part in module.children() if isinstance(part, torch.nn.ModuleList) for block in part]


def compile_blocks(module: torch.nn.Module, backend: str = "inductor") -> int:
    """Compile the blocks of a denoiser, or all of it without blocks, at their first call; return their number.
    `compile_repeated_blocks` of diffusers raises if a class does not name its blocks, as SD3's."""
    torch._dynamo.config.recompile_limit = max(KINDS, torch._dynamo.config.recompile_limit)
    parts = blocks(module) or [module]
    for block in parts:
        block.compile(backend=backend)
    return len(parts)
