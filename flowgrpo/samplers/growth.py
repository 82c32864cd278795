"""Growth of a rollout's trees: every state is denoised once for all samples that share it.

A prompt's group grows from `roots` initial noises. At the splits of a schedule every state has several children: draws
from one Gaussian, for one evaluation of the denoiser. A rollout with a shared initial noise is a tree that splits once,
at the first stochastic step; independent samples are separate roots. All nodes of a step go through the denoiser
together, in micro-batches. A replay evaluates a state once for all transitions that leave it. The trained steps are
recorded; a state that two steps share is stored once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Generic

import torch

from flowgrpo import gaussian
from flowgrpo.config.geometry import prompts_per_part
from flowgrpo.device import put_away, to_device, wait_for_copies
from flowgrpo.samplers.rollout import C, Denoiser, Part, RolloutSpec, Seed
from flowgrpo.samplers.scheduler import StepRecord, cat_known, noise_like
from flowgrpo.types import Scored, Transitions

Predict = Callable[[torch.Tensor, torch.Tensor, int], torch.Tensor]


@dataclass(frozen=True)
class Nodes:
    """States of one step.

    x: [n,*D], or None before the first noise.
    prompts: [n].
    generators: one per state.
    x0: [n,*D], the last predicted data, for a multistep solver.
    """

    x: torch.Tensor | None
    prompts: torch.Tensor
    generators: list[torch.Generator]
    x0: torch.Tensor | None = None


def explore(policy: Denoiser[C], conditioning: C, explorations: Sequence[RolloutSpec], micro_batch: int, seed: Seed,
            together: Sequence[int] = (), grower: Callable[..., Grower[C]] | None = None) -> Iterator[Part]:
    """Sample each prompt of `conditioning` in each of the explorations; yield whole groups as soon as they are done.

    seed(prompt, sample) is the seed of a leaf; sample -1, -2, ... are the initial noises that leaves share.
    together: prompts per part; by default as many as a micro-batch holds. grower: of the samples of some prompts.
    """
    first = 0
    count = len(conditioning.prompts)
    for prompts in torch.arange(count).split([*together] or prompts_per_part(explorations[0].group, micro_batch)):
        trunks: dict[int, Nodes] = {}
        # A shared prefix continues from a shorter one, so the shortest comes first.
        for number, exploration in sorted(enumerate(explorations), key=lambda pair: pair[1].trunk):
            grown = (grower or Grower)(policy, conditioning, exploration, micro_batch, seed, number)
            yield grown.grow(range(first, first + len(prompts)), prompts, trunks)
            first += len(prompts)


class Grower(Generic[C]):
    """Tree grower for some prompts in one exploration."""

    def __init__(self, policy: Denoiser[C], conditioning: C, exploration: RolloutSpec, micro_batch: int, seed: Seed,
                 number: int):
        self.policy = policy
        self.conditioning = conditioning
        self.exploration = exploration
        self.micro_batch = micro_batch
        self.seed = seed
        self.offset = number * exploration.group
        self.of_leaf: dict[tuple[int, int], torch.Generator] = {}
        self.recorder = Recorder(policy.states, exploration.keep_means,
                                 exploration.predict_x0 if exploration.keep_clean else None)

    def grow(self, groups: range, prompts: torch.Tensor, trunks: dict[int, Nodes]) -> Part:
        exploration = self.exploration
        nodes, at = self._start(prompts, trunks)
        for step, children in exploration.splits.items():
            nodes = self._split(self._advance(nodes, at, step), step, children)
            at = step + 1
        if len(exploration.strides) > 1:  # noise behind the last split is drawn once for all granularities
            nodes = self._advance(nodes, at, exploration.deterministic_from)
            at = exploration.deterministic_from
        ends = (self._advance(nodes, at, tail.steps, tail).x for tail in exploration.tails())
        finals = tuple(end for end in ends if end is not None)
        transitions = tuple(self.recorder.taken[step] for step in exploration.schedule.trained)
        seeds = torch.tensor(self._seeds(prompts)).repeat_interleave(exploration.group // exploration.roots)
        if self.policy.states != self.policy.device:
            wait_for_copies(self.policy.device)
        return Part(groups, nodes.prompts, exploration, transitions, finals, seeds=seeds)

    def _start(self, prompts: torch.Tensor, trunks: dict[int, Nodes]) -> tuple[Nodes, int]:
        """Return the nodes that the samples of the prompts begin from, and their step."""
        return self._trunk(prompts, trunks), self.exploration.trunk

    def _trunk(self, prompts: torch.Tensor, trunks: dict[int, Nodes]) -> Nodes:
        """Return the roots of the prompts, run to the first split or noise.

        Explorations of the same prompts continue from each other's prefixes.
        """
        trunk = self.exploration.trunk
        if self.exploration.alone:
            return self._roots(prompts)
        if trunk not in trunks:
            at = max((step for step in trunks if step <= trunk), default=None)
            nodes = self._roots(prompts) if at is None else trunks[at]
            trunks[trunk] = self._advance(nodes, at or 0, trunk)
        return trunks[trunk]

    def _seeds(self, prompts: torch.Tensor) -> list[int]:
        """Return the seeds of the roots' initial noises: those of the leaves, or of noises that leaves share."""
        roots, alone = self.exploration.roots, self.exploration.alone
        return [self.seed(int(p), self.offset + root if alone else -1 - root) for p in prompts for root in range(roots)]

    def _roots(self, prompts: torch.Tensor) -> Nodes:
        roots, group = self.exploration.roots, self.exploration.group
        if self.exploration.alone:
            generators = self._generators([(int(p), leaf) for p in prompts for leaf in range(group)])
        else:
            generators = self.policy.generators(self._seeds(prompts))
        return Nodes(None, prompts.repeat_interleave(roots), generators)

    def _generators(self, leaves: list[tuple[int, int]]) -> list[torch.Generator]:
        """Return the generators of (prompt, leaf), each passed down by the first leaf below a node: no noise is drawn
        twice."""
        new = [key for key in leaves if key not in self.of_leaf]
        seeds = [self.seed(prompt, self.offset + leaf) for prompt, leaf in new]
        self.of_leaf |= dict(zip(new, self.policy.generators(seeds), strict=True))
        return [self.of_leaf[key] for key in leaves]

    def _advance(self, nodes: Nodes, start: int, stop: int, exploration: RolloutSpec | None = None) -> Nodes:
        """Run the nodes from step `start` to step `stop`, one child each."""
        if start == stop and nodes.x is not None:
            return nodes
        exploration = exploration or self.exploration
        states, records = [], []
        for rows in torch.arange(len(nodes.prompts)).split(self.micro_batch):
            generators = nodes.generators[rows[0]:rows[-1] + 1]
            task = exploration.task(start, stop, generators)
            x, x0 = (None if value is None else value[to_device(rows, value.device)] for value in (nodes.x, nodes.x0))
            state, record = self.policy.run(task, self.conditioning.rows(nodes.prompts[rows]), x, generators, x0)
            states.append(state)
            records.append(record)
        recorder = self.recorder
        for step in records[0].x:
            x = recorder.concatenate([record.x[step] for record in records], nodes.x if step == start else None)
            recorder.keep(step, nodes.prompts, torch.arange(len(nodes.prompts)), x,
                          recorder.concatenate([record.x_next[step] for record in records]), records)
        return replace(nodes, x=recorder.concatenate(states), x0=cat_known([record.x0 for record in records]))

    def _split(self, nodes: Nodes, step: int, children: int) -> Nodes:
        """Draw `children` transitions from each state, with one evaluation per state."""
        group = self.exploration.group
        width = math.prod(n for later, n in self.exploration.splits.items() if later > step)  # leaves below a child
        return self._draw(nodes, step, children, self._generators([
            (int(prompt), (row * children + child) * width % group)
            for row, prompt in enumerate(nodes.prompts) for child in range(children)]))

    def _draw(self, nodes: Nodes, step: int, children: int, generators: list[torch.Generator]) -> Nodes:
        """Draw `children` transitions from each of n states, whose noise is that of the generators, n * children."""
        assert nodes.x is not None, "a draw before the first noise"
        records = []
        at = nodes.x
        for rows in torch.arange(len(nodes.prompts)).split(self.micro_batch):
            x = at[to_device(rows, at.device)]
            v = self._evaluate(nodes.prompts[rows], x, step)
            with torch.no_grad():  # a kernel may be learned
                transition = self.exploration.transition(x, v, self.exploration.grid, step)
            of = torch.arange(len(rows), device=x.device).repeat_interleave(children)
            transition = transition.rows(of)
            own = generators[int(rows[0]) * children:(int(rows[-1]) + 1) * children]
            # Round first: the density is that of the state that the network will see.
            x_next = gaussian.sample(transition, noise_like(x[of], own)).to(x.dtype)
            task = self.exploration.task(step, step + 1)
            record = StepRecord(x0=task.predict_x0(x, v, step)[of] if task.multistep else None)
            record.add(step, x, x_next, transition)
            records.append(record)
        parent = torch.arange(len(nodes.prompts)).repeat_interleave(children)
        x_next = self.recorder.concatenate([record.x_next[step] for record in records])
        if step in self.exploration.schedule.trained:
            self.recorder.keep(step, nodes.prompts, parent, nodes.x, x_next, records)
        return Nodes(x_next, nodes.prompts[parent], generators, cat_known([record.x0 for record in records]))

    def _evaluate(self, prompts: torch.Tensor, x: torch.Tensor, step: int) -> torch.Tensor:
        """Return the model's output [b,*D] at states of the prompts [b], without a graph."""
        with self.policy.sampling():
            return self.policy.replay(self.conditioning.rows(prompts), x, self.exploration.grid, step,
                                      self.exploration.timesteps).detach()


