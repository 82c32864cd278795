"""Probes of a pipeline, each of a few steps at its first use: what one call of it may mix, and where one may begin.

`copies`: rows of different steps, with a vector of timesteps. `stay_apart`: prompts with images of their own.
`require_middle`: a call that starts in the middle of the loop, as replays do, and rollouts whose samples share steps. A
pipeline that puts an image back in after every step, under the noise that it drew at its start (inpainting with a
denoiser that does not read the mask), has no such middle: a call that starts there draws another noise.

policy: everywhere a `PipelinePolicy`, which itself imports this module.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from flowgrpo.data.images import Clip
from flowgrpo.errors import UserError
from flowgrpo.methods.method import Method
from flowgrpo.policies.pipelines.conditioning import Conditioning
from flowgrpo.policies.pipelines.prompt_inputs import SHARED
from flowgrpo.samplers.grids import make_grid
from flowgrpo.samplers.rollout import RolloutSpec
from flowgrpo.samplers.scheduler import Segment, StepRecord
from flowgrpo.types import Gaussian

COPIES = (1, 2)  # of the rows in one batch of the denoiser; 2 where guidance doubles it
EXACT, HALF = 1e-5, 0.03  # largest error of rows, as a share of the largest output: in fp32, in half precision
SHARE = 0.1  # of the difference that another step or image makes: what company may change
# What a pipeline raises that reads its timestep as one number, or chooses an expert by it.
REFUSALS = (AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
SEED = 1  # of the initial noise: not one of those that an idle step's call draws with
LARGEST, LARGEST_ROUNDED = 1e-4, 0.01  # of a state or a model output: what may differ, in fp32 and in less


# --- rows of different steps -----------------------------------------------------------------------------------------

def copies(output: Callable[[Segment], torch.Tensor], process: str, exact: bool) -> int:
    """Return how often a call's vector of timesteps repeats its rows; 0 if the pipeline takes no vector.

    output(task): what two rows give in a replay, [2,*D]. Row 0 at one step and row 1 at another have to give what calls
    of a single step give: to float noise, and far closer than the wrong step would.
    """
    grid, times = torch.tensor([0.9, 0.1, 0.0]), torch.tensor([900, 100])
    whole = Segment(grid, range(1), replay=True, timesteps=times if process == "vp" else None)
    early, late = output(whole), output(whole.at_step(1))
    expected, wrong = (torch.stack(rows).detach().double() for rows in ([early[0], late[1]], [late[0], early[1]]))

    def apart(value: torch.Tensor) -> torch.Tensor:
        return (value.detach().double() - expected).flatten(1).abs().amax(1)

    most = torch.minimum((EXACT if exact else HALF) * expected.abs().max(), SHARE * apart(wrong))
    for count in COPIES:
        try:
            mixed = output(whole.at_rows(torch.tensor([0, 1]), count))
        except torch.OutOfMemoryError:
            raise
        except REFUSALS:
            continue
        if mixed.shape == expected.shape and bool((apart(mixed) <= most).all()):
            return count
    return 0


# --- prompts with images -------------------------------------------------------------------------------------------

def stay_apart(policy: Any, twice: Conditioning) -> bool:
    """Return True if a step of two prompts with separate images gives the result of each prompt alone. Some pipelines
    (Flux2) silently take a list for several references of one prompt.
    twice: one prompt, two times, not yet encoded. What is shared (`SHARED`) never differs within a call."""
    if not set(twice.inputs) - set(SHARED):
        return True
    pair = replace(twice, inputs={name: [first, second if name in SHARED else other(second)]
                                  for name, (first, second) in twice.inputs.items()})
    grid, timesteps = make_grid("shifted", 2, 1.0, policy.stock, policy.strength)
    task = Segment(grid, range(1), timesteps=timesteps)

    def step(conditioning: Conditioning) -> torch.Tensor:
        seeds = [7] * len(conditioning.prompts)
        return policy.run(task, policy.encode_prompt(conditioning, policy.guidance), None, policy.generators(seeds))[0]

    together, alone = step(pair), [step(pair.rows(torch.tensor([i]))) for i in range(2)]
    if together.shape[1:] != alone[0].shape[1:] or alone[0].shape != alone[1].shape:
        return False
    return bool((together - torch.cat(alone)).abs().max() <= SHARE * (alone[0] - alone[1]).abs().max())


def other(image: Any) -> Any:
    """Return a different image of the same size: its negative; of frames or several images, of each."""
    from PIL import Image, ImageOps

    if isinstance(image, Image.Image):
        return ImageOps.invert(image.convert("RGB"))
    if isinstance(image, Clip):
        return other(image.frames)
    if isinstance(image, (list, tuple)):
        return [other(part) for part in image]
    return image.flip(-1) if torch.is_tensor(image) else image[..., ::-1]


# --- the middle of the loop ------------------------------------------------------------------------------------------

def require_middle(policy: Any, conditioning: Conditioning, segments: bool = True) -> None:
    """Raise UserError if a pipeline's second step differs when a call starts with it. conditioning: its first prompt is
    asked with. segments: calls go on from where others ended; else they only replay the states of a whole run."""
    row, before = conditioning.rows(torch.tensor([0])), policy.evaluations
    most = LARGEST if policy.exact else LARGEST_ROUNDED
    whole = _run(policy, row, range(2))
    task = _task(policy, range(2))
    with torch.no_grad():
        apart = _off(whole.transition[1].mean, policy.replay(row, whole.x[1], task.grid, 1, task.timesteps))
    if segments:
        first, record = policy.run(_task(policy, range(1)), row, None, policy.generators([SEED]))
        apart = max(apart, _difference(whole, _run(policy, row, range(1, 2), first, record.x0)))
    again = _difference(whole, _run(policy, row, range(2))) if apart > most else 0.0
    policy.evaluations = before
    if apart <= most:
        return
    name = type(policy.pipe).__name__
    if again > most:
        raise UserError(f"two equal runs of {name} differ, by {again:.2%}: look for dropout or a random module")
    raise UserError(f"{name} does not go on from the middle of its loop as the whole loop does, but {apart:.0%} off: "
                    "it may put an image back in after every step, under noise of the whole run; for inpainting take "
                    "a model that reads mask and image as channels")


def goes_on(method: Method, explorations: Sequence[RolloutSpec]) -> bool:
    """Return True if a method's calls resume where others ended, as they do if samples share steps."""
    return method.target.follows_reward or any(exploration.splits or len(exploration.strides) > 1
                                               for exploration in explorations)


