"""Layouts in which a CPU computes linear layers faster, with results that differ by rounding alone."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor


def contiguous_inputs(modules: Iterable[torch.nn.Module], device: torch.device) -> None:
    """On a CPU, copy what linear layers read where its rows are not contiguous.

    Such is one side of a joint attention's output. There torch copies the weights once per row of the batch and calls
    aten::bmm.
    """
    for module in modules if device.type == "cpu" else ():
        for layer in module.modules():
            if isinstance(layer, torch.nn.Linear):
                layer.register_forward_pre_hook(_contiguous)


def _contiguous(_layer: torch.nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(value.contiguous() if isinstance(value, Tensor) else value for value in args)
