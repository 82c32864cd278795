"""Exploration: groups of samples, in which whatever is shared is denoised once.

With a shared initial noise a prompt's rows are one row until they part, at the first stochastic step. That trunk runs
once per prompt, the model's output at the parting step included: its G transitions are draws from one Gaussian. From
there each row runs on its own, in micro-batches; each is handed on as soon as it is done, so that it can be decoded and
scored while the next one samples. The replay of the parting step is one row per prompt as well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import torch
from diffusers.utils.torch_utils import randn_tensor

from flowgrpo import gaussian
from flowgrpo.errors import UserError
from flowgrpo.samplers import grids
from flowgrpo.samplers.kernels import predict_x0
from flowgrpo.samplers.plans import Schedule
from flowgrpo.samplers.scheduler import Record, Task
from flowgrpo.types import Gaussian, Scored, Segment, Trajectory


@dataclass(frozen=True)
class Exploration:
    """How one epoch samples: sigmas [T+1], which steps are stochastic and trained, the kernel and the solver.

    shared_noise: a prompt's rows start from one noise; keep_means: the loss reads means and deviations.
    """

    grid: torch.Tensor
    schedule: Schedule
    kernel: Callable
    solver: Callable
    shared_noise: bool = False
    keep_means: bool = False

    @property
    def parting(self) -> int | None:
        """The step at which the rows of a prompt part; None where they never were one."""
        return self.schedule.stochastic[0] if self.shared_noise else None

    def task(self, start: int, stop: int, noise=None) -> Task:
        return Task(self.grid, range(start, stop), self.kernel, self.solver, frozenset(self.schedule.stochastic),
                    frozenset(self.schedule.trained), noise)


@dataclass(frozen=True)
class Part:
    """One micro-batch of a rollout: its rows among the epoch's B, their prompts, what was drawn, how probable it was.

    rows, prompts: int64 [b]; taken: a Trajectory whose `final` is [b,*D]; old: Scored [b,K].
    """

    rows: torch.Tensor
    prompts: torch.Tensor
    taken: Trajectory
    old: Scored

    def kept(self, keep: torch.Tensor) -> Part | None:
        """The rows where `keep` (bool [b]) is true; None where there are none."""
        if keep.all():
            return self
        if not keep.any():
            return None
        at = keep.to(self.taken.final.device)
        taken = Trajectory(tuple(Segment(s.states[at], s.steps) for s in self.taken.segments), self.taken.final[at])
        means = None if self.old.mean is None else self.old.mean[at]
        return Part(self.rows[keep], self.prompts[keep], taken,
                    Scored(self.old.logp[at], self.old.mask[at], means, self.old.std))


def explore(policy, conditioning, exploration: Exploration, group: int, micro_batch: int,
            seed: Callable[[int, int], int]) -> Iterator[Part]:
    """Sample `group` pictures for each of the P prompts of `conditioning`; yields the parts of B = P * group rows.

    seed(prompt, sample) gives each row's own seed, and with sample = -1 that of a noise shared by the prompt's group.
    """
    trunk = _trunk(policy, conditioning, exploration, micro_batch, seed) if exploration.shared_noise else None
    for rows in torch.arange(len(conditioning.prompts) * group).split(micro_batch):
        prompts = rows // group
        generators = policy.generators(seed(int(p), int(row % group)) for p, row in zip(prompts, rows))
        x, record = None, Record()
        if trunk is not None:
            x, record = _part_ways(policy, conditioning, exploration, trunk, prompts, generators)
        start = 0 if trunk is None else exploration.parting + 1
        task = exploration.task(start, len(exploration.grid) - 1, lambda x, own=generators: _noise(x, own))
        final, rest = policy.run(task, conditioning.rows(prompts), x, generators, record.x0)
        yield Part(rows, prompts, *_recorded(record, rest, exploration, final))


def _trunk(policy, conditioning, exploration, micro_batch, seed) -> torch.Tensor:
    """States [P,*D] at the parting step, one per prompt."""
    states = []
    for prompts in torch.arange(len(conditioning.prompts)).split(micro_batch):
        generators = policy.generators(seed(int(p), -1) for p in prompts)
        task = exploration.task(0, exploration.parting)
        states.append(policy.run(task, conditioning.rows(prompts), None, generators)[0])
    return torch.cat(states)


def _part_ways(policy, conditioning, exploration, trunk, prompts, generators) -> tuple[torch.Tensor, Record]:
    """Draw each row's own transition out of its prompt's shared state; one evaluation per prompt, not per row."""
    step, grid = exploration.parting, exploration.grid
    first, of = _shared(prompts)
    own, of = prompts[first], of.to(trunk.device)
    x = trunk[own.to(trunk.device)]
    with torch.no_grad():
        v = policy.replay(conditioning.rows(own), x, grid, step)
    transition = exploration.kernel(x, v, grid, step)
    transition = Gaussian(transition.mean[of], transition.std)
    # Rounded first: the density is that of the state which the network will see.
    x_next = gaussian.sample(transition, _noise(x[of], generators)).to(x.dtype)
    record = Record(x0=predict_x0(x, v, grid[step])[of])
    record.add(step, x[of], x_next, transition)
    return x_next, record


def replay(policy, conditioning, exploration: Exploration, part: Part) -> Iterator[tuple[int, Scored]]:
    """Score a part's recorded transitions under the policy's present weights, one step at a time.

    Yields (k, Scored [b,1]) for the K recorded steps, with gradients where they are enabled. `conditioning` has the
    part's rows. Where the rows of a prompt part, their shared state is evaluated once.
    """
    for k, (step, x, x_next) in enumerate(part.taken.pairs()):
        if step == exploration.parting:
            first, of = _shared(part.prompts)
            v = policy.replay(conditioning.rows(first), x[first.to(x.device)], exploration.grid, step)[of.to(x.device)]
        else:
            v = policy.replay(conditioning, x, exploration.grid, step)
        yield k, _score(exploration.kernel(x, v, exploration.grid, step), x_next, exploration.keep_means)


def _shared(prompts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The first row of each prompt [p], and for every row [b] the place of its prompt among them."""
    _, of, counts = prompts.unique_consecutive(return_inverse=True, return_counts=True)
    return counts.cumsum(0) - counts, of


