"""Change of a model's weights by a run: how far training has moved them, and the way back for a model that the user
passed.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from flowgrpo.distributed.processes import Processes
from flowgrpo.distributed.shards import is_shard, local
from flowgrpo.policies.weights import adapters
from flowgrpo.policies.weights.trainable import TrainableWeights, lora_layers

UNUSABLE = 1e6  # change of a layer from which on nothing of the model is left
State = tuple[set[int], Callable[..., Any] | None]  # hooks before the forward, and a forward of the module's own
_left: WeakKeyDictionary[torch.nn.Module, Any] = WeakKeyDictionary()  # LoRAs of runs that finished
_before: WeakKeyDictionary[torch.nn.Module, State] = WeakKeyDictionary()  # states before those runs


class Change:
    """Distance of the trained weights from those that a run began with.

    Made before a checkpoint is restored. The first weights of a LoRA are kept where `adapter.init` set them.
    """

    def __init__(self, weights: TrainableWeights):
        self.weights = weights
        self._began = weights.snapshot() if weights.adapter.rank and weights.adapter.init is not None else {}

    @torch.no_grad()
    def __call__(self, processes: Processes) -> float:
        """Largest change of a layer: |W - W_0|_F / sqrt(outputs), 0 for none, NaN or infinite where weights are.

        It is the root mean square of what W - W_0 adds to the layer's outputs for inputs of root mean square 1, so that
        W_0 has about 1. Of a LoRA W - W_0 is scale B A, less that of `adapter.init`. Every process calls it.
        """
        found = [torch.zeros((), dtype=torch.float64)]
        for key, layer in self.weights.layers().items():
            names = [f"{key}.lora_{side}.default.weight" for side in "AB"]
            if all(name in self.weights.named for name in names):
                down, up = (_as_matrix(self.weights.named[name]) for name in names)
                if self._began and not is_shard(self.weights.named[names[0]]):
                    first = [_as_matrix(self._began[name]).to(down.device) for name in names]
                    down, up = torch.cat([down, first[0]]), torch.cat([up, -first[1]], 1)
                squares = ((down @ down.T) * (up.T @ up)).sum() / len(up)  # |B A|^2 = tr(A A^T B^T B)
                found.append(layer.scaling["default"] * squares.clamp(min=0).sqrt().cpu())
        for key, start in self.weights.first.items():
            if key.partition(".")[0] not in self.weights.added:  # a critic and the like grow from nothing
                now = local(self.weights.named[key]).detach().float()
                moved = now - start.to(now)
                found.append((moved.square().sum() / max(len(moved) if moved.ndim else 1, 1)).sqrt().double().cpu())
        largest = torch.stack(found).double().max().view(1)
        return float((processes.gather(largest) if self.weights.sharded else largest).max())


def _as_matrix(tensor: Tensor) -> Tensor:
    """[outputs, rest], whole, in float64, or float32 where the device has no other."""
    whole: Tensor = tensor.full_tensor() if is_shard(tensor) else tensor  # type: ignore[attr-defined]
    matrix = whole.detach().reshape(len(whole), -1) if whole.ndim else whole.detach().view(1, 1)
    return matrix.float() if matrix.device.type == "mps" else matrix.double()


@contextlib.contextmanager
def restore_pipeline(loaded: Any) -> Iterator[None]:
    """Context manager: remove the added LoRA, hooks and forwards from a pipeline, or a tuple of a language model and
    its reader, if the run fails; whole weights stay trained. None: the run loaded the model itself.

    A run that finishes leaves its LoRA on the model. The next run takes it off first, and begins with the base.
    """
    components = () if loaded is None else loaded if isinstance(loaded, tuple) else loaded.components.values()
    parts = [part for part in components if isinstance(part, torch.nn.Module)]
    for part in parts:  # what an earlier run left; a LoRA that was loaded since stays
        left, present = _left.pop(part, None), [*adapters.adapter_configs(part).values()]
        if len(present) == 1 and present[0] is left:
            adapters.remove(part)
        for module in part.modules():
            if module in _before:
                _restore(module, _before.pop(module))
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
    _left.update({part: known["default"] for part in bare if "default" in (known := adapters.adapter_configs(part))})
    _before.update(states)


def _restore(module: torch.nn.Module, state: State) -> None:
    hooks, forward = state
    for added in [key for key in module._forward_pre_hooks if key not in hooks]:
        del module._forward_pre_hooks[added]
        module._forward_pre_hooks_with_kwargs.pop(added, None)
    if vars(module).get("forward") is not forward:
        del module.forward
        if forward is not None:
            module.forward = forward
