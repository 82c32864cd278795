"""Change of the trained weights: how far training has moved them."""

from __future__ import annotations

import torch
from torch import Tensor

from flowgrpo.distributed.processes import Processes
from flowgrpo.distributed.shards import is_shard, local
from flowgrpo.policies.weights.trainable import TrainableWeights

UNUSABLE = 1e6  # change of a layer from which on nothing of the model is left


class Change:
    """Distance of the trained weights from those that a run began with.

    Made before a checkpoint is restored. The first weights of a LoRA are kept where `adapter.init` set them.
    """

    def __init__(self, weights: TrainableWeights):
        self.weights = weights
        self._began = weights.snapshot() if weights.adapter.rank and weights.adapter.init is not None else {}

    @torch.no_grad()
    def __call__(self, processes: Processes) -> float:
        """Return the largest change of a layer: |W - W_0|_F / sqrt(outputs), 0 for none, NaN or infinite where weights
        are.

        It is the root mean square of what W - W_0 adds to the layer's outputs for inputs of root mean square 1, so that
        W_0 has about 1. Of a LoRA W - W_0 is scale B A, less that of `adapter.init`. Of sharded whole weights this
        process's rows are read; those of a LoRA are gathered, and every process calls it.
        """
        found = [torch.zeros((), dtype=torch.float64)]
        for key, layer in self.weights.layers().items():
            names = [f"{key}.lora_{side}.default.weight" for side in "AB"]
            if all(name in self.weights.named for name in names):
                down, up = (_wide(self.weights.named[name]) for name in names)
                if self._began and not is_shard(self.weights.named[names[0]]):
                    first = [_wide(self._began[name]).to(down.device) for name in names]
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


def _wide(tensor: Tensor) -> Tensor:
    """Return a parameter as a matrix [outputs, rest], whole, in float64, or float32 where the device has no other."""
    whole: Tensor = tensor.full_tensor() if is_shard(tensor) else tensor  # type: ignore[attr-defined]
    matrix = whole.detach().reshape(len(whole), -1) if whole.ndim else whole.detach().view(1, 1)
    return matrix.float() if matrix.device.type == "mps" else matrix.double()
