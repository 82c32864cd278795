"""Credit: rewards of samples to advantages of transitions."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor

from flowgrpo.advantages.group import below, weighted_sum
from flowgrpo.advantages.selection import of_nodes
from flowgrpo.methods.method import Method
from flowgrpo.methods.targets import LatentEdits
from flowgrpo.samplers.latent_edits import rewarded
from flowgrpo.samplers.rollout import Part
from flowgrpo.types import Completions, Context, RegressionTarget, Transitions


def credit(method: Method, parts: list[Part], rewards: Tensor, weights: list[float], context: Context,
           local: Callable[[Tensor], Tensor]) -> Iterator[Part | None]:
    """Assign every transition its advantage; None for a part of which nothing is left to train.

    A transition has the mean reward of the samples below it, compared with those of its depth in the group. Transitions
    that the method does not train, and samples to which no reward applies, are left out. The context's deductions are
    subtracted first.
    rewards: [P,G,R] of all processes, NaN where one does not apply.
    weights: of the R rewards.
    parts: those of this process; `local` selects its rows from those of all.
    """
    less = rewards if context.deducted is None else rewards - context.deducted[..., None].to(rewards)
    shaping, selection, spread = method.credit.shaping, method.credit.selection, method.credit.spread
    shaped, totals = shaping(less, context) if shaping else less, local(weighted_sum(rewards, weights))
    weights = [1.0] if shaping and shaping.merges else weights
    advantage, leaves = method.credit.advantage(shaped, weights, context), ~rewards.isnan().all(2)
    leaves = selection(advantage, context) & leaves if selection else leaves
    advantage_of, kept_of = {1: local(advantage)}, {1: local(leaves)}  # by the number of samples below a transition
    for part in parts:
        at, advantages, kept, earned = slice(part.groups.start, part.groups.stop), [], [], []
        for taken in part.transitions:
            width = len(part.prompts) // len(taken.parent)
            if width not in advantage_of:
                # Nodes above the leaves are compared without changing the memory of the leaves.
                values = below(shaped, width)
                advantage = method.credit.advantage(values, weights, copy.deepcopy(context))
                advantage_of[width] = local(advantage)
                kept_of[width] = local(of_nodes(selection, leaves, advantage) & ~values.isnan().all(2))
            alike = advantage_of[width][at].flatten()
            advantages.append(spread(cast(Completions, taken), alike, totals[at]) if spread else alike)
            kept.append(kept_of[width][at].flatten())
            earned.append(totals[at].flatten().view(-1, width).nanmean(1))
        if method.tuning.weight:
            part = towards_best(part, advantage_of[1][at])
        if isinstance(method.target, LatentEdits):
            part = rewarded(part, local(weighted_sum(shaped, weights))[at].flatten())
        yield part.credited(advantages, kept, earned)


def towards_best(part: Part, advantages: Tensor) -> Part:
    """Return the part with a goal for each of its transitions, from the best leaf of its group.

    The goal is the mean that the transition would have with the output v* of the policy on the path to the best leaf,
    and that leaf's advantage. advantages: [N, G] of the leaves of the part's N groups. The part must have its means
    recorded.
    """
    weight, best = advantages.max(dim=1)
    weight = weight.clamp(min=0)
    return replace(part, transitions=tuple(_aimed(taken, part, weight, best) for taken in part.transitions))


def _aimed(taken: Any, part: Part, weight: Tensor, best: Tensor) -> Transitions:
    assert taken.old.mean is not None, "LayerTuning needs recorded means"
    exploration, groups, edges = part.exploration, len(best), len(taken.parent)
    width = len(part.prompts) // edges
    of_best = torch.arange(groups) * (edges // groups) + best.cpu() // width
    parent, group = taken.parent, torch.arange(edges) // (edges // groups)
    rest = exploration.transition(taken.x, torch.zeros_like(taken.x), exploration.grid, taken.step).mean
    device = rest.device
    drawn = taken.old.mean[of_best.to(device), 0] - rest[parent[of_best].to(device)]  # slope * v*
    mean = rest[parent.to(device)] + drawn[group.to(device)]
    return replace(taken, goal=RegressionTarget(mean[:, None], weight.cpu()[group, None].to(mean)))
