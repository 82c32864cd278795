"""Domains: what a run can train, such as images or texts. A record names what stands for each where the core asks.

The core lists the modules whose `DOMAIN` are the records. They are light, since every command imports them; what they
name is imported when it is called.
"""

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from flowgrpo import packages

MODULES = ("flowgrpo.images", "flowgrpo.text")


@dataclass(frozen=True)
class Place:
    """Function "module:name", imported when it is called."""

    name: str

    def __call__(self, *given: Any, **named: Any) -> Any:
        return packages.load(self.name)(*given, **named)

    @property
    def function_if_imported(self) -> Callable[..., Any] | None:
        """Function if something has imported its module; None otherwise."""
        module, name = self.name.split(":")
        return getattr(sys.modules[module], name) if module in sys.modules else None


def _missing(*_: Any, **__: Any) -> Any:
    raise AssertionError("not of this domain")


@dataclass(frozen=True, eq=False, kw_only=True)
class Domain:
    """Kind of what is generated.

    processes: by which its models are sampled. kinds: of its models, each with the process with which the parts of a
    method are tried before the model is loaded.
    rollouts: (config, policy, method, geometry, processes, clock, first prompt) -> what samples and replays a policy.
    memory: (policy, config, conditioning) -> bytes on the device, by phase and part.
    base_methods, modifiers: modules of the package whose presets count as such beside those of denoisers.
    Of language models alone: kind: (config.json, what it draws) -> the kind. load: (config) -> (model, tokenizer or
    processor). policy: (config, loaded, adapter, device) -> the policy. attach: (model, folder) puts a run's LoRA on.
    critic: (method, policy, geometry, processes) -> value model. base_method: (method) -> that of modifiers without
    one. asked: text settings that a sampling depends on. sampler: (model, run, those, weights, device, precision) ->
    the policy for sampling. rewritten: (completion) -> the prompt that it states. boundary: of a model's code, in
    words.
    """

    processes: tuple[str, ...]
    kinds: Mapping[str, str]
    rollouts: Place
    memory: Place
    base_methods: tuple[str, ...] = ()
    modifiers: tuple[str, ...] = ()
    kind: Callable[..., Any] = _missing
    load: Callable[..., Any] = _missing
    policy: Callable[..., Any] = _missing
    attach: Callable[..., Any] = _missing
    critic: Callable[..., Any] = _missing
    base_method: Callable[..., Any] = _missing
    asked: Callable[..., Any] = _missing
    sampler: Callable[..., Any] = _missing
    rewritten: Callable[..., Any] = _missing
    boundary: Place | None = None


@cache
def all() -> tuple[Domain, ...]:
    return tuple(packages.load(f"{module}:DOMAIN") for module in MODULES)


def sampled_by(process: str) -> Domain:
    """Domain whose models are sampled by a process, such as "flow" or "tokens"."""
    return next(domain for domain in all() if process in domain.processes)
