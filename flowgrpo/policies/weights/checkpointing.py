"""Gradient checkpointing: recompute blocks, whole denoisers or layers of language models in the backward pass.

A share of the blocks may recompute: half of them keeps about half of the activations, for half of another forward.
For language models transformers does this in training mode only. That would turn dropout on, and a replay would differ
from the rollout.
"""

import contextlib
import inspect
import math
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from flowgrpo.errors import UserError
from flowgrpo.policies.weights.forwards import blocks, replaced

Context = Callable[[], contextlib.AbstractContextManager]
# Classes whose own checkpointing computes other values: Chroma's omits the attention mask.
WRONG = {"ChromaTransformer2DModel"}


def chooser(share: float) -> Callable[[torch.nn.Module], bool]:
    """Choice of a share of blocks, 0 to 1, evenly spread in the order in which they are first called; the first one is
    in every share above 0."""
    places: dict[torch.nn.Module, int] = {}

    def chosen(block: torch.nn.Module) -> bool:
        place = places.setdefault(block, len(places))
        before, after = (math.ceil(round(share * count, 9)) for count in (place, place + 1))
        return after > before

    return chosen


def checkpoint_blocks(module: torch.nn.Module, context: Context, compiled: bool = False, share: float = 1.0) -> None:
    """Recompute a share of the blocks of a denoiser or an autoencoder in the backward pass, inside `context()`, which
    must restore the state of the forward pass. A repeated call changes the share.

    The blocks are those that diffusers checkpoints, or else the entries of the module lists. UserError for a module
    without either, and for the latter if blocks are to be compiled.
    """
    if supports_checkpointing(module) and type(module).__name__ not in WRONG:
        # By its call, not its forward: a compiled block runs compiled, and a sharded one is collected.
        denoiser: Any = module
        chosen = chooser(share)

        def recompute(block: Any, *args: Any, **kwargs: Any) -> Any:  # HunyuanImage gives its blocks some by name
            run = _again(block.__call__, context, block) if chosen(block) else block
            return run(*args, **kwargs)

        denoiser.enable_gradient_checkpointing(recompute)
        return
    parts, message = blocks(module), f"train.checkpointing is on, but {type(module).__name__}"
    if not parts:
        raise UserError(f"{message} has no list of blocks: use false")
    if compiled:
        raise UserError(f"{message} has no checkpointing of diffusers, so it does not go with "
                        "train.compile: set one of them to false")
    chosen = chooser(share)
    for block in parts:
        forward = getattr(block.forward, "plain", block.forward)
        block.forward = _again(forward, context, block) if chosen(block) else forward


def supports_checkpointing(module: Any) -> bool:
    """True for a module that diffusers can checkpoint."""
    return getattr(module, "_supports_gradient_checkpointing", False)


def recompute_forwards(modules: Iterable[torch.nn.Module], context: Context) -> contextlib.AbstractContextManager[None]:
    """Context manager: a forward of these modules stores only its arguments and is recomputed in the backward pass.

    The recomputation runs inside `context()`, which must restore the present state (the same attention kernel).
    """
    return replaced("forward", *((module, _again(module.forward, context)) for module in modules))


def _again(forward: Callable, context: Context, block: torch.nn.Module | None = None) -> Callable:
    """`forward` of the block, checkpointed where gradients are recorded."""
    def answer(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        # Some pipelines (PAG) change attention processors during their call, which ends before the backward pass.
        processors = {module: module.processor for module in (block.modules() if block else ())
                      if "processor" in vars(module)}

        @contextlib.contextmanager
        def as_then() -> Iterator[None]:
            with replaced("processor", *processors.items()), context():
                yield

        def run(*values: Any) -> Any:  # by position: hooks that measure the memory see the stored values
            return forward(*values[:len(args)], **dict(zip(kwargs, values[len(args):], strict=True)))

        return checkpoint(run, *args, *kwargs.values(), use_reentrant=False, preserve_rng_state=False,
                          context_fn=lambda: (contextlib.nullcontext(), as_then()))
    vars(answer)["plain"] = forward
    vars(answer)["__signature__"] = inspect.signature(forward)  # some pipelines test for an argument
    return answer


def recompute(model: torch.nn.Module, share: float = 1.0) -> None:
    """Store only the input of a share of the layers where gradients are enabled, and recompute them in the backward.
    The model is then called without a cache. A repeated call changes the share. UserError for a model whose layers
    transformers does not know."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    inside: set[torch.nn.Module] = set()
    chosen = chooser(share)
    for layer in model.modules():  # outer layers come first
        if isinstance(layer, GradientCheckpointingLayer) and layer not in inside:
            inside |= {*layer.modules()}
            forward = layer.forward
            if isinstance(forward, partial) and forward.func is _layer_again:
                [forward] = forward.args
            layer.forward = partial(_layer_again, forward) if chosen(layer) else forward
    if not inside:
        raise UserError(f"train.checkpointing is on, but {type(model).__name__} has no layers that transformers can "
                        "compute again: set it to false, or lower train.micro_batch")


def _layer_again(forward: Callable, *args: Any, **options: Any) -> Any:
    if not torch.is_grad_enabled():
        return forward(*args, **options)
    return checkpoint(forward, *args, use_reentrant=False, **options)
