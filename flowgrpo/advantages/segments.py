"""Segments and steps of a completion, and their values: pure functions on tokens [m, L]."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor

from flowgrpo.types import wide


def cut_points(logp: Tensor, mask: Tensor, below: float) -> Tensor:
    """Return the tokens drawn with a probability below `below`, where completions diverge: bool [m, L]."""
    return (logp.exp() < below) & mask


def segments_of(cuts: Tensor, interval: int) -> Tensor:
    """Return the segment of each token, int64 [m, L] from 0, of cut points bool [m, L].

    A segment begins with a cut point and holds `interval` of them, the last one fewer. Tokens before the first cut
    point belong to the first segment.
    """
    return (cuts.long().cumsum(1) - 1).clamp(min=0) // interval


def starts_of(segments: Tensor, mask: Tensor) -> list[tuple[int, int, int]]:
    """Return (row, segment, index of its first token) of all segments but the first of a row.

    segments: int64 [m, L]; mask: bool [m, L], true for drawn tokens.
    """
    new = (segments[:, 1:] > segments[:, :-1]) & mask[:, 1:]
    return [(row, int(segments[row, place + 1]), place + 1) for row, place in new.nonzero().tolist()]


def chain(values: Tensor, segments: Tensor, rewards: Tensor) -> Tensor:
    """Return the value that every token's segment added, [m, L]: that of the state behind it less that of the state
    before.

    values: [m, S], of the state before each segment, NaN beyond a row's last one.
    rewards: [m], the value behind the last segment.

    A row's segments add up to its reward less its first value.
    """
    behind = torch.cat([values[:, 1:], torch.full_like(values[:, :1], torch.nan)], 1)
    behind = torch.where(behind.isnan(), rewards[:, None].to(values), behind)
    return (behind - values).gather(1, segments.clamp(max=values.shape[1] - 1))


def steps_of(ids: Tensor, mask: Tensor, every: int, ends: Collection[int] = ()) -> Tensor:
    """Return the step of each token, int64 [m, L] from 0.

    A step is `every` tokens, or ends with a token of `ends` if any are given. Masked tokens belong to the last step
    before them.
    """
    if ends:
        ended = torch.isin(ids, torch.tensor(sorted(ends))) & mask
        steps = ended.long().cumsum(1) - ended.long()
    else:
        steps = (torch.arange(ids.shape[1]) // every).expand(ids.shape)
    return torch.where(mask, steps, steps.masked_fill(~mask, 0).amax(1, keepdim=True))


def anchors(ids: Tensor, steps: Tensor, mask: Tensor, groups: Tensor) -> Tensor:
    """Return the state before each step and behind the last one, int64 [m, T + 1]; -1 beyond a row's end.

    Two rows share a state if they have the same prompt (`groups`, int64 [m]) and the same tokens so far.
    """
    states = torch.full((len(ids), int(steps.max()) + 2), -1)
    numbers: dict[tuple, int] = {}
    for row, (tokens, step, kept, group) in enumerate(zip(ids, steps, mask, groups.tolist())):
        state: tuple = (group,)
        for number in step[kept].unique().tolist():
            states[row, number] = numbers.setdefault(state, len(numbers))
            state = (numbers[state], tuple(tokens[kept & (step == number)].tolist()))
        states[row, int(step.max()) + 1] = numbers.setdefault(state, len(numbers))
    return states


def step_advantages(states: Tensor, rewards: Tensor, gamma: float, divide: bool = True) -> Tensor:
    """Return GiGPO's step-relative advantages (2505.10978, equations 6 to 9): [m, T].

    states: int64 [m, T], the state before each step, -1 for none.
    rewards: [m], at the end.

    The return of a step is gamma to the power of the steps behind it times the reward. Its advantage is that less the
    mean return of all steps that left the same state, over their deviation (ddof 1, eps 1e-6) with `divide`. 0 for a
    state that was left once, and for equal returns.
    """
    (rewards,) = wide(rewards)
    there, flat = states >= 0, states.flatten()
    behind = there.sum(1, keepdim=True) - there.long().cumsum(1)
    returns = (gamma ** behind.to(rewards) * rewards[:, None]).flatten()
    known = (flat >= 0) & ~returns.isnan()
    at, kept = flat[known], returns[known]
    size = int(states.max()) + 1
    count = torch.zeros(size).to(kept).index_add(0, at, torch.ones_like(kept))
    mean = torch.zeros(size).to(kept).index_add(0, at, kept) / count.clamp(min=1)
    centred = kept - mean[at]
    spread = (torch.zeros(size).to(kept).index_add(0, at, centred.square()) / (count - 1).clamp(min=1)).sqrt()
    noise = spread <= 1e-6 * torch.zeros(size).to(kept).index_add(0, at, kept.abs()) / count.clamp(min=1)
    relative = centred / (spread + 1e-6)[at] if divide else centred
    return torch.zeros_like(returns).masked_scatter(known, relative.masked_fill(noise[at], 0)).view(states.shape)


def shared_values(states: Tensor, rewards: Tensor) -> tuple[Tensor, Tensor]:
    """Return the value of each state to the samples that pass through it, and their number: both [m, T].

    states: int64 [m, T], equal where samples share one, -1 for none.
    rewards: [m], NaN for none.

    The value of a state is the mean reward of its samples: in a tree, of the leaves below (SPO-tree, 2505.23564).
    """
    (rewards,) = wide(rewards)
    known = (states >= 0) & ~rewards.isnan()[:, None]
    at, kept, size = states[known], rewards[:, None].expand(states.shape)[known], int(states.max()) + 1
    count = torch.zeros(size).to(kept).index_add(0, at, torch.ones_like(kept))
    mean = torch.zeros(size).to(kept).index_add(0, at, kept) / count.clamp(min=1)
    missing = torch.full(states.shape, torch.nan, dtype=rewards.dtype)
    return missing.masked_scatter(known, mean[at]), torch.zeros_like(missing).masked_scatter(known, count[at])


def merged(ids: Tensor, steps: Tensor, mask: Tensor, groups: Tensor, advantages: Tensor, history: int) -> Tensor:
    """Return the mean advantage of all rows that take the same step, of each token: [m, L].

    steps: int64 [m, L], of each token; groups: int64 [m]; advantages: [m].

    Steps are the same if their groups, their tokens and those of the `history` steps before are equal; -1: of all steps
    before. A row that takes a step twice counts twice.
    """
    edges: dict[tuple, list[tuple[int, Tensor]]] = {}
    for row, (tokens, step, kept, group) in enumerate(zip(ids, steps, mask, groups.tolist())):
        path: list[tuple[int, ...]] = []
        for number in step[kept].unique().tolist():
            at = kept & (step == number)
            path.append(tuple(tokens[at].tolist()))
            known = path if history < 0 else path[-history - 1:]
            edges.setdefault((group, len(path) <= history, *known), []).append((row, at))
    result = torch.zeros(ids.shape).to(advantages)
    for taken in edges.values():
        mean = torch.stack([advantages[row] for row, _ in taken]).mean()
        for row, at in taken:
            result[row] = torch.where(at.to(result.device), mean, result[row])
    return result
