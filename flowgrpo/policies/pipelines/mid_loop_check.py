"""Check that a pipeline resumes from the middle of its loop as the whole loop goes on.

Replays do that at every step but the first, and rollouts whose samples share steps do it too. A pipeline that puts a
picture back in between two steps, under the noise that it drew at its start (inpainting with a denoiser that does not
read the mask), has no such middle: a call that starts there draws another noise.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from flowgrpo.errors import UserError
from flowgrpo.samplers.grids import make_grid
from flowgrpo.samplers.rollout import RolloutSpec
from flowgrpo.samplers.scheduler import Segment, StepRecord
from flowgrpo.types import Gaussian

if TYPE_CHECKING:
    from flowgrpo.methods.method import Method
    from flowgrpo.policies.pipelines.conditioning import Conditioning
    from flowgrpo.policies.pipelines.pipeline import PipelinePolicy

SEED = 1  # of the initial noise: not one of those that an idle step's call draws with
LARGEST, LARGEST_ROUNDED = 1e-4, 0.01  # of a state or a model output: what may differ, in fp32 and in less


def require(policy: PipelinePolicy, conditioning: Conditioning, segments: bool = True) -> None:
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
                    "it may put an image back in after every step, under noise of the whole run; for inpainting take "
                    "a model that reads mask and image as channels")


def goes_on(method: Method, explorations: Sequence[RolloutSpec]) -> bool:
    """Return True if a method's calls resume where others ended, as they do if samples share steps."""
    return method.target.follows_reward or any(exploration.splits or len(exploration.strides) > 1
                                               for exploration in explorations)


def _task(policy: PipelinePolicy, steps: range) -> Segment:
    """Return a task of three steps whose second one records its state and, as its mean, the model output."""
    grid, timesteps = few_steps(policy, 3)  # of two, the second one may see next to no noise
    second = frozenset({1})
    return Segment(grid, steps, lambda x, v, grid, i: Gaussian(v, torch.ones(())), stochastic=second, recorded=second,
                   generators=policy.generators([SEED]), timesteps=timesteps)


def _run(policy: PipelinePolicy, row: Conditioning, steps: range, x: torch.Tensor | None = None,
         x0: torch.Tensor | None = None) -> StepRecord:
    with torch.no_grad():
        return policy.run(_task(policy, steps), row, x, policy.generators([SEED]) if x is None else None, x0)[1]


def _replayed(policy: PipelinePolicy, row: Conditioning, whole: StepRecord) -> float:
    task = _task(policy, range(2))
    with torch.no_grad():
        output = policy.replay(row, whole.x[1], task.grid, 1, task.timesteps)
    return _apart(whole.transition[1].mean, output)


def _difference(one: StepRecord, two: StepRecord) -> float:
    return max(_apart(one.x[1], two.x[1]), _apart(one.transition[1].mean, two.transition[1].mean))


def _apart(one: torch.Tensor, two: torch.Tensor) -> float:
    """Return the relative norm of the difference; infinite where one is not finite."""
    difference = ((one.float() - two.float()).norm() / one.float().norm()).item()
    return difference if difference == difference else float("inf")


def _most(policy: PipelinePolicy) -> float:
    return LARGEST if policy.exact else LARGEST_ROUNDED


def few_steps(policy: PipelinePolicy, steps: int) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return a sigma grid of that many steps and its timesteps, also if the pipeline's strength omits the first."""
    whole = next(n for n in itertools.count(steps) if int(n * policy.strength) == steps)
    return make_grid("shifted", whole, 3.0, policy.stock, policy.strength)
