"""What tests with tables worked by hand share: float64 values, random and given, and a comparison to 1e-10."""

from __future__ import annotations

import torch


def f64(values: list) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def close(actual: torch.Tensor, expected: list, atol: float = 1e-10) -> None:
    """AssertionError where a value is off by more than `atol`, or the shape or dtype is another."""
    torch.testing.assert_close(actual, f64(expected), rtol=0, atol=atol)


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
