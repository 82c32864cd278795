"""Restore a loaded model that the user passed to a run: where it failed, and before the next one."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from weakref import WeakKeyDictionary

import torch

from flowgrpo.policies.weights import adapters
from flowgrpo.policies.weights.trainable import lora_layers

State = tuple[set[int], Callable[..., Any] | None]  # hooks before the forward, and a forward of the module's own
_left: WeakKeyDictionary[torch.nn.Module, Any] = WeakKeyDictionary()  # LoRAs of runs that finished
_before: WeakKeyDictionary[torch.nn.Module, State] = WeakKeyDictionary()  # states before those runs


@contextlib.contextmanager
def as_before(loaded: Any) -> Iterator[None]:
    """Context manager: restore a pipeline, or a tuple of a language model and its reader, if the run fails.

    None: the run loaded the model itself. At failure the added LoRA, hooks and forwards are removed, so another run can
    use the model. The trained weights are in the run's checkpoints; with adapter.rank 0 the trained ones stay.

    A run that finishes leaves its LoRA on the model. The next run takes it off first, and begins with the base.
    """
    components = () if loaded is None else loaded if isinstance(loaded, tuple) else loaded.components.values()
    parts = [part for part in components if isinstance(part, torch.nn.Module)]
    for part in parts:
        _take_off_left(part)
    bare = [part for part in parts if not lora_layers(part)]
    states: dict[torch.nn.Module, State] = {
        module: ({*module._forward_pre_hooks}, vars(module).get("forward")) for part in parts
        for module in part.modules()}
    try:
        yield
    except BaseException:
        for part in bare:
            adapters.remove(part)
        for module, state in states.items():
            _restore(module, state)
        raise
    _left.update({part: present["default"] for part in bare if "default" in (present := adapters.named(part))})
    _before.update(states)


def _take_off_left(part: torch.nn.Module) -> None:
    """Remove what an earlier run left on a module; a LoRA that was loaded since stays."""
    left = _left.pop(part, None)
    present = [*adapters.named(part).values()]
    if len(present) == 1 and present[0] is left:
        adapters.remove(part)
    for module in part.modules():
        if module in _before:
            _restore(module, _before.pop(module))


def _restore(module: torch.nn.Module, state: State) -> None:
    hooks, forward = state
    for added in [key for key in module._forward_pre_hooks if key not in hooks]:
        del module._forward_pre_hooks[added]
        module._forward_pre_hooks_with_kwargs.pop(added, None)
    if vars(module).get("forward") is not forward:
        del module.forward
        if forward is not None:
            module.forward = forward
