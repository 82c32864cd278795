"""Gradient checkpointing of whole denoisers: their forwards are computed again in the backward."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterable, Iterator

import torch
from torch.utils.checkpoint import checkpoint


@contextlib.contextmanager
def recomputed(modules: Iterable[torch.nn.Module], context: Callable[[], contextlib.AbstractContextManager]
               ) -> Iterator[None]:
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


def _again(forward: Callable, context: Callable[[], contextlib.AbstractContextManager]) -> Callable:
    def answer(*args, **kwargs):
        return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False,
                          context_fn=lambda: (contextlib.nullcontext(), context()), **kwargs)
    answer.__signature__ = inspect.signature(forward)  # some pipelines look whether an argument is there
    return answer
