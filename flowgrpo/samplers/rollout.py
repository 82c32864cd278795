"""Records of a rollout: its specification, and groups with their recorded transitions; what samplers read of a
pipeline, as protocols of policies and encoded prompts.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from torch import Generator, Tensor

from flowgrpo.samplers import grids
from flowgrpo.samplers.kernels import Kernel, LearnedNoise, Noisy, predict_x0, scale_noise, x0_from_noise
from flowgrpo.samplers.plans import Schedule
from flowgrpo.samplers.scheduler import Segment, StepRecord
from flowgrpo.types import Completions, Gaussian, Scored, Transitions, unwrap

Seed = Callable[[int, int], int]


def noise_seed(seed: int, epoch: int | None, prompt: str, number: int) -> int:
    """Seed of a prompt's noise of that number. epoch: None for noise that is the same in every epoch."""
    digest = hashlib.sha256(f"{seed}/{epoch}/{number}/{prompt}".encode("utf-8", "surrogatepass")).digest()
    return int.from_bytes(digest[:6], "big")


@dataclass(frozen=True)
class RolloutSpec:
    """Sampling of one group: grid, schedule, kernel and solver.

    grid: [T+1], sigmas, or alpha-bars of a variance-preserving process.
    schedule: the stochastic, trained and split steps.
    group: samples per prompt, G.
    roots: initial noises per prompt, from 1 (shared) to G (one per sample).
    strides: granularities of the grid after the last noise (G2RPO): with (1, 2) every leaf is finished twice, once on
        the whole grid and once on every second sigma.
    score_means: the loss reads means and deviations: those of the present policy and of the reference.
    keep_means: it reads those of the old policy too, which are recorded.
    timesteps: [T], of a variance-preserving process only.
    shared: the initial noises are those of other processes too, which sample the rest of the group.
    keep_clean: the clean data predicted at trained steps is recorded.

    Raises ValueError if roots and splits do not make the group, or a stride is below 1.
    """
    grid: torch.Tensor
    schedule: Schedule
    kernel: Kernel
    solver: Callable
    group: int
    roots: int = 1
    strides: tuple[int, ...] = (1,)
    score_means: bool = False
    keep_means: bool = False
    timesteps: torch.Tensor | None = None
    shared: bool = False
    keep_clean: bool = False

    def __post_init__(self) -> None:
        assert self.timesteps is None or len(self.timesteps) == self.steps, (len(self.timesteps), self.steps)
        if self.roots < 1:
            raise ValueError(f"roots is {self.roots}, expected 1 to the group of {self.group}")
        if not self.strides or min(self.strides) < 1:
            raise ValueError(f"strides are {list(self.strides)}, expected at least one, each 1 or more")
        leaves = self.roots * math.prod(self.splits.values())
        if leaves != self.group:
            raise ValueError(f"{self.roots} initial noises and splits into {list(self.splits.values()) or 1} make "
                             f"{leaves} samples per prompt, expected the group of {self.group}")

    @functools.cached_property
    def steps(self) -> int:
        return len(self.grid) - 1

    @functools.cached_property
    def splits(self) -> dict[int, int]:
        """Children per state of each step at which the tree splits. If the schedule names none, the first stochastic
        step splits every root into the samples that share it."""
        schedule = self.schedule
        if schedule.children:
            return {step: n for step, n in zip(schedule.stochastic, schedule.children) if n > 1}
        return {step: self.group // self.roots for step in schedule.stochastic[:self.roots < self.group or self.shared]}

    @property
    def split_widths(self) -> tuple[int, ...]:
        """Children per state of the splits that the schedule lists, in order."""
        return tuple(n for n in self.schedule.children if n > 1)

    @functools.cached_property
    def alone(self) -> bool:
        """True if every sample has a separate initial noise."""
        return self.roots == self.group and not self.shared

    @functools.cached_property
    def trunk(self) -> int:
        """Number of steps before all splits and noise, the same for every schedule of a prompt."""
        return min((next(iter(self.splits), 0), *self.schedule.stochastic[:1]))

    @functools.cached_property
    def deterministic_from(self) -> int:
        """First step behind all noise and splits; from here on the granularities differ."""
        return max(self.schedule.stochastic, default=-1) + 1

    def transition(self, x: torch.Tensor, v: torch.Tensor, grid: torch.Tensor, i: int) -> Gaussian:
        """Kernel's transition, with the schedule's factor on the noise of step i."""
        noise = dict(zip(self.schedule.stochastic, self.schedule.noise)).get(i, 1.0)
        return (self.kernel if noise == 1 else scale_noise(self.kernel, noise))(x, v, grid, i)

    def slope(self, step: int) -> torch.Tensor:
        """Derivative [1] of the transition's mean by the model's output; the mean is affine in it."""
        return self.transition(self.grid.new_zeros(1, 1), self.grid.new_ones(1, 1), self.grid, step).mean[0]

    def predict_x0(self, x: torch.Tensor, mean: torch.Tensor, step: int) -> torch.Tensor:
        """Clean data predicted at states x [n,*D], from the mean [n,*D] of a transition that leaves each."""
        rest = self.transition(x, torch.zeros_like(x), self.grid, step).mean
        v = (mean - rest) / self.slope(step).to(mean)
        return (predict_x0 if self.timesteps is None else x0_from_noise)(x, v, self.grid[step])

    def task(self, start: int, stop: int, generators: list[torch.Generator] | None = None) -> Segment:
        return Segment(self.grid, range(start, stop), self.transition, self.solver, frozenset(self.schedule.stochastic),
                       frozenset(self.schedule.trained), generators, timesteps=self.timesteps)

    def tails(self) -> list[RolloutSpec]:
        """One exploration per stride; they differ behind the last noise."""
        return [self if stride == 1 else replace(self, grid=grids.thin_grid(self.grid, self.deterministic_from, stride))
                for stride in self.strides]


LEAST = 0.02  # deviation of a step that is trained


def deviation(spec: RolloutSpec, step: int) -> float:
    """Deviation of the whole step of a rollout, in units of the latent; of learned noise its lower bound."""
    if isinstance(spec.kernel, (LearnedNoise, Noisy)):
        return spec.kernel.low * (spec.grid[step] - spec.grid[step + 1]).abs().sqrt().item()
    zero = spec.grid.new_zeros(1, 1)
    return spec.transition(zero, zero, spec.grid, step).std.item()


def quiet_steps(spec: RolloutSpec) -> tuple[int, ...]:
    """Trained steps whose deviation is below `LEAST`: the gradient of a log-probability grows with 1 / std^2. On the
    own grid of SD3.5, which ends in a short step (0.278, 0.009, 0), the last trained step of a posterior kernel has
    nearly all of an epoch's squared gradient, and a half-precision state is rounded by a fifth of its deviation."""
    return tuple(step for step in spec.schedule.trained if deviation(spec, step) < LEAST)


def drop_quiet_steps(specs: Sequence[RolloutSpec]) -> list[RolloutSpec]:
    """Drop quiet steps, which are drawn as before, from the trained ones of an epoch's rollouts, and rollouts that
    train no other. Raises ValueError where no trained step is left."""
    found = [(spec, quiet_steps(spec)) for spec in specs]
    if not any(steps for _, steps in found):
        return list(specs)
    left = [replace(spec, schedule=replace(spec.schedule, trained=others)) for spec, steps in found
            if (others := tuple(step for step in spec.schedule.trained if step not in steps))]
    if not left:
        spec, steps = found[0]
        raise ValueError(f"the trained steps {list(steps)} of {spec.steps} have a std of at most "
                         f"{max(deviation(spec, step) for step in steps):.2g} under {spec.kernel}, expected {LEAST} or "
                         "more: use more noise, fewer steps, train.grid: shifted, or a plan that trains earlier ones")
    return left


@dataclass(frozen=True)
class Part:
    """Whole groups of a rollout, sampled together: N of the epoch's groups, b = N*G leaves.

    groups: their indices among the epoch's groups.
    prompts: int64 [b], the prompt of each leaf.
    transitions: of the trained steps, in grid order (of texts their Completions alone).
    finals: [b,*D] per granularity.
    advantages: [m] per trained step, or [m,N], of every decision, once they are known.
    rewards: [m] per trained step, the total reward of each transition's samples, once they are known.
    seeds: int64 [b], of the initial noise of each leaf (None: no initial noise).
    weights: of its steps in the loss, of a part of an earlier epoch (None: those of the present one).
    left_out: the prompt of each completion that the loss leaves out, by which a loss of rows divides too.
    measured: [b, ...] by name, what was measured of each leaf:
        penalty [b], subtracted from every reward of a leaf before rewards are compared;
        reference [b], log-probability under the reference, the mean over the recorded steps;
        predicted [b, K], rewards of the clean predictions before the K trained steps;
        baseline [b], reward of the deterministic sample from the leaf's initial noise.
    """

    groups: range
    prompts: torch.Tensor
    exploration: RolloutSpec | None
    transitions: tuple[Transitions | Completions, ...]
    finals: tuple[torch.Tensor, ...]
    advantages: tuple[torch.Tensor, ...] = ()
    seeds: torch.Tensor | None = None
    rewards: tuple[torch.Tensor, ...] = ()
    weights: dict[int, float] | None = None
    left_out: tuple[int, ...] = ()
    measured: dict[str, torch.Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for credit in filter(None, (self.advantages, self.rewards)):
            sizes = [(len(taken.parent), len(each)) for taken, each in zip(self.transitions, credit, strict=True)]
            assert all(one == other for one, other in sizes), f"transitions and credit of unequal length: {sizes}"
        for each in (*self.finals, self.seeds, *self.measured.values()):
            assert each is None or len(each) == len(self.prompts), (each.shape, self.prompts.shape)

    def with_measured(self, **values: torch.Tensor) -> Part:
        return replace(self, measured=self.measured | values)

    def shifted(self, groups: int, prompts: int) -> Part:
        """Part whose groups and prompts have so many others before them."""
        return replace(self, groups=range(self.groups.start + groups, self.groups.stop + groups),
                       prompts=self.prompts + prompts,
                       transitions=tuple(replace(taken, prompts=taken.prompts + prompts) for taken in self.transitions))

    def leaves(self) -> dict[str, torch.Tensor]:
        """Measures of each leaf by name, float64 [b, ...] on the CPU: `measured`, and of its decisions

            logp [b], log-probability under the policy that drew it, the mean over the recorded steps
            lengths [b], their number
            entropy [b], their mean entropy, if each step has one
            expert [b], 1 for an answer that came with its prompt, if the part records answers
        """
        found = {"logp": torch.stack(self._per_leaf(lambda old: _mean(old.logp, old.mask))).mean(0),
                 "lengths": torch.stack(self._per_leaf(lambda old: old.mask.sum(1))).sum(0)} | self.measured
        if all(taken.old.entropy is not None for taken in self.transitions):
            found["entropy"] = torch.stack(self._per_leaf(lambda old: _mean(unwrap(old.entropy), old.mask))).mean(0)
        expert = self.transitions[-1].expert  # of texts alone
        if expert is not None:
            found["expert"] = expert
        return {name: value.cpu().double() for name, value in found.items()}

    def advantage(self, k: int, rows: slice | torch.Tensor) -> torch.Tensor:
        """Advantage of rows of the k-th trained step: [b, 1], or one per decision, [b, N]."""
        advantage = self.advantages[k][rows]
        return advantage[:, None] if advantage.ndim == 1 else advantage

    def _per_leaf(self, value: Callable[[Scored], torch.Tensor]) -> list[torch.Tensor]:
        """Value [m] of each step's transitions, gathered by leaf: [b] each."""
        return [value(taken.old).repeat_interleave(len(self.prompts) // len(taken.parent))
                for taken in self.transitions]

    def with_advantages(self, advantages: Sequence[torch.Tensor], keep: Sequence[torch.Tensor],
                        rewards: Sequence[torch.Tensor] | None = None) -> Part | None:
        """Part with advantages [m] and total rewards [m], of each trained step, of the transitions that count and have
        `keep` true (bool [m]); None if nothing is kept."""
        totals = rewards or advantages
        keep = [at.cpu() & taken.counts for taken, at in zip(self.transitions, keep, strict=True)]
        kept = [(left, advantage[at], total[at])
                for taken, advantage, total, at in zip(self.transitions, advantages, totals, keep, strict=True)
                if (left := taken.select(at)) is not None]
        transitions, advantages, totals = zip(*kept) if kept else ((), (), ())
        return replace(self, transitions=transitions, advantages=advantages, rewards=totals) if kept else None


def leaves_of(parts: Sequence[Part]) -> dict[str, torch.Tensor]:
    """Join the `leaves` of parts, which all have the same names."""
    leaves = [part.leaves() for part in parts]
    return {name: torch.cat([each[name] for each in leaves]) for name in leaves[0]}


def _mean(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Means [m] of values [m, N] where the mask is true; 0 where it is nowhere."""
    return (values * mask).sum(1) / mask.sum(1).clamp(min=1)


def seeder(run_seed: int, epoch: int, first: int = 0, slices: int = 1, group: int = 0) -> Seed:
    """seed(prompt, sample), a function of (run seed, epoch, first + prompt, sample) alone, on any process. Sample -1 is
    the first noise that a prompt's samples share. first: place of this process's first prompt among all. slices: of
    each prompt's samples, `group` in each; places are then of slices, and samples are counted in them."""

    def seed(place: int, sample: int) -> int:
        prompt, number = divmod(first + place, slices)
        sample += number * group if sample >= 0 else 0
        return fork_seed(run_seed, epoch, prompt, sample + 1 if sample >= -1 else 2**32 + sample)

    return seed


def fork_seed(*key: int) -> int:
    """New seed, distinct for each key, such as a seed and a purpose: 1 for noised finals, 2 for edits, 3 for bases."""
    return int(np.random.SeedSequence(key).generate_state(1, np.uint64)[0]) >> 1


def generators(seeds: Iterable[int]) -> list[torch.Generator]:
    """One CPU generator per row, so that what is drawn does not depend on device, process or micro-batch."""
    return [torch.Generator().manual_seed(int(seed)) for seed in seeds]


class EncodedPrompts(Protocol):
    """Prompts as a pipeline reads them."""

    @property
    def prompts(self) -> Sequence[str]:
        """Texts, one per row."""

    def rows(self: E, index: Tensor) -> E:
        """Rows `index` (int64 [B]); a row may be taken several times."""


E = TypeVar("E", bound=EncodedPrompts)
C = TypeVar("C", bound=EncodedPrompts, contravariant=True)


class Replayer(Protocol[C]):
    """Model whose transitions can be scored again. device: of its forwards. states: of recorded states."""

    device: torch.device
    states: torch.device

    def replay(self, conditioning: C, x: Tensor, grid: Tensor, step: int | Tensor, timesteps: Tensor | None = None
               ) -> Tensor:
        """Model output [B,*D] at one step, or at a step per row, with gradients where enabled."""


class Denoiser(Replayer[C], Protocol[C]):
    """Policy that samples by segments of a noise grid."""

    def generators(self, seeds: Iterable[int]) -> list[Generator]:
        """Generator per seed, on the device on which noise is drawn."""

    def sampling(self) -> AbstractContextManager[Any]:
        """Grad mode of rollouts."""

    def reference(self, held: Sequence[dict[str, Tensor]] = ()) -> AbstractContextManager[None]:
        """Context in which forwards are those of snapshots, averaged, or of the base model without any."""

    def run(self, task: Segment, conditioning: C, latents: Tensor | None, generators: list[Generator],
            x0: Tensor | None = None) -> tuple[Tensor, StepRecord]:
        """Run a segment of the grid: the last state [B,*D] and the record of the task."""

    def unroll(self, task: Segment, conditioning: C, latents: Tensor, checkpointing: bool = False) -> Tensor:
        """Last state [B,*D] of a segment, in one graph of all its steps."""

    def image(self, latents: Tensor, conditioning: C) -> Tensor:
        """Decoded images [B,...] in [0, 1], with gradients where enabled."""