def rescored(policy, conditioning, exploration: Exploration, part: Part) -> Part:
    """The part with its old scores computed by the replay, in the replay's own grad mode."""
    logp, means = [], []
    for _, new in replay(policy, conditioning, exploration, part):
        # Detached one by one: no two graphs are held at once.
        logp.append(new.logp.detach())
        means += [new.mean.detach()] if exploration.keep_means else []
    scored = Scored(torch.cat(logp, 1), part.old.mask, torch.cat(means, 1) if means else None, part.old.std)
    return Part(part.rows, part.prompts, part.taken, scored)


def _score(transition: Gaussian, x_next: torch.Tensor, keep_means: bool) -> Scored:
    logp = gaussian.log_prob(transition, x_next)[:, None]
    kept = (transition.mean[:, None], transition.std.reshape(1)) if keep_means else (None, None)
    return Scored(logp, torch.ones_like(logp, dtype=torch.bool), *kept)


def _noise(x: torch.Tensor, generators: list[torch.Generator]) -> torch.Tensor:
    return randn_tensor(x.shape, generator=generators, device=x.device, dtype=torch.float32)


def _recorded(first: Record, rest: Record, exploration: Exploration, final) -> tuple[Trajectory, Scored]:
    """The trained steps out of the records of a part's two calls."""
    trained = exploration.schedule.trained
    at = {step: first if step in first.x else rest for step in trained}
    segments = []
    for _, run in groupby(enumerate(trained), lambda pair: pair[1] - pair[0]):
        steps = tuple(step for _, step in run)
        states = [at[steps[0]].x[steps[0]], *(at[step].x_next[step] for step in steps)]
        segments.append(Segment(torch.stack(states, 1), steps))
    logp = torch.stack([at[step].logp[step] for step in trained], 1)
    means = torch.stack([at[step].transition[step].mean for step in trained], 1) if exploration.keep_means else None
    std = torch.stack([at[step].transition[step].std for step in trained]) if exploration.keep_means else None
    return Trajectory(tuple(segments), final), Scored(logp, torch.ones_like(logp, dtype=torch.bool), means, std)


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
    """Sigmas [steps+1]: `shifted` or the pipeline's `stock` ones. UserError where the scheduler has none."""
    if kind == "shifted":
        return grids.shifted(steps, shift)
    try:
        return grids.stock(scheduler, steps)
    except ValueError as error:
        raise UserError(f"train.grid 'stock': {error} (train.grid: shifted asks nothing of the scheduler)") from None
