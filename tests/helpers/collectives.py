"""Collective calls, counted with their bytes."""

from collections import defaultdict
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Collectives(TorchDispatchMode):
    """Context manager: bytes of every collective call of this thread, by its name."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: defaultdict[str, list[int]] = defaultdict(list)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        room, _, name = function._schema.name.partition("::")
        if room == "c10d":
            tensors = [value for value in tree_leaves(args[:1]) if isinstance(value, torch.Tensor)]
            self.sizes[name.strip("_")].append(sum(tensor.nbytes for tensor in tensors))
        return function(*args, **(kwargs or {}))
