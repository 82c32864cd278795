"""Rollout and replay: trees of states grow, are recorded, and are scored again under the present weights.

A prompt's group grows from `roots` initial noises. At the splits of a schedule every state has several children: draws
from one Gaussian, for one evaluation of the denoiser. A rollout with a shared initial noise is a tree that splits once,
at the first stochastic step; independent samples are separate roots. All nodes of a step go through the denoiser
together, in micro-batches. A replay evaluates a state once for all transitions that leave it. The trained steps are
recorded; a state that two steps share is stored once.

Beside a rollout's, samples without further noise start from its initial noises: of the base model, for rewards that
compare with them, and of the present one, as a baseline.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Generic

import torch

from flowgrpo import gaussian
from flowgrpo.config.geometry import BatchShape, prompts_per_part
from flowgrpo.device import put_away, to_device, wait_for_copies
from flowgrpo.samplers.rollout import C, Denoiser, Part, Replayer, RolloutSpec, Seed
from flowgrpo.samplers.scheduler import Segment, StepRecord, cat_known, noise_like
from flowgrpo.types import Gaussian, Scored, Transitions, unwrap

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
            together: Sequence[int] = (), grower: "Callable[..., Grower[C]] | None" = None) -> Iterator[Part]:
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
        below = exploration.group // exploration.roots  # leaves of a node
        for step, children in exploration.splits.items():
            nodes, below = self._advance(nodes, at, step), below // children
            nodes = self._draw(nodes, step, children, self._generators([
                (int(prompt), (row * children + child) * below % exploration.group)
                for row, prompt in enumerate(nodes.prompts) for child in range(children)]))
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
        """Nodes that the samples of the prompts begin from, and their step: the first split or noise.

        Explorations of the same prompts continue from each other's prefixes.
        """
        trunk = self.exploration.trunk
        if self.exploration.alone:
            return self._roots(prompts), trunk
        if trunk not in trunks:
            at = max((step for step in trunks if step <= trunk), default=None)
            nodes = self._roots(prompts) if at is None else trunks[at]
            trunks[trunk] = self._advance(nodes, at or 0, trunk)
        return trunks[trunk], trunk

    def _seeds(self, prompts: torch.Tensor) -> list[int]:
        """Seeds of the roots' initial noises: those of the leaves, or of noises that leaves share."""
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
        """Generators of (prompt, leaf), each passed down by the first leaf below a node: no noise is drawn twice."""
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
        """Model's output [b,*D] at states of the prompts [b], without a graph."""
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
        """States [b,*D] of micro-batches as one tensor [n,*D], the last result if it has the same states.

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
        """State on the device of recorded states; the last stored one is not copied again."""
        if self._stored is None or self._stored[0] is not state:
            self._stored = state, state if state.device == self.states else put_away(state, self.states)
        return self._stored[1]


def cat(values: Sequence[torch.Tensor]) -> torch.Tensor:
    """Concatenate values [n,...] along rows; a single one is not copied."""
    return values[0] if len(values) == 1 else torch.cat(list(values))


def sampler_steps(part: Part) -> list[Transitions]:
    """Recorded steps of a part whose samples are no texts."""
    steps = [taken for taken in part.transitions if isinstance(taken, Transitions)]
    assert len(steps) == len(part.transitions), "completions have no steps of a sampler"
    return steps


def replay(policy: Replayer[C], conditioning: C, part: Part, micro_batch: int, pack: bool = False
           ) -> Iterator[tuple[int, slice, Scored]]:
    """Score a part's recorded transitions under the policy's present weights, one batch of one step at a time.

    Yields (k, rows, new): new is Scored [b,1] of the transitions `rows` of the k-th recorded step. Scores have
    gradients where they are enabled. A state is evaluated once for all transitions that leave it.

    pack: denoise states of several steps together where that saves calls; the policy must accept a vector of timesteps.
    The gradient of a packed batch reaches the weights once, when its last scores are consumed. So call `backward` on
    each yielded score before asking for the next, and exhaust the iterator.
    """
    for batch in _batches([len(taken.x) for taken in sampler_steps(part)], micro_batch, pack):
        x, v = _evaluate(policy, conditioning, part, batch)
        # Scores of several steps share one graph of the denoiser, and a graph allows one backward: their gradients are
        # accumulated at its output first.
        gathered = v.detach().requires_grad_() if len(batch) > 1 and v.requires_grad else v
        sizes = [len(states) for _, states in batch]
        for (k, states), *pair in zip(batch, x.split(sizes), gathered.split(sizes), strict=True):
            yield k, *_score(part, sampler_steps(part)[k], states, *pair)
        if gathered is not v and gathered.grad is not None:
            v.backward(gathered.grad)


def calls(part: Part) -> list[tuple[int, int, int]]:
    """(step, number of states, number of transitions) of every recorded step; they set the calls of a replay."""
    return [(taken.step, len(taken.x), len(taken.parent)) for taken in sampler_steps(part)]


def _batches(sizes: list[int], micro_batch: int, pack: bool) -> list[list[tuple[int, range]]]:
    """Batches of the denoiser as lists of (recorded step, its states).

    A batch holds one step, or several where that saves calls. sizes: the number of states of every recorded step.
    """
    if not pack or sum(-(-size // micro_batch) for size in sizes) == -(-sum(sizes) // micro_batch):
        return [[(k, range(size)[at:at + micro_batch])] for k, size in enumerate(sizes)
                for at in range(0, size, micro_batch)]
    every = [(k, state) for k, size in enumerate(sizes) for state in range(size)]
    batches = [every[at:at + micro_batch] for at in range(0, len(every), micro_batch)]
    steps = [[list(of) for _, of in itertools.groupby(batch, key=lambda state: state[0])] for batch in batches]
    return [[(of[0][0], range(of[0][1], of[-1][1] + 1)) for of in batch] for batch in steps]


def _evaluate(policy: Replayer[C], conditioning: C, part: Part, batch: list[tuple[int, range]]
               ) -> tuple[torch.Tensor, torch.Tensor]:
    """States [b,*D] of a batch and the model's output [b,*D]."""
    exploration, steps = part.exploration, sampler_steps(part)
    assert exploration is not None
    taken = [(steps[k], states) for k, states in batch]
    before = [left.x[states.start:states.stop] for left, states in taken]
    x = to_device(before[0] if len(before) == 1 else torch.cat(before), policy.device)
    prompts = torch.cat([left.prompts[states.start:states.stop] for left, states in taken])
    step = taken[0][0].step if len(taken) == 1 else torch.tensor([left.step for left, states in taken for _ in states])
    return x, policy.replay(conditioning.rows(prompts), x, exploration.grid, step, exploration.timesteps)


