"""Reward-guided sampling (RLG, 2508.21016): denoisers that return base + weight * (tuned - base).

The blend is made where a pipeline calls its denoiser. So every pipeline is blended alike, with its own guidance, loop
and scheduler or ours. Classifier-free guidance is linear in the denoiser's outputs: guided blended outputs are the
blend of the guided outputs of base and tuned model at one scale. A non-linear guidance, such as one that rescales its
result to the norm of the conditional output, guides the blended model instead.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from flowgrpo.errors import UserError
from flowgrpo.policies.weights.trainable import lora_layers, switched_off
from flowgrpo.types import wide

if TYPE_CHECKING:
    from peft.tuners.lora import LoraLayer

Forward = Callable[..., Any]


def blended(base: Any, tuned: Any, weight: float) -> Any:
    """Return base + weight * (tuned - base) in the dtype of `tuned`, computed in float32 or wider.

    Weights 0 and 1 return one of them bit for bit. Accepts tensors [...], and tuples, lists and dicts (such as
    diffusers' output classes) that hold them; other values are those of `tuned`.
    """
    if torch.is_tensor(tuned) and tuned.is_floating_point():
        start, end = wide(base, tuned)
        return torch.lerp(start, end, weight).to(tuned.dtype)
    if isinstance(tuned, dict):
        return type(tuned)(**{key: blended(base[key], value, weight) for key, value in tuned.items()})
    if isinstance(tuned, (tuple, list)):
        return type(tuned)(blended(*pair, weight) for pair in zip(base, tuned, strict=True))
    return tuned


@contextlib.contextmanager
def guided(bases: dict[torch.nn.Module, Forward], weight: float) -> Iterator[None]:
    """Context manager: the modules return base + weight * (tuned - base).

    bases: by module, the function that returns the base's output for the same arguments; its own forward is the tuned
    model's. A call runs both in turn, at twice the cost; at 1 and 0 it runs only one, unchanged.
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
    @functools.wraps(tuned)  # some pipelines test for an argument
    def answer(*args: Any, **kwargs: Any) -> Any:
        first = base(*args, **kwargs)
        return first if weight == 0 else blended(first, tuned(*args, **kwargs), weight)
    return answer


def inside(state: Callable[[], contextlib.AbstractContextManager], forward: Forward) -> Forward:
    """Return the forward, run inside `with state():`."""
    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        with state():
            return forward(*args, **kwargs)
    return run


@dataclass(frozen=True, eq=False)
class Branches:
    """Tuned stock pipeline and its base.

    pipe: the pipeline with tuned weights.
    first: the original denoisers, by name, if the base is not a LoRA switched off.
    """

    pipe: Any
    first: dict[str, torch.nn.Module]

    def at(self, weight: float) -> contextlib.AbstractContextManager[None]:
        """Context manager: the pipeline draws with base + weight * (tuned - base).

        At 0 it is the base and at 1 the tuned model, bit for bit, at the cost of one.
        Raises UserError for another weight if a text encoder was tuned too.
        """
        if weight == 0:
            return self._base()
        if weight != 1 and (others := [name for name in self._layers() if name not in self.first]):
            raise UserError(f"RLG with weight {weight:g}: the {others[0]} was tuned too, but base and tuned model get "
                            "the same embeddings: expected 0, 1, or weights of only the denoisers")
        return guided(self._bases(), weight)

    def _layers(self) -> dict[str, list[LoraLayer]]:
        """Return the LoRA layers of each of the pipeline's modules that has any."""
        by_module = {name: list(lora_layers(part).values()) for name, part in self.pipe.components.items()
                     if isinstance(part, torch.nn.Module)}
        return {name: layers for name, layers in by_module.items() if layers}

    def _bases(self) -> dict[torch.nn.Module, Forward]:
        bases: dict[torch.nn.Module, Forward] = {}
        layers = self._layers()
        for name, first in self.first.items():
            module = getattr(self.pipe, name)
            if module is not first:
                bases[module] = first
            elif name in layers:  # otherwise tuning did not change it
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
