"""Does a pipeline's call take rows of different steps? Its timestep is then a vector with an entry per row."""

from __future__ import annotations

from collections.abc import Callable

import torch

from flowgrpo.samplers.scheduler import Segment

COPIES = (1, 2)  # of the rows in one batch of the denoiser; 2 where guidance doubles it
EXACT, HALF = 1e-5, 0.03  # largest error, as a share of the largest output: in fp32, in half precision
SHARE = 0.1  # largest error, as a share of what the wrong step would change
# What a pipeline raises that reads its timestep as one number, or chooses an expert by it.
REFUSALS = (AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)


def copies(output: Callable[[Segment], torch.Tensor], process: str, exact: bool) -> int:
    """Return how often a call's vector of timesteps repeats its rows; 0 if the pipeline takes no vector.

    output(task): what two rows give in a replay, [2,*D]. Row 0 at one step and row 1 at another, in one call, have to
    give what calls of a single step give: to float noise, and far closer than the wrong step would.
    """
    grid, times = torch.tensor([0.9, 0.1, 0.0]), torch.tensor([900, 100])
    whole = Segment(grid, range(1), replay=True, timesteps=times if process == "vp" else None)
    early, late = output(whole), output(whole.at_step(1))
    expected, wrong = torch.stack([early[0], late[1]]), torch.stack([late[0], early[1]])
    for count in COPIES:
        try:
            mixed = output(whole.at_rows(torch.tensor([0, 1]), count))
        except torch.OutOfMemoryError:
            raise
        except REFUSALS:
            continue
        if mixed.shape == expected.shape and _agree(mixed, expected, wrong, EXACT if exact else HALF):
            return count
    return 0


def _agree(mixed: torch.Tensor, expected: torch.Tensor, wrong: torch.Tensor, tolerance: float) -> bool:
    mixed, expected, wrong = (value.detach().double().flatten(1) for value in (mixed, expected, wrong))
    error, effect = ((value - expected).abs().amax(1) for value in (mixed, wrong))
    return bool(((error <= tolerance * expected.abs().max()) & (error <= SHARE * effect)).all())
