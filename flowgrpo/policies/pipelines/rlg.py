"""Several sets of denoisers in one pipeline: reward-guided sampling (RLG, 2508.21016) by base + weight * (tuned -
base), and frozen teachers that score the pipeline's samples.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_map

from flowgrpo.errors import UserError
from flowgrpo.policies.pipelines.load import DENOISERS, denoisers, load_pipeline
from flowgrpo.policies.weights.forwards import modules_of, replaced
from flowgrpo.policies.weights.trainable import disable_adapters, lora_layers
from flowgrpo.samplers.kernels import prediction
from flowgrpo.types import wide

if TYPE_CHECKING:
    from peft.tuners.lora import LoraLayer

Forward = Callable[..., Any]
READS = ("in_channels", "joint_attention_dim", "cross_attention_dim", "pooled_projection_dim", "caption_channels")


def extrapolate(base: Any, tuned: Any, weight: float) -> Any:
    """Return base + weight * (tuned - base) in the dtype of `tuned`, computed in float32 or wider, of tensors [...] and
    of tuples, lists and dicts (such as diffusers' output classes) that hold them; other values are those of `tuned`.
    Weights 0 and 1 return one of them bit for bit."""
    def between(first: Any, last: Any) -> Any:
        if not torch.is_tensor(last) or not last.is_floating_point():
            return last
        start, end = wide(first, last)
        return torch.lerp(start, end, weight).to(last.dtype)

    return tree_map(between, base, tuned)


def rl_guidance(bases: dict[torch.nn.Module, Forward], weight: float) -> contextlib.AbstractContextManager[None]:
    """Context manager: the modules return base + weight * (tuned - base).

    bases: by module, the function that returns the base's output for the same arguments; its own forward is the tuned
    model's. A call runs both in turn, at twice the cost; at 1 and 0 it runs only one, unchanged.
    """
    def blend(base: Forward, tuned: Forward) -> Forward:
        @functools.wraps(tuned)  # some pipelines test for an argument
        def answer(*args: Any, **kwargs: Any) -> Any:
            first = base(*args, **kwargs)
            return first if weight == 0 else extrapolate(first, tuned(*args, **kwargs), weight)
        return answer

    blended = [(module, blend(base, module.forward)) for module, base in bases.items() if weight != 1]
    return replaced("forward", *blended)


def inside(state: Callable[[], contextlib.AbstractContextManager], forward: Forward) -> Forward:
    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        with state():
            return forward(*args, **kwargs)
    return run


@dataclass(frozen=True, eq=False)
class Branches:
    """Tuned stock pipeline and its base. first: the original denoisers, by name, if the base is not a LoRA switched
    off."""

    pipe: Any
    first: dict[str, torch.nn.Module]

    def at(self, weight: float) -> contextlib.AbstractContextManager[None]:
        """Context manager: the pipeline draws with base + weight * (tuned - base), at the cost of one at 0 and 1.
        UserError for another weight if a text encoder was tuned too."""
        if weight == 0:
            return self._base()
        if weight != 1 and (others := [name for name in self._layers() if name not in self.first]):
            raise UserError(f"RLG with weight {weight:g}: the {others[0]} was tuned too, but base and tuned model get "
                            "the same embeddings: expected 0, 1, or weights of only the denoisers")
        return rl_guidance(self._bases(), weight)

    def _layers(self) -> dict[str, list[LoraLayer]]:
        by_module = {name: list(lora_layers(part).values()) for name, part in modules_of(self.pipe).items()}
        return {name: layers for name, layers in by_module.items() if layers}

    def _bases(self) -> dict[torch.nn.Module, Forward]:
        bases: dict[torch.nn.Module, Forward] = {}
        layers = self._layers()
        for name, first in self.first.items():
            module = getattr(self.pipe, name)
            if module is not first:
                bases[module] = first
            elif name in layers:  # otherwise tuning did not change it
                bases[module] = inside(functools.partial(disable_adapters, layers[name]), module.forward)
        return bases

    @contextlib.contextmanager
    def _base(self) -> Iterator[None]:
        tuned = {name: getattr(self.pipe, name) for name in self.first}
        with disable_adapters([layer for layers in self._layers().values() for layer in layers]):
            self.pipe.register_modules(**self.first)
            try:
                yield
            finally:
                self.pipe.register_modules(**tuned)


class Teachers:
    """Teachers of a pipeline policy by name, a directory or a hub id, each loaded at its first use; their text encoders
    are not: they read the policy's embeddings."""

    def __init__(self, policy: Any):
        self.policy = policy
        self.known: dict[str, dict[str, torch.nn.Module]] = {}

    @contextlib.contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Context manager: the pipeline calls the teacher's denoisers. UserError if it does not load, or reads
        something else than the policy's."""
        if name not in self.known:
            self.known[name] = self._load(name)
        bases = {module: self.known[name][key].forward for key, module in self.policy.denoisers.items()}
        with rl_guidance(bases, 0.0), torch.no_grad():
            yield

    def _load(self, name: str) -> dict[str, torch.nn.Module]:
        pipe = load_pipeline(name, self.policy.precision, only=DENOISERS, checker=False)
        taught, here = denoisers(pipe), self.policy.denoisers
        pairs: dict[str, tuple[Any, ...]] = {
            "denoisers": (sorted(taught), sorted(here)),
            "prediction": (prediction(pipe.scheduler), prediction(self.policy.stock))}
        for key in here.keys() & taught.keys():
            configs: tuple[Any, Any] = taught[key].config, here[key].config
            pairs |= {f"{key}.{field}": tuple(config.get(field) for config in configs) for field in READS}
        for what, (its, expected) in pairs.items():
            if its != expected:
                raise UserError(f"the teacher {name!r} has {what} {its}, expected {expected}, as the model has: use "
                                "one of the model's family")
        return {key: module.to(self.policy.device).eval().requires_grad_(False) for key, module in taught.items()}
