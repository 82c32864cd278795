"""Guidance by what tuning changed (RLG, 2508.21016): denoisers that answer base + weight * (tuned - base).

The blend is made where a pipeline calls its denoiser, so that every pipeline, with its own guidance, loop and scheduler
or ours, is blended alike. Classifier-free guidance is linear in the denoiser's outputs: blended outputs, guided, are
the blend of the guided outputs of base and tuned model at one scale. A guidance that is not linear, such as one that
rescales its result to the norm of the conditional output, guides the blended model instead.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from flowgrpo.errors import UserError
from flowgrpo.policies.weights.trainable import lora_layers, switched_off
from flowgrpo.types import wide

Forward = Callable[..., Any]


def blended(base: Any, tuned: Any, weight: float) -> Any:
    """base + weight * (tuned - base) in the dtype of `tuned`, computed in float32 or wider; 0 and 1 give one of them to
    the last bit.

    Of tensors, and of tuples, lists and dicts (such as diffusers' output classes) that hold them; what is no tensor of
    floats is the tuned one's.
    """
    if torch.is_tensor(tuned) and tuned.is_floating_point():
        return torch.lerp(*wide(base, tuned), weight).to(tuned.dtype)
    if isinstance(tuned, dict):
        return type(tuned)(**{key: blended(base[key], value, weight) for key, value in tuned.items()})
    if isinstance(tuned, (tuple, list)):
        return type(tuned)(blended(*pair, weight) for pair in zip(base, tuned, strict=True))
    return tuned


@contextlib.contextmanager
def guided(bases: dict[torch.nn.Module, Forward], weight: float) -> Iterator[None]:
    """Inside, the modules answer base + weight * (tuned - base).

    bases: by module, what gives the base's answer to the same arguments; its own forward is the tuned model's. A call
    runs both, one after the other, and costs twice as much; at 1 and 0 it runs the one that is left, unchanged.
    """
    kept = {module: vars(module).get("forward") for module in bases}
    for module, base in bases.items() if weight != 1 else ():
        module.forward = _blending(base, module.forward, weight)
    try:
        yield
    finally:
        for module, forward in kept.items():
            vars(module).pop("forward", None)
            if forward is not None:
                module.forward = forward


def _blending(base: Forward, tuned: Forward, weight: float) -> Forward:
    @functools.wraps(tuned)  # some pipelines look whether an argument is there
    def answer(*args, **kwargs):
        first = base(*args, **kwargs)
        return first if weight == 0 else blended(first, tuned(*args, **kwargs), weight)
    return answer


def inside(state: Callable[[], contextlib.AbstractContextManager], forward: Forward) -> Forward:
    """The forward, run inside of `with state():`."""
    @functools.wraps(forward)
    def run(*args, **kwargs):
        with state():
            return forward(*args, **kwargs)
    return run


@dataclass(frozen=True, eq=False)
class Branches:
    """A stock pipeline that holds tuned weights, beside its base: a LoRA that is switched off, or the modules `first`,
    the denoisers that the pipeline had before it was tuned, by name."""

    pipe: Any
    first: dict[str, torch.nn.Module]

    def at(self, weight: float) -> contextlib.AbstractContextManager[None]:
        """Inside, the pipeline draws with base + weight * (tuned - base); at 0 it is the base and at 1 the tuned model,
        bit for bit, at the cost of one. UserError for another weight where a text encoder was tuned too."""
        if weight == 0:
            return self._base()
        if weight != 1 and (others := [name for name in self._layers() if name not in self.first]):
            raise UserError(f"RLG with weight {weight:g}: the {others[0]} was tuned too, but base and tuned model get "
                            "the same embeddings: expected 0, 1, or weights of the denoisers alone")
        return guided(self._bases(), weight)

    def _layers(self) -> dict[str, list[torch.nn.Module]]:
        """The LoRA layers of each of the pipeline's modules that has some."""
        found = {name: list(lora_layers(part).values()) for name, part in self.pipe.components.items()
                 if isinstance(part, torch.nn.Module)}
        return {name: layers for name, layers in found.items() if layers}

    def _bases(self) -> dict[torch.nn.Module, Forward]:
        bases: dict[torch.nn.Module, Forward] = {}
        layers = self._layers()
        for name, first in self.first.items():
            module = getattr(self.pipe, name)
            if module is not first:
                bases[module] = first
            elif name in layers:  # else tuning left it as it was
                bases[module] = inside(functools.partial(switched_off, layers[name]), module.forward)
        return bases

    @contextlib.contextmanager
    def _base(self) -> Iterator[None]:
        tuned = {name: getattr(self.pipe, name) for name in self.first}
        with switched_off([layer for layers in self._layers().values() for layer in layers]):
            self.pipe.register_modules(**self.first)
            try:
                yield
            finally:
                self.pipe.register_modules(**tuned)
