"""From rewards of pictures to advantages of transitions."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator

from torch import Tensor

from flowgrpo.advantages import below, weighted_sum
from flowgrpo.method import Method
from flowgrpo.parts.layer_tuning import towards_best
from flowgrpo.samplers.edits import rewarded
from flowgrpo.samplers.rollout import Part
from flowgrpo.selection import of_nodes
from flowgrpo.types import Context


def credit(method: Method, parts: list[Part], rewards: Tensor, weights: list[float], context: Context,
           own: Callable[[Tensor], Tensor]) -> Iterator[Part | None]:
    """Give every transition its advantage, that of the mean reward of the samples below it among its equals in the
    group, and leave out what the method does not train and samples to which no reward applies: None for a part of which
    nothing is left.

    What the context deducts is taken off first.

    rewards: [P,G,R] of all processes, NaN where one does not apply; weights: of the R rewards; parts: one's own, whose
    rows `own` takes out of what all have.
    """
    less = rewards if context.deducted is None else rewards - context.deducted[..., None].to(rewards)
    shaped, totals = method.shaping(less, context), own(weighted_sum(rewards, weights))
    weights = [1.0] if getattr(method.shaping, "merges", False) else weights
    advantage = method.advantage(shaped, weights, context)
    leaves = method.selection(advantage, context) & ~rewards.isnan().all(2)
    advantage_of, kept_of = {1: own(advantage)}, {1: own(leaves)}  # by the number of samples below a transition
    for part in parts:
        at, advantages, kept = slice(part.groups.start, part.groups.stop), [], []
        for taken in part.transitions:
            width = len(part.prompts) // len(taken.parent)
            if width not in advantage_of:
                # Nodes above the leaves are compared without leaving a trace in what is remembered of the leaves.
                values = below(shaped, width)
                advantage = method.advantage(values, weights, copy.deepcopy(context))
                advantage_of[width] = own(advantage)
                kept_of[width] = own(of_nodes(method.selection, leaves, advantage) & ~values.isnan().all(2))
            advantages.append(method.spread(taken, advantage_of[width][at].flatten(), totals[at]))
            kept.append(kept_of[width][at].flatten())
        if method.tuning.weight:
            part = towards_best(part, advantage_of[1][at])
        if method.edit:
            part = rewarded(part, own(weighted_sum(shaped, weights))[at].flatten())
        yield part.credited(advantages, kept)