def _score(part: Part, taken: Transitions, states: range, x: torch.Tensor, v: torch.Tensor) -> tuple[slice, Scored]:
    """Transitions that leave `states` of one step, and their score.

    x: the states [b,*D]; v: the model output [b,*D].
    """
    exploration, device = part.exploration, x.device
    assert exploration is not None
    low, high = torch.searchsorted(taken.parent, torch.tensor([states.start, states.stop])).tolist()
    of = to_device(taken.parent[low:high] - states.start, device)
    x_next = to_device(taken.x_next[low:high], device)
    transition = exploration.transition(x, v, exploration.grid, taken.step).rows(of)
    means = exploration.score_means or exploration.keep_means
    slope = exploration.slope(taken.step) if means else None
    return slice(low, high), score(transition, x_next, means, slope)


def rescore(part: Part, replayed: Iterator[tuple[int, slice, Scored]]) -> Part:
    """Part with its old scores replaced by those of its replay, in the replay's grad mode.

    The new scores are stored on the device of the old ones.
    """
    scores: list[list[Scored]] = [[] for _ in part.transitions]
    for k, _, new in replayed:
        # Detach one by one: never hold two graphs.
        old = part.transitions[k].old
        mean = None if old.mean is None else unwrap(new.mean).detach().to(old.mean.device)
        entropy = None if new.entropy is None else new.entropy.detach()
        scores[k].append(Scored(new.logp.detach(), new.mask, mean, None if mean is None else new.std, entropy=entropy))
    transitions = []
    for taken, of in zip(part.transitions, scores):
        mean, entropy = (None if values[0] is None else torch.cat(values)
                         for values in zip(*((new.mean, new.entropy) for new in of)))
        old = Scored(torch.cat([new.logp for new in of]), torch.cat([new.mask for new in of]), mean, of[0].std,
                     entropy=entropy, guided=taken.old.guided)
        transitions.append(replace(taken, old=old))
    return replace(part, transitions=tuple(transitions))