def _task(policy: Any, steps: range) -> Segment:
    """Return a task of three steps whose second one records its state and, as its mean, the model output."""
    grid, timesteps = few_steps(policy, 3)  # of two, the second one may see next to no noise
    second = frozenset({1})
    return Segment(grid, steps, lambda x, v, grid, i: Gaussian(v, torch.ones(())), stochastic=second, recorded=second,
                   generators=policy.generators([SEED]), timesteps=timesteps)


def _run(policy: Any, row: Conditioning, steps: range, x: torch.Tensor | None = None,
         x0: torch.Tensor | None = None) -> StepRecord:
    with torch.no_grad():
        return policy.run(_task(policy, steps), row, x, policy.generators([SEED]) if x is None else None, x0)[1]


def _difference(one: StepRecord, two: StepRecord) -> float:
    return max(_off(one.x[1], two.x[1]), _off(one.transition[1].mean, two.transition[1].mean))


def _off(one: torch.Tensor, two: torch.Tensor) -> float:
    """Return the relative norm of the difference; infinite where one is not finite."""
    difference = ((one.float() - two.float()).norm() / one.float().norm()).item()
    return difference if difference == difference else float("inf")


def few_steps(policy: Any, steps: int) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return a sigma grid of that many steps and its timesteps, also if the pipeline's strength omits the first."""
    whole = next(n for n in itertools.count(steps) if int(n * policy.strength) == steps)
    return make_grid("shifted", whole, 3.0, policy.stock, policy.strength)
