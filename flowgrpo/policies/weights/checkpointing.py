"""Gradient checkpointing: forwards of blocks, whole denoisers or layers of language models are computed again in the
backward.

For language models transformers does this in training mode alone, which would turn dropout on, so that a replay would
not be the rollout.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from flowgrpo.errors import UserError
from flowgrpo.policies.weights.compiled import blocks

Context = Callable[[], contextlib.AbstractContextManager]
# Classes whose own checkpointing computes something else: Chroma's leaves the attention mask out.
WRONG = {"ChromaTransformer2DModel"}


def checkpoint_blocks(module: torch.nn.Module, context: Context, compiled: bool = False) -> None:
    """Have a denoiser or an autoencoder compute its blocks again in the backward, inside of `context()`, which has to
    give what its forward runs in: those that diffusers does, and where it cannot, the entries of the module lists.

    UserError for a module without either, and for the latter where blocks are to be compiled."""
    if getattr(module, "_supports_gradient_checkpointing", False) and type(module).__name__ not in WRONG:
        # By its call, not its forward: a compiled block runs compiled, and one that is shared out is collected.
        module.enable_gradient_checkpointing(lambda block, *args: _again(block.__call__, context, block)(*args))
        return
    found, told = blocks(module), f"train.checkpointing is true, but {type(module).__name__}"
    if not found:
        raise UserError(f"{told} has no list of blocks: use false")
    if compiled:
        raise UserError(f"{told} has it not by diffusers, and then not with train.compile: set one of them to false")
    for block in found:
        block.forward = _again(block.forward, context, block)


@contextlib.contextmanager
def recomputed(modules: Iterable[torch.nn.Module], context: Context) -> Iterator[None]:
    """Inside, a forward of these modules holds nothing for the backward but its arguments, and is computed again there,
    inside of `context()`, which has to give what holds here (the same attention kernel)."""
    kept = {module: vars(module).get("forward") for module in modules}
    for module in kept:
        module.forward = _again(module.forward, context)
    try:
        yield
    finally:
        for module, forward in kept.items():
            del module.forward
            if forward is not None:
                module.forward = forward


def _again(forward: Callable, context: Context, block: torch.nn.Module | None = None) -> Callable:
    """`forward` of the block, checkpointed where gradients are recorded."""
    def answer(*args, **kwargs):
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        # Some pipelines (PAG) change attention processors for the time of their call, which ends before the backward.
        processors = {each: each.processor for each in (block.modules() if block else ()) if "processor" in vars(each)}

        def run(*values):  # by place: what is held is seen by hooks, which measure the memory
            return forward(*values[:len(args)], **dict(zip(kwargs, values[len(args):], strict=True)))

        return checkpoint(run, *args, *kwargs.values(), use_reentrant=False, preserve_rng_state=False,
                          context_fn=lambda: (contextlib.nullcontext(), _as_then(processors, context)))
    answer.__signature__ = inspect.signature(forward)  # some pipelines look whether an argument is there
    return answer


@contextlib.contextmanager
def _as_then(processors: dict[torch.nn.Module, Any], context: Context) -> Iterator[None]:
    now = {module: module.processor for module in processors}
    for module, processor in processors.items():
        module.processor = processor
    try:
        with context():
            yield
    finally:
        for module, processor in now.items():
            module.processor = processor


def recompute(model: torch.nn.Module) -> None:
    """Hold of every layer only what goes into it, where gradients are enabled. The model is called without a cache
    then. UserError for one whose layers transformers does not know."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    inside: set[torch.nn.Module] = set()
    for layer in model.modules():  # those around others come first
        if isinstance(layer, GradientCheckpointingLayer) and layer not in inside:
            inside |= {*layer.modules()}
            layer.forward = partial(_layer_again, layer.forward)
    if not inside:
        raise UserError(f"train.checkpointing is true, but {type(model).__name__} has no layers that transformers can "
                        "compute again: set it to false, or lower train.micro_batch")


def _layer_again(forward: Callable, *args: Any, **options: Any) -> Any:
    if not torch.is_grad_enabled():
        return forward(*args, **options)
    return checkpoint(forward, *args, use_reentrant=False, **options)
