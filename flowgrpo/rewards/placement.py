"""Weights of rewards: loaded before the first scoring, and off their device between scorings (`memory.rewards: cpu`).

The modules of a reward are those that its attributes hold, and those of the rewards that it is made of.
"""

from __future__ import annotations

import functools
import inspect
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from flowgrpo.host_weights import Offloaded
    from flowgrpo.rewards.local_model import LocalModel

CHECKPOINTS = ("model", "checkpoint", "pretrained", "head", "name")  # arguments that name weights


class Placement:
    """Weights of one reward. away: they leave their device for the CPU between scorings."""

    def __init__(self, reward: object, away: bool):
        self.reward, self.away = reward, away
        self.groups: dict[torch.device, Offloaded] = {}
        self._loaded = False

    def bring(self) -> None:
        """Load what is not loaded, and bring back what left."""
        for model in () if self._loaded else local_models(self.reward):
            model.models
        self._loaded = True
        for group in self.groups.values():
            group.load()

    def leave(self) -> None:
        """Move the weights off their device, if they have to; nothing that carries their graph may be left."""
        if not self.away:
            return
        from flowgrpo.host_weights import Offloaded

        known = {id(module) for group in self.groups.values() for module in group.modules}
        for module, device in modules(self.reward):
            if id(module) not in known and str(device) != "cpu":
                group = self.groups.setdefault(device, Offloaded([], device, "cpu", here=True))
                group.modules.append(module)
        for group in self.groups.values():
            group.offload()


def load(rewards: Iterable[object]) -> None:
    """Load the weights of rewards that were made lazily. Raises UserError if they are unavailable."""
    for reward in rewards:
        if isinstance(placement := getattr(reward, "placement", None), Placement):
            placement.bring()
            placement.leave()


def leave(rewards: Iterable[object]) -> None:
    """Move the weights of rewards off their devices where `memory.rewards` says so."""
    for reward in rewards:
        if isinstance(placement := getattr(reward, "placement", None), Placement):
            placement.leave()


def weight_bytes(reward: object) -> dict[str, int]:
    """Bytes of a reward's weights by device; a default checkpoint is not read for that."""
    sizes: Counter[str] = Counter()
    for model in local_models(reward):
        given = any(getattr(model, entry.name) != entry.default for entry in fields(model) if entry.name in CHECKPOINTS)
        if model.parts is None and model.parameters is not None and not given:  # the default checkpoint
            sizes[str(model.device)] += int(model.parameters * model.float_type.itemsize)
        else:
            model.models
    for module, device in modules(reward):
        sizes[str(device)] += sum(tensor.numel() * tensor.element_size()
                                  for tensor in [*module.parameters(), *module.buffers()])
    return dict(sizes)


def local_models(reward: object) -> list[LocalModel]:
    """Models of a reward, loaded or not."""
    from flowgrpo.rewards.local_model import LocalModel

    return [part for part, _ in _parts(reward, None, set()) if isinstance(part, LocalModel)]


def modules(reward: object) -> list[tuple[torch.nn.Module, torch.device]]:
    """Loaded modules of a reward, each once, with the device on which it scores."""
    import torch

    found = []
    for part, device in _parts(reward, None, set()):
        if isinstance(part, torch.nn.Module):
            tensors = [*part.parameters(), *part.buffers()]
            found.append((part, device or (tensors[0].device if tensors else torch.device("cpu"))))
    return found


def _parts(thing: object, device: torch.device | None, seen: set[int]) -> Iterator[tuple[Any, torch.device | None]]:
    """Models and modules that an object holds, with the device that the model around them names."""
    import torch

    from flowgrpo.rewards.local_model import LocalModel

    if id(thing) in seen or isinstance(thing, (str, bytes, int, float, complex, torch.Tensor, type(None))):
        return
    seen.add(id(thing))
    if isinstance(thing, LocalModel):
        device = torch.device(thing.device or "cpu")
        yield thing, device
    if isinstance(thing, torch.nn.Module):
        yield thing, device
        seen |= {id(module) for module in thing.modules()}
    held: Iterable[Any] = ()
    if isinstance(thing, Mapping):
        held = thing.values()
    elif isinstance(thing, (list, tuple, set, frozenset)):
        held = thing
    elif isinstance(thing, functools.partial):
        held = thing.func, *thing.args, *thing.keywords.values()
    elif inspect.ismethod(thing):
        held = [thing.__self__]
    elif hasattr(thing, "__dict__") and not inspect.isclass(thing) and not inspect.ismodule(thing):
        held = vars(thing).values()
    for inner in [*held]:  # a copy: looking at it may fill it
        yield from _parts(inner, device, seen)
