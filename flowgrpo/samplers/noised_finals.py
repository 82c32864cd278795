"""Noised finals: the recorded decisions of forward-process methods (DiffusionNFT, AWM, DGPO, CRD, Diffusion-DPO).

After a rollout by any solver the final state x0 of every leaf is noised at the epoch's times t: x_t = (1-t) x0 + t eps.
The model's velocity there is compared with its target eps - x0. This is recorded, replayed and scored like any other
transition, "from x_t to eps - x0" under N(v, 1).

A variance-preserving process noises x_t = sqrt(a) x0 + sqrt(1-a) eps at a timestep of alpha-bar a. The target of the
model's noise is eps (Diffusion-DPO, 2311.12908, equation 14).
"""

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Annotated

import torch
from torch import Tensor

from flowgrpo.parts import Above, AtLeast, part
from flowgrpo.samplers.growth import replay, rescore, single_score
from flowgrpo.samplers.plans import Schedule
from flowgrpo.samplers.rollout import C, Denoiser, Part, RolloutSpec, Seed, fork_seed
from flowgrpo.samplers.scheduler import noise_like
from flowgrpo.types import Gaussian, Transitions, wide

# Interface: times(grid, epoch, seed) -> falling times [K] in the grid's dtype, the same on all processes;
# `shared`: the samples of a group are noised with one noise.


@part("times", jointly={"every start share": "1 or more, 0 or more, and above 0 and at most 1"})
class GridTimes:
    """Sigmas of the rollout: one of every `every` steps, drawn anew each epoch from steps `start` to int(share *
    T) - 1 of T. Stretches begin at multiples of `every`: with every 2 and start 1 they are [1], [2, 3], [4, 5], ...

    share: above 0 and at most 1, the noisy side of the sigma grid.
    shared: one noise for the samples of a group (DGPO, 2510.08425).
    """

    every: Annotated[int, AtLeast(1)] = 1
    start: Annotated[int, AtLeast(0)] = 0
    share: Annotated[float, Above(0, to=1)] = 1.0
    shared: bool = False

    def __call__(self, grid: Tensor, epoch: int, seed: int) -> Tensor:
        steps = len(grid) - 1
        stop = int(self.share * steps)
        if stop <= self.start:
            raise ValueError(f"GridTimes: start {self.start} and share {self.share} leave none of {steps} steps: take "
                             "an earlier start, a larger share or more steps")
        draw = random.Random(f"times/{seed}/{epoch}")
        return grid[[draw.choice(range(max(at, self.start), min(at + self.every, stop)))
                     for at in range(self.start - self.start % self.every, stop, self.every)]]


@part("times")
class RandomGridTimes:
    """int(share * T) of the T sigmas of the rollout, chosen anew each epoch, all with equal probability
    (DiffusionNFT, 2509.16117; its code draws them per sample).

    share: above 0 and at most 1.
    shared: one noise for the samples of a group.
    """

    share: Annotated[float, Above(0, to=1, words="above 0 and at most 1")] = 1.0
    shared: bool = False

    def __call__(self, grid: Tensor, epoch: int, seed: int) -> Tensor:
        steps = len(grid) - 1
        count = int(self.share * steps)
        if not count:
            raise ValueError(f"RandomGridTimes: share {self.share} leaves none of {steps} steps: take a larger share "
                             "or more steps")
        return grid[sorted(random.Random(f"times/{seed}/{epoch}").sample(range(steps), count))]


@part("times")
class Stratified:
    """`count` times between `low` and `high`, one sampled uniformly in each of `count` equal slices, anew each epoch.

    0 <= low < high <= 1; shared: one noise for the samples of a group.
    """

    count: int = 4
    low: float = 0.0
    high: float = 1.0
    shared: bool = False

    def __post_init__(self) -> None:
        if self.count < 1 or not 0 <= self.low < self.high <= 1:
            raise ValueError(f"Stratified: count is {self.count}, low {self.low} and high {self.high}, expected 1 or "
                             "more, and 0 <= low < high <= 1")

    def __call__(self, grid: Tensor, epoch: int, seed: int) -> Tensor:
        draw = random.Random(f"times/{seed}/{epoch}")
        places = [(k + draw.random()) / self.count for k in range(self.count)]
        return self.high - (self.high - self.low) * torch.tensor(places, dtype=grid.dtype)


def matching(x: Tensor, v: Tensor, grid: Tensor, i: int) -> Gaussian:
    """Kernel of noised finals, N(v, 1): its log-density at a target u is -mean((v - u)^2) / 2 - log(2 pi) / 2, [B]."""
    (v,) = wide(v)
    return Gaussian(v, torch.ones((), dtype=v.dtype))


def noise_finals(policy: Denoiser[C], conditioning: C, part: Part, exploration: RolloutSpec, micro_batch: int,
                 seed: Seed, shared: bool, pack: bool = False) -> Part:
    """Part with its finals noised at the times of `exploration`, its grid without the last entry, in place of its
    recorded steps, scored by the present weights.

    seed: seeds of the leaves, as in the rollout; the noise here is a separate draw.
    shared: one noise per group at each time; otherwise one per leaf.
    """
    (x0,) = part.finals
    vp = exploration.timesteps is not None
    generators = policy.generators(fork_seed(seed(int(p), -1 if shared else row % exploration.group), 1)
                                   for row, p in enumerate(part.prompts))
    rows, transitions = torch.arange(len(x0)), []
    for k, t in enumerate(exploration.grid[:-1].tolist()):
        x, target = add_noise(x0, noise_like(x0, generators), t, policy.states, vp)
        unscored = single_score(torch.zeros(len(x0)), target if exploration.keep_means else None)
        transitions.append(Transitions(k, x, part.prompts, rows, target, unscored))
    part = replace(part, exploration=exploration, transitions=tuple(transitions))
    with policy.sampling():
        return rescore(part, replay(policy, conditioning, part, micro_batch, pack))


def add_noise(x0: Tensor, noise: Tensor, t: float, device: torch.device, vp: bool) -> tuple[Tensor, Tensor]:
    """x_t and its target, [b,*D], rounded as the network sees them, on the device of recorded states.

    t: sigma, or the alpha-bar of a variance-preserving process.
    """
    clean = x0.float()
    x, target = (t**0.5 * clean + (1 - t)**0.5 * noise, noise) if vp else ((1 - t) * clean + t * noise, noise - clean)
    return x.to(x0.dtype).to(device), target.to(x0.dtype).to(device)


def exploration(times: Tensor, group: int, solver: Callable, score_means: bool, keep_means: bool,
                alphas: Tensor | None = None) -> RolloutSpec:
    """Noised finals as an exploration: its grid holds the times, with one transition per leaf at each.

    alphas: [N], the alpha-bars of a variance-preserving process's timesteps; a time t is then timestep int(t N).
    """
    every = tuple(range(len(times)))
    timesteps = None
    if alphas is not None:
        timesteps = (times * len(alphas)).long().clamp(max=len(alphas) - 1)
        times = alphas[timesteps]
    return RolloutSpec(torch.cat([times, times.new_zeros(1)]), Schedule(every, every), matching, solver, group, group,
                       score_means=score_means, keep_means=keep_means, timesteps=timesteps)