class Recorder:
    """Recorded steps of one exploration, by step: `taken`.

    x_next of one step, x of the next and the final states are one tensor where they are the same states, also when a
    step has several micro-batches.

    states: the device of recorded states. means: the loss reads the means and deviations of the old policy.
    predict: return the clean data predicted at states x [n,*D] of a step, from the means of transitions that leave
        them; None: it is not recorded.
    """

    def __init__(self, states: torch.device, means: bool, predict: Predict | None = None):
        self.states = states
        self.means = means
        self.predict = predict
        self.taken: dict[int, Transitions] = {}
        self._joined: tuple[list[torch.Tensor], torch.Tensor] | None = None  # the last states, by micro-batch and whole
        self._stored: tuple[torch.Tensor, torch.Tensor] | None = None  # the last state, here and on its device

    def concatenate(self, states: list[torch.Tensor], before: torch.Tensor | None = None) -> torch.Tensor:
        """Return the states [b,*D] of micro-batches as one tensor [n,*D], the last result if it has the same states.

        before: [n,*D], returned in their place if equal.
        """
        if self._joined is not None and list(map(id, states)) == list(map(id, self._joined[0])):
            return self._joined[1]
        whole = cat(states)
        if before is not None and before.dtype == whole.dtype and torch.equal(before, whole):
            whole = before
        self._joined = states, whole
        return whole

    def keep(self, step: int, prompts: torch.Tensor, parent: torch.Tensor, x: torch.Tensor, x_next: torch.Tensor,
             records: list[StepRecord]) -> None:
        """Record a step from the states x [n,*D] to x_next [m,*D]. records: of its micro-batches."""
        before, after = self._put(x), self._put(x_next)
        logp = torch.cat([record.logp[step] for record in records])[:, None]
        means, std = None, None
        if self.means:
            means = torch.cat([record.transition[step].mean for record in records])[:, None]
            means = put_away(means, self.states)
            std = records[0].transition[step].std.reshape(1)
        score = Scored(logp, torch.ones_like(logp, dtype=torch.bool), means, std)
        clean = None
        if self.predict is not None:
            first = torch.searchsorted(parent, torch.arange(len(x)))  # one transition of each state
            drawn = torch.cat([record.transition[step].mean for record in records])
            clean = put_away(self.predict(x, drawn[first.to(drawn.device)], step), self.states)
        self.taken[step] = Transitions(step, before, prompts, parent, after, score, clean=clean)

    def _put(self, state: torch.Tensor) -> torch.Tensor:
        """Return the state on the device of recorded states; the last stored one is not copied again."""
        if self._stored is None or self._stored[0] is not state:
            self._stored = state, state if state.device == self.states else put_away(state, self.states)
        return self._stored[1]


def cat(values: Sequence[torch.Tensor]) -> torch.Tensor:
    """Concatenate values [n,...] along rows; a single one is not copied."""
    return values[0] if len(values) == 1 else torch.cat(list(values))
