"""Memory layout in which a CPU computes linear layers faster; results differ by rounding alone."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor


def contiguous_inputs(modules: Iterable[torch.nn.Module], device: torch.device) -> None:
    """Make linear layers on a CPU read contiguous rows, by a hook that copies their input where it is not contiguous.

    One half of a joint attention's output is not. For such an input torch copies the weights once per row of the batch
    and calls aten::bmm.
    """
    for module in modules if device.type == "cpu" else ():
        for layer in module.modules():
            if isinstance(layer, torch.nn.Linear):
                layer.register_forward_pre_hook(_contiguous)


def _contiguous(_layer: torch.nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(value.contiguous() if isinstance(value, Tensor) else value for value in args)
