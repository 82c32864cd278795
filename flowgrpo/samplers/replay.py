"""Replay: score the recorded transitions of a part under the policy's present weights."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

import torch

from flowgrpo import gaussian
from flowgrpo.device import to_device
from flowgrpo.samplers.rollout import C, Part, Replayer
from flowgrpo.types import Gaussian, Scored, Transitions, unwrap


def sampler_steps(part: Part) -> list[Transitions]:
    """Return the recorded steps of a part whose samples are no texts."""
    steps = []
    for taken in part.transitions:
        assert isinstance(taken, Transitions), "completions have no steps of a sampler"
        steps.append(taken)
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
    """Return what the calls of a part's replay go by: of every recorded step its place, states and transitions."""
    return [(taken.step, len(taken.x), len(taken.parent)) for taken in sampler_steps(part)]


def _batches(sizes: list[int], micro_batch: int, pack: bool) -> list[list[tuple[int, range]]]:
    """Return the batches of the denoiser as lists of (recorded step, its states).

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
    """Return the states [b,*D] of a batch and the model's output [b,*D]."""
    exploration = part.exploration
    steps = sampler_steps(part)
    assert exploration is not None
    taken = [(steps[k], states) for k, states in batch]
    before = [left.x[states.start:states.stop] for left, states in taken]
    x = to_device(before[0] if len(before) == 1 else torch.cat(before), policy.device)
    prompts = torch.cat([left.prompts[states.start:states.stop] for left, states in taken])
    step = taken[0][0].step if len(taken) == 1 else torch.tensor([left.step for left, states in taken for _ in states])
    return x, policy.replay(conditioning.rows(prompts), x, exploration.grid, step, exploration.timesteps)


def _score(part: Part, taken: Transitions, states: range, x: torch.Tensor, v: torch.Tensor) -> tuple[slice, Scored]:
    """Return the transitions that leave `states` of one step, and their score.

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
    """Return the part with its old scores replaced by those of its replay, in the replay's grad mode.

    The new scores are stored on the device of the old ones.
    """
    scores: list[list[Scored]] = [[] for _ in part.transitions]
    for k, _, new in replayed:
        # Detach one by one: never hold two graphs.
        old = part.transitions[k].old
        mean = None if old.mean is None else unwrap(new.mean).detach().to(old.mean.device)
        entropy = None if new.entropy is None else new.entropy.detach()
        scores[k].append(Scored(new.logp.detach(), new.mask, mean, None if mean is None else new.std, entropy=entropy))
    transitions = tuple(replace(taken, old=replace(_concatenate(of), guided=taken.old.guided))
                        for taken, of in zip(part.transitions, scores))
    return replace(part, transitions=transitions)


def score(transition: Gaussian, x_next: torch.Tensor, means: bool, slope: torch.Tensor | None = None) -> Scored:
    """Return the log-density of the next states x_next [b,*D] under the transition, as Scored [b,1]."""
    logp = gaussian.log_prob(transition, x_next)[:, None]
    kept = (transition.mean[:, None], transition.std.reshape(1), slope) if means else (None, None)
    return Scored(logp, torch.ones_like(logp, dtype=torch.bool), *kept)


def _concatenate(scores: list[Scored]) -> Scored:
    mean, entropy = (None if values[0] is None else torch.cat([unwrap(value) for value in values])
                     for values in ([old.mean for old in scores], [old.entropy for old in scores]))
    return Scored(torch.cat([old.logp for old in scores]), torch.cat([old.mask for old in scores]), mean,
                  scores[0].std, entropy=entropy)
