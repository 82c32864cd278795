"""Check that a pipeline resumes from the middle of its loop as the whole loop goes on.

Replays do that at every step but the first, and rollouts whose samples share steps do it too. A pipeline that puts a
picture back in between two steps, under the noise that it drew at its start (inpainting with a denoiser that does not
read the mask), has no such middle: a call that starts there draws another noise.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch

from flowgrpo.errors import UserError
from flowgrpo.samplers.grids import make_grid
from flowgrpo.samplers.rollout import RolloutSpec
from flowgrpo.samplers.scheduler import Segment, StepRecord
from flowgrpo.types import Gaussian

SEED = 1  # of the initial noise: not one of those that an idle step's call draws with
LARGEST, LARGEST_ROUNDED = 1e-4, 0.01  # of a state or a model output: what may differ, in fp32 and in less


def require(policy: Any, conditioning: Any, segments: bool = True) -> None:
    """Raise UserError if a pipeline's second step differs when a call starts with it.

    conditioning: of one prompt or more, of which the first is asked with. segments: whether calls go on from where
    others ended; else they only replay a step from the state that the whole run had there.
    """
    row, before = conditioning.rows(torch.tensor([0])), policy.evaluations
    whole = _run(policy, row, range(2))
    apart = _replayed(policy, row, whole)
    if segments:
        first, record = policy.run(_task(policy, range(1)), row, None, policy.generators([SEED]))
        apart = max(apart, _difference(whole, _run(policy, row, range(1, 2), first, record.x0)))
    again = _difference(whole, _run(policy, row, range(2))) if apart > _most(policy) else 0.0
    policy.evaluations = before
    if apart <= _most(policy):
        return
    name = type(policy.pipe).__name__
    if again > _most(policy):
        raise UserError(f"two equal runs of {name} differ, by {again:.2%}: look for dropout or a random module")
    raise UserError(f"{name} does not go on from the middle of its loop as the whole loop does, but {apart:.0%} off: "
                    "it may put a picture back in after every step, under noise of the whole run; for inpainting take "
                    "a model that reads mask and picture as channels")


def goes_on(method: Any, explorations: Sequence[RolloutSpec]) -> bool:
    """Return True if a method's calls resume where others ended, as they do if samples share steps."""
    return method.target.follows_reward or any(each.splits or len(each.strides) > 1 for each in explorations)


def _task(policy: Any, steps: range) -> Segment:
    """A task of a grid of three steps whose second one records its state and, as its mean, the model output."""
    grid, timesteps = few_steps(policy, 3)  # of two, the second one may see next to no noise
    second = frozenset({1})
    return Segment(grid, steps, lambda x, v, grid, i: Gaussian(v, torch.ones(())), stochastic=second, recorded=second,
                   generators=policy.generators([SEED]), timesteps=timesteps)


def _run(policy: Any, row: Any, steps: range, x: torch.Tensor | None = None, x0: torch.Tensor | None = None
         ) -> StepRecord:
    with torch.no_grad():
        return policy.run(_task(policy, steps), row, x, policy.generators([SEED]) if x is None else None, x0)[1]


def _replayed(policy: Any, row: Any, whole: StepRecord) -> float:
    task = _task(policy, range(2))
    with torch.no_grad():
        output = policy.replay(row, whole.x[1], task.grid, 1, task.timesteps)
    return _apart(whole.transition[1].mean, output)


def _difference(one: StepRecord, two: StepRecord) -> float:
    return max(_apart(one.x[1], two.x[1]), _apart(one.transition[1].mean, two.transition[1].mean))


def _apart(one: torch.Tensor, two: torch.Tensor) -> float:
    """The norm of the difference, relative; infinite where one is not finite."""
    found = ((one.float() - two.float()).norm() / one.float().norm()).item()
    return found if found == found else float("inf")


def _most(policy: Any) -> float:
    return LARGEST if policy.exact else LARGEST_ROUNDED


def few_steps(policy, steps: int) -> tuple[torch.Tensor, torch.Tensor | None]:
    """A grid of that many steps with its timesteps, of a pipeline whose strength leaves out the first ones too."""
    whole = next(n for n in itertools.count(steps) if int(n * policy.strength) == steps)
    return make_grid("shifted", whole, 3.0, policy.stock, policy.strength)
