"""Host syncs, counted without a GPU: tensors of the meta device stand for those of a GPU.

Values that the host reads of them are zeros, or True.
"""

import sys
from collections import Counter
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from flowgrpo import device

META = torch.device("meta")


def _on_meta(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.device == META


READS = {
    "_local_scalar_dense": lambda tensor: True if tensor.dtype == torch.bool else 0.0,
    "is_nonzero": lambda tensor: True,
    "equal": lambda tensor, other: True,
    "nonzero": lambda tensor: torch.empty(tensor.numel(), tensor.ndim, dtype=torch.int64, device=META),
    "masked_select": lambda tensor, mask: torch.empty(tensor.numel(), dtype=tensor.dtype, device=META),
}


class HostSyncs(TorchDispatchMode):
    """Counter of host syncs: `waits`, by the operation and the line of the package that it came from."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = function._schema.name.partition("::")[2]
        on_meta = [value for value in tree_leaves((args, kwargs)) if _on_meta(value)]
        if on_meta and name in READS:
            self.waits[f"{name} {_line()}"] += 1
            return READS[name](*args)
        if on_meta and name == "index" and any(_is_mask(index) for index in args[1]):
            self.waits[f"mask {_line()}"] += 1
            index = torch.zeros(args[0].shape[0], dtype=torch.int64, device=META)
            return function(args[0], [index], **kwargs)
        if name in ("_to_copy", "copy_"):
            source, goal = (args[1], args[0].device) if name == "copy_" else (
                args[0], torch.device(kwargs.get("device") or args[0].device))
            if source.device == META and goal.type == "cpu":
                self.waits[f"to the host {_line()}"] += 1
                dtype = kwargs.get("dtype") or source.dtype
                return args[0] if name == "copy_" else torch.zeros(source.shape, dtype=dtype)
            if source.device.type == "cpu" and goal == META and not _queued():
                self.waits[f"from the host {_line()}"] += 1
        return function(*args, **kwargs)


def _is_mask(index: torch.Tensor | None) -> bool:
    return index is not None and index.dtype in (torch.bool, torch.uint8)


def _line() -> str:
    """Nearest line of a file outside of torch and of this file."""
    frame = sys._getframe(2)
    while frame is not None:
        file = frame.f_code.co_filename
        if file != __file__ and "/torch/" not in file and "contextlib" not in file:
            return f"{'/'.join(file.split('/')[-2:])}:{frame.f_lineno}"
        frame = frame.f_back
    return "unknown"


def _queued() -> bool:
    """True within `device.queued`, whose copies to a GPU do not block."""
    frame = sys._getframe(2)
    while frame is not None:
        if frame.f_code is device.to_device.__code__:
            return True
        frame = frame.f_back
    return False
