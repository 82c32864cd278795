"""What tests with tables worked by hand share: float64 values, random and given, a comparison to 1e-10, and grids."""

import torch

from flowgrpo.samplers import grids


def f64(values: list) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def close(actual: torch.Tensor, expected: list | torch.Tensor, atol: float = 1e-10) -> None:
    """AssertionError where a value is off by more than `atol`, or the shape or dtype is another."""
    expected = torch.as_tensor(expected, dtype=torch.float64)
    torch.testing.assert_close(actual, expected, rtol=0, atol=atol, equal_nan=True)


def rounding(values: torch.Tensor, depth: int) -> float:
    """The largest difference that other CPUs and batch shapes make: 4 units in the last place of the largest value, for
    each of `depth` layers between input and output."""
    return 4 * torch.finfo(values.dtype).eps * depth * values.abs().max().item()


def near(actual: torch.Tensor, expected: torch.Tensor, depth: int) -> None:
    """AssertionError where two ways to the same numbers differ by more than `rounding`."""
    assert actual.dtype == expected.dtype and actual.shape == expected.shape
    torch.testing.assert_close(actual, expected, rtol=0, atol=rounding(expected, depth))


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def stock(scheduler, steps: int, **asked) -> torch.Tensor:
    """The grid that a scheduler sets when nobody but `asked` tells it anything."""
    scheduler.set_timesteps(steps, **asked)
    return grids.stock(scheduler, steps)
