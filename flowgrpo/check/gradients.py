"""Gradient checks: norm of a step's gradient, and its error by finite differences."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from flowgrpo.errors import UserError
from flowgrpo.policies.weights.trainable import TrainableWeights

RANK, GROUP = 4, 2
SHARES, LARGEST_GRADIENT_ERROR = (1e-3, 1e-4), 0.01  # SHARES: small steps along the gradient


def gradient_norm(modules: Sequence[torch.nn.Module], weights: TrainableWeights) -> float:
    """Return the norm of the adapter's gradient.
    Raises UserError if it is 0 or not finite, or if a weight outside the adapter has a gradient."""
    ours = set(weights.parameters())
    other = [p for module in modules for p in module.parameters() if p.grad is not None and p not in ours]
    if other:
        raise UserError(f"a gradient reaches {len(other)} frozen weights")
    # List order: a set's order differs between calls, and with it the last bit.
    reached = [p.grad.norm() for p in weights.parameters() if p.grad is not None]
    norm = torch.stack(reached or [torch.zeros(())]).norm().item()
    if not 0 < norm < float("inf"):
        raise UserError(f"the gradient that reaches the adapter has the norm {norm}")
    return norm


def gradient_error(size: Callable[[], torch.Tensor], weights: TrainableWeights) -> float:
    """Return the relative error of a finite difference of `size` along its gradient. A part that blocks gradients
    (HiDream's experts run under no_grad) leaves a gradient that is finite but wrong."""
    value, parameters = size(), weights.parameters()
    gradient = torch.autograd.grad(value, parameters, allow_unused=True)
    squared = sum(part.double().square().sum() for part in gradient if part is not None).item()

    def moved(length: float) -> float:
        with torch.no_grad(), weights.swapped({key: p + length * (0 if part is None else part)
                                               for (key, p), part in zip(weights.named.items(), gradient)}):
            return size().item()

    # If the value hardly changes, the step that changes it by a given share is long: take the best share.
    lengths = [share * value.item() / squared for share in SHARES]
    return min(abs((moved(length) - moved(-length)) / (2 * length * squared) - 1) for length in lengths)


def require_exact(result: dict[str, Any]) -> None:
    """Raise UserError for a wrong gradient."""
    if not result["gradient_error"] <= LARGEST_GRADIENT_ERROR:
        raise UserError(f"the gradient is off by {result['gradient_error']:.0%} of the change that it predicts: a "
                        "part of the model runs without gradients")