def score(transition: Gaussian, x_next: torch.Tensor, means: bool, slope: torch.Tensor | None = None) -> Scored:
    """Log-density of the next states x_next [b,*D] under the transition, as Scored [b,1]."""
    logp = gaussian.log_prob(transition, x_next)[:, None]
    kept = (transition.mean[:, None], transition.std.reshape(1), slope) if means else (None, None)
    return Scored(logp, torch.ones_like(logp, dtype=torch.bool), *kept)


def single_score(logp: torch.Tensor, mean: torch.Tensor | None = None) -> Scored:
    """Score [b,1] of one decision per row, from log-densities or rewards [b], and means [b,*D]."""
    mask = torch.ones_like(logp[:, None], dtype=torch.bool)
    return Scored(logp[:, None], mask, None if mean is None else mean[:, None])


class BaseImages(Generic[C]):
    """Base model's samples [b,...] of a part's seeds, on the CPU; called with the part and its prompts' conditioning.

    They use the rollout's sigma grid [T+1] (and timesteps [T]) and no noise but the first. Samples that share an
    initial noise, in this part or the previous one, are drawn once.
    decode: a function of finals and their conditioning.
    """

    def __init__(self, policy: Denoiser[C], grid: torch.Tensor, timesteps: torch.Tensor | None, shape: BatchShape,
                 decode: Callable[[torch.Tensor, C], torch.Tensor]):
        self.policy = policy
        self.shape = shape
        self.decode = decode
        self.task = Segment(grid, range(len(grid) - 1), timesteps=timesteps)
        self.known: dict[int, torch.Tensor] = {}

    def __call__(self, part: Part, conditioning: C) -> torch.Tensor:
        prompts = dict(zip(part.seeds.tolist(), part.prompts.tolist()))
        missing = [seed for seed in prompts if seed not in self.known]
        with self.policy.reference():
            for start in range(0, len(missing), self.shape.micro_batch):
                seeds = missing[start:start + self.shape.micro_batch]
                rows = conditioning.rows(torch.tensor([prompts[seed] for seed in seeds]))
                finals, _ = self.policy.run(self.task, rows, None, self.policy.generators(seeds))
                self.known |= zip(seeds, self.decode(finals, rows))
        self.known = {seed: self.known[seed] for seed in prompts}
        return torch.stack([self.known[seed] for seed in part.seeds.tolist()])


@torch.no_grad()
def deterministic(policy: Denoiser[C], conditioning: C, part: Part, micro_batch: int
                  ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Sample the present policy from a part's initial noises by the ODE: final states [u,*D] of the u different ones.

    Returns (the states, the prompt of each, int64 [u], the state that each leaf is compared with, int64 [b]).
    """
    spec = unwrap(part.exploration)
    seeds, at = unwrap(part.seeds).unique(return_inverse=True)
    prompts = torch.empty_like(seeds).scatter(0, at, part.prompts)
    task = Segment(spec.grid, range(spec.steps), solver=spec.solver, timesteps=spec.timesteps)
    finals = [policy.run(task, conditioning.rows(prompts[rows]), None, policy.generators(seeds[rows].tolist()))[0]
              for rows in torch.arange(len(seeds)).split(micro_batch)]
    return torch.cat(finals), prompts, at
