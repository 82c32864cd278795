"""Exploration: groups of samples by segments of the grid, with shared prefixes denoised once.

A rollout is cut where its rows part. With a shared initial noise the deterministic steps before the first stochastic
one are the trunk: they run once per prompt, and the state is repeated for the group. The rest runs per sample, in
micro-batches; each is handed on as soon as it is done, so that it can be decoded and scored while the next one samples.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from diffusers.utils.torch_utils import randn_tensor

from flowgrpo.samplers import grids
from flowgrpo.samplers.plans import Schedule
from flowgrpo.samplers.scheduler import Record, Task
from flowgrpo.types import Scored, Segment, Trajectory


@dataclass(frozen=True)
class Exploration:
    """How one epoch samples: sigmas [T+1], which steps are stochastic and trained, the kernel and the solver."""

    grid: torch.Tensor
    schedule: Schedule
    kernel: Callable
    solver: Callable
    shared_noise: bool = False
    keep_means: bool = False

    def task(self, start: int, stop: int, noise=None) -> Task:
        return Task(self.grid, range(start, stop), self.kernel, self.solver, frozenset(self.schedule.stochastic),
                    frozenset(self.schedule.trained), noise)


@dataclass(frozen=True)
class Part:
    """One micro-batch of a rollout: its rows among the epoch's B, what was drawn, and how probable it was.

    rows: int64 [b]; taken: a Trajectory whose `final` is [b,*D]; old: Scored [b,K].
    """

    rows: torch.Tensor
    taken: Trajectory
    old: Scored


def explore(policy, conditioning, exploration: Exploration, group: int, micro_batch: int,
            seed: Callable[[int, int], int]) -> Iterator[Part]:
    """Sample `group` pictures for each of the P prompts of `conditioning`; yields the parts of B = P * group rows.

    seed(prompt, sample) gives each row's own seed, and with sample = -1 that of a noise shared by the prompt's group.
    """
    prompts = len(conditioning.prompts)
    trunk = exploration.schedule.stochastic[0] if exploration.shared_noise else 0
    states, memory = _trunk(policy, conditioning, exploration, trunk, micro_batch, seed) \
        if exploration.shared_noise else (None, None)
    for rows in torch.arange(prompts * group).split(micro_batch):
        of = rows // group
        generators = policy.generators(seed(int(p), int(row % group)) for p, row in zip(of, rows))
        task = exploration.task(trunk, len(exploration.grid) - 1, noise=lambda x, g=generators: _noise(x, g))
        at = of.to(policy.device)
        final, record = policy.run(task, conditioning.rows(of), None if states is None else states[at],
                                   generators, None if memory is None else memory[at])
        yield Part(rows, _trajectory(record, exploration.schedule.trained, final), _scored(record, exploration))


def _trunk(policy, conditioning, exploration, stop, micro_batch, seed):
    """States [P,*D] of the first `stop` steps, one per prompt, and the solver's memory of them."""
    states, memory = [], []
    for rows in torch.arange(len(conditioning.prompts)).split(micro_batch):
        generators = policy.generators(seed(int(p), -1) for p in rows)
        final, record = policy.run(exploration.task(0, stop), conditioning.rows(rows), None, generators)
        states.append(final)
        memory.append(record.x0)
    return torch.cat(states), torch.cat(memory) if stop else None


def _noise(x: torch.Tensor, generators: list[torch.Generator]) -> torch.Tensor:
    return randn_tensor(x.shape, generator=generators, device=x.device, dtype=torch.float32)


def _trajectory(record: Record, trained: tuple[int, ...], final: torch.Tensor) -> Trajectory:
    runs = np.split(np.array(trained), np.flatnonzero(np.diff(trained) != 1) + 1)
    segments = [Segment(torch.stack([record.x[int(run[0])], *(record.x_next[int(i)] for i in run)], 1),
                        tuple(int(i) for i in run)) for run in runs]
    return Trajectory(tuple(segments), final)


def _scored(record: Record, exploration: Exploration) -> Scored:
    trained = exploration.schedule.trained
    logp = torch.stack([record.logp[i] for i in trained], 1)
    means = torch.stack([record.transition[i].mean for i in trained], 1) if exploration.keep_means else None
    std = torch.stack([record.transition[i].std for i in trained]) if exploration.keep_means else None
    return Scored(logp, torch.ones_like(logp, dtype=torch.bool), means, std)


def replay(policy, conditioning, exploration: Exploration, part: Part) -> Iterator[tuple[int, Scored]]:
    """Score the part's recorded transitions again under the policy's present weights, one step at a time.

    Yields (k, Scored [b,1]) for the K recorded steps; with gradients where they are enabled. `conditioning` has the
    part's rows.
    """
    from flowgrpo.gaussian import log_prob

    for k, (step, x, x_next) in enumerate(part.taken.pairs()):
        transition = exploration.kernel(x, policy.replay(conditioning, x, exploration.grid, step), exploration.grid, step)
        logp = log_prob(transition, x_next)[:, None]
        means = transition.mean[:, None] if exploration.keep_means else None
        yield k, Scored(logp, torch.ones_like(logp, dtype=torch.bool), means, transition.std.reshape(1))


def column(scored: Scored, k: int) -> Scored:
    """The scores of one recorded step, [b,1]."""
    one = slice(k, k + 1)
    return Scored(scored.logp[:, one], scored.mask[:, one], None if scored.mean is None else scored.mean[:, one],
                  None if scored.std is None else scored.std[..., one])


def seeder(run_seed: int, epoch: int) -> Callable[[int, int], int]:
    """seed(prompt, sample) from (run seed, epoch, prompt, sample), whatever the process or the micro-batch."""
    return lambda prompt, sample: int(
        np.random.SeedSequence((run_seed, epoch, prompt, sample + 1)).generate_state(1, np.uint64)[0] >> 1)


def make_grid(kind: str, steps: int, shift: float, scheduler) -> torch.Tensor:
    """Sigmas [steps+1]: `shifted` or the pipeline's `stock` ones."""
    return grids.shifted(steps, shift) if kind == "shifted" else grids.stock(scheduler, steps)
