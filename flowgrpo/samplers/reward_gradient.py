"""Reward backpropagation: the last steps of a rollout, its image and the image's reward in one graph.

A rollout is the ordinary one up to the single trained step of the plan, where the graph begins; the state there is
recorded. An ending, `ending(policy, conditioning, x, exploration, step, generators) -> data [b,*D]`, turns it into the
data to decode. It runs without gradients to sample, and with gradients, under the present weights, to train. Earlier
steps are outside the graph. The "score" of such a part is its reward, which `surrogates.RewardAscent` follows. The
first-ratio check then tests that replay and rollout see the same reward.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from flowgrpo.config.geometry import prompts_per_part
from flowgrpo.device import to_device
from flowgrpo.parts import part
from flowgrpo.samplers.growth import single_score
from flowgrpo.samplers.rollout import C, Denoiser, Part, RolloutSpec, Seed
from flowgrpo.samplers.scheduler import Segment
from flowgrpo.types import Scored, Transitions, unwrap

Ending = Callable[..., torch.Tensor]
# Return the reward [b] of images [b,...] of the prompts `rows` [b], differentiable in the images.
Value = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@part("backprop")
class Unroll:
    """All remaining steps, each through the policy, with the noise of the rollout (DRaFT, 2309.17400).

    checkpointing: recompute every step's denoiser in the backward pass, so only states are held in memory.
    """

    checkpointing: bool = False

    def __call__(self, policy: Denoiser[C], conditioning: C, x: torch.Tensor, exploration: RolloutSpec, step: int,
                 generators: Sequence[torch.Generator]) -> torch.Tensor:
        task = _task(exploration, step, exploration.steps, [generator.clone_state() for generator in generators])
        return policy.unroll(task, conditioning, x, self.checkpointing)


@part("backprop")
class OneStep:
    """Data predicted by one step, x0 = x - s v, in place of all remaining steps (ReFL, 2304.05977, algorithm 1).

    Rollouts end there too.
    """

    def __call__(self, policy: Denoiser[C], conditioning: C, x: torch.Tensor, exploration: RolloutSpec, step: int,
                 generators: Sequence[torch.Generator]) -> torch.Tensor:
        v = policy.replay(conditioning, x, exploration.grid, step, exploration.timesteps)
        return exploration.task(step, step + 1).predict_x0(x, v, step).to(x.dtype)


@dataclass(frozen=True, eq=False)
class ResumableStates(Transitions):
    """States before `step`, from which a rollout is finished again.

    x: [n,*D], the states.
    x_next: [n,*D], the data that the rollout made of them.
    old: their rewards.
    generators: a noise generator per state, as it was at `step`.
    value: what gave their images these rewards; None before they are known.
    """

    generators: tuple[torch.Generator, ...] = ()
    value: Value | None = None

    def select(self, keep: torch.Tensor) -> "ResumableStates | None":
        left = super().select(keep)
        if left is None or left is self:
            return None if left is None else self
        generators = tuple(generator for generator, kept in zip(self.generators, keep.tolist(), strict=True) if kept)
        return ResumableStates(**vars(left), generators=generators, value=self.value)


def explore(policy: Denoiser[C], conditioning: C, exploration: RolloutSpec, ending: Ending, micro_batch: int,
            seed: Seed, together: Sequence[int] = ()) -> Iterator[Part]:
    """Sample each prompt of `conditioning`; yield whole groups, whose rewards `score_images` has to fill in.

    The arguments are those of `growth.explore`. Every sample starts from a separate noise.
    """
    group, count = exploration.group, len(conditioning.prompts)
    [step] = exploration.schedule.trained
    for prompts in torch.arange(count).split([*together] or prompts_per_part(group, micro_batch)):
        generators = policy.generators(seed(int(p), leaf) for p in prompts for leaf in range(group))
        of = prompts.repeat_interleave(group)
        sampled = []
        for rows in torch.arange(len(of)).split(micro_batch):
            own, drawn = conditioning.rows(of[rows]), generators[rows[0]:rows[-1] + 1]
            # States at the start of the graph, where the generators stay, and their final data.
            x, _ = policy.run(_task(exploration, 0, step, drawn), own, None, drawn)
            with policy.sampling():
                sampled.append((x, ending(policy, own, x, exploration, step, drawn).detach()))
        x, finals = map(torch.cat, zip(*sampled))
        unknown = single_score(torch.full((len(of),), torch.nan))
        taken = ResumableStates(step, x.to(policy.states), of, torch.arange(len(of)), finals, unknown,
                                generators=tuple(generators))
        yield Part(range(int(prompts[0]), int(prompts[-1]) + 1), of, exploration, (taken,), (finals,))


def score_images(part: Part, images: torch.Tensor, value: Value, device: torch.device, micro_batch: int) -> Part:
    """Part with the rewards of its images [b,...] as old scores, computed in the batches of its replay."""
    with torch.no_grad():
        rewards = [value(part.prompts[at], images[at].to(device))
                   for at in torch.arange(len(images)).split(micro_batch)]
    [taken] = part.transitions
    assert isinstance(taken, ResumableStates)
    return replace(part, transitions=(replace(taken, old=single_score(torch.cat(rewards)), value=value),))


def replay(policy: Denoiser[C], conditioning: C, part: Part, ending: Ending, micro_batch: int
           ) -> Iterator[tuple[int, slice, Scored]]:
    """Yield (0, rows, rewards as Scored [b,1]) of a part's states under the present weights, batch by batch.

    Rewards have gradients where they are enabled. The interface is that of `growth.replay`.
    """
    [taken] = part.transitions
    assert isinstance(taken, ResumableStates)
    exploration, value = unwrap(part.exploration), unwrap(taken.value)
    for start in range(0, len(taken.x), micro_batch):
        rows = slice(start, start + micro_batch)
        encoded = conditioning.rows(taken.prompts[rows])
        x = to_device(taken.x[rows], policy.device)
        data = ending(policy, encoded, x, exploration, taken.step, taken.generators[rows])
        yield 0, rows, single_score(value(taken.prompts[rows], policy.image(data, encoded)))


def _task(exploration: RolloutSpec, start: int, stop: int, generators: list[torch.Generator]) -> Segment:
    """Segment of the rollout that records nothing; the last step of the grid never draws noise."""
    task = exploration.task(start, stop, generators)
    return replace(task, stochastic=task.stochastic - {exploration.steps - 1}, recorded=frozenset())
