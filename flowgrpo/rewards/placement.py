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

    @property
    def moves(self) -> bool:
        """True if there are weights to load or to move."""
        return self.away or bool(local_models(self.reward))

    def come(self) -> None:
        """Load what is not loaded, and bring back what left."""
        for model in () if self._loaded else local_models(self.reward):
            model.models
        self._loaded = True
        for group in self.groups.values():
            group.come()

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
            placement.come()
            placement.leave()


def leave(rewards: Iterable[object]) -> None:
    """Move the weights of rewards off their devices where `memory.rewards` says so."""
    for reward in rewards:
        placement = getattr(reward, "placement", None)
        if isinstance(placement, Placement):
            placement.leave()


def weight_bytes(reward: object) -> dict[str, int]:
    """Return the bytes of a reward's weights by device; a default checkpoint is not read for that."""
    sizes: Counter[str] = Counter()
    for model in local_models(reward):
        if model.parts is None and model.parameters is not None and _default(model):
            sizes[str(model.device)] += int(model.parameters * model.float_type.itemsize)
        else:
            model.models
    for module, device in modules(reward):
        sizes[str(device)] += sum(tensor.numel() * tensor.element_size()
                                  for tensor in [*module.parameters(), *module.buffers()])
    return dict(sizes)


def _default(model: LocalModel) -> bool:
    """Return True if no argument names another checkpoint than the default."""
    return all(getattr(model, entry.name) == entry.default for entry in fields(model) if entry.name in CHECKPOINTS)


def local_models(reward: object) -> list[LocalModel]:
    """Return the models of a reward, loaded or not."""
    from flowgrpo.rewards.local_model import LocalModel

    return [part for part, _ in _parts(reward, None, set()) if isinstance(part, LocalModel)]


def modules(reward: object) -> list[tuple[torch.nn.Module, torch.device]]:
    """Return the loaded modules of a reward, each once, with the device on which it scores."""
    import torch

    return [(part, device or _device(part)) for part, device in _parts(reward, None, set())
            if isinstance(part, torch.nn.Module)]


def _device(module: torch.nn.Module) -> torch.device:
    import torch

    return next((tensor.device for tensor in [*module.parameters(), *module.buffers()]), torch.device("cpu"))


def _parts(thing: object, device: torch.device | None, seen: set[int]) -> Iterator[tuple[Any, torch.device | None]]:
    """Yield the models and modules that an object holds, with the device that the model around them names."""
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
    for inner in _contents(thing):
        yield from _parts(inner, device, seen)


def _contents(thing: object) -> list[Any]:
    """Return what an object holds: items of a container, or values of its attributes."""
    if isinstance(thing, Mapping):
        return [*thing.values()]
    if isinstance(thing, (list, tuple, set, frozenset)):
        return [*thing]
    if isinstance(thing, functools.partial):
        return [thing.func, *thing.args, *thing.keywords.values()]
    if inspect.ismethod(thing):
        return [thing.__self__]
    plain = inspect.isclass(thing) or inspect.ismodule(thing) or not hasattr(thing, "__dict__")
    return [] if plain else [*vars(thing).values()]
