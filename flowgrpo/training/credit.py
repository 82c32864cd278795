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
from flowgrpo.objectives.supervised import LayerTuning
from flowgrpo.samplers.latent_edits import with_rewards
from flowgrpo.samplers.rollout import Part, leaves_of
from flowgrpo.training.epoch import Epoch
from flowgrpo.training.run import Run
from flowgrpo.types import (
    Completions,
    Context,
    PromptGroups,
    RegressionTarget,
    RewardColumns,
    RunState,
    SampleMeasures,
    Transitions,
)


def slices(values: Tensor, count: int) -> Tensor:
    """Return values [P,G,...] by the `count` S slices of each group: [P*S,G/S,...]."""
    return values if count == 1 else values.unflatten(1, (count, -1)).flatten(0, 1)


def compare(trainer: Run, epoch: Epoch) -> list[Part]:
    """Return this process's parts of an epoch with their advantages; of what is not trained nothing is left."""
    method, scoring, processes = trainer.method, trainer.scoring, trainer.processes
    prompts, scores = epoch.groups.prompts_and_scores()
    weights = list(scoring.weights.values()) * len(method.rollout.strides)
    context = context_of(trainer, epoch, [prompt.key for prompt in prompts])
    parts = list(credit(method, epoch.parts, scoring.transform(scores), weights, context,
                        lambda values: processes.own(slices(values, trainer.geometry.slices))))
    epoch.metrics |= {name: float(value) for name, value in context.run.metrics.items()}
    return [part for part in parts if part is not None]


def context_of(trainer: Run, epoch: Epoch, keys: list[str]) -> Context:
    """Return what credit reads besides rewards, of all processes in one order of prompts. keys: of all groups."""
    scoring, strides = trainer.scoring, len(trainer.method.rollout.strides)
    groups, samples = _groups(trainer, epoch, keys), _samples(trainer, epoch.parts)
    weights = scoring.weights
    rewards = RewardColumns(list(weights) * strides, list(weights.values()) * strides, scoring.paired * strides)
    return Context(RunState(trainer.epoch, trainer.config.train.epochs, trainer.memory), rewards, groups, samples)


def _groups(trainer: Run, epoch: Epoch, keys: list[str]) -> PromptGroups:
    shape, splits = trainer.geometry, trainer.rollouts.splits(trainer.epoch)
    of = shape.repeat_per_slice(keys)
    places = [int(place) for part in epoch.parts for place in part.prompts[::shape.group]]
    share = len(of) // trainer.processes.count
    prompts = [of[first + place] for first in range(0, len(of), share) for place in places][::shape.slices]
    metadata = {prompt.key: prompt.metadata for prompt in epoch.groups.prompts}
    return PromptGroups(prompts, [metadata.get(key, {}) for key in prompts], splits)


def _samples(trainer: Run, parts: list[Part]) -> SampleMeasures:
    needs, group = trainer.method.needs, trainer.config.train.group
    measured: dict[str, Tensor] = {}
    for name, value in trainer.processes.gather_named(leaves_of(parts)).items():
        measured[name] = value.unflatten(0, (-1, group)).float()
    return SampleMeasures(
        logp=measured["logp"],
        reference=measured["reference"] if "reference" in needs else None,
        likelihood=trainer.kl_reference.likelihood,
        lengths=measured["lengths"].long(),
        longest=sum(taken.old.logp.shape[1] for taken in parts[0].transitions),
        entropy=measured["entropy"] if "entropy" in needs else None,
        expert=measured["expert"].bool() if "expert" in measured else None,
        penalty=measured.get("penalty"),
        predicted=measured.get("predicted"),
        baseline=measured.get("baseline"))


def credit(method: Method, parts: list[Part], rewards: Tensor, weights: list[float], context: Context,
           local: Callable[[Tensor], Tensor]) -> Iterator[Part | None]:
    """Assign every transition its advantage; None for a part of which nothing is left to train.

    A transition has the mean reward of the samples below it, compared with those of its depth in the group. Transitions
    that the method does not train, and samples to which no reward applies, are left out. The samples' penalty is
    subtracted first.
    rewards: [P,G,R] of all processes, NaN where one does not apply.
    weights: of the R rewards.
    parts: those of this process; `local` selects its rows from those of all.
    """
    penalty = context.samples.penalty
    less = rewards if penalty is None else rewards - penalty[..., None].to(rewards)
    shaping, selection, spread = method.credit.shaping, method.credit.selection, method.credit.spread
    if hasattr(selection, "before"):  # others are compared without the samples that it leaves out
        less = less.masked_fill(~selection.before(less, weights, context)[..., None], torch.nan)
    shaped, totals = shaping(less, context) if shaping else less, local(weighted_sum(rewards, weights))
    weights = [1.0] if shaping and shaping.merges else weights
    advantage, leaves = method.credit.advantage(shaped, weights, context), ~less.isnan().all(2)
    leaves = selection(advantage, context) & leaves if selection else leaves
    # By the number of samples below a transition, and the place of its step where that has a bonus.
    advantage_of, kept_of = {(1, -1): local(advantage)}, {(1, -1): local(leaves)}
    bonuses = _bonuses(method, parts, rewards, context)
    for part in parts:
        at, advantages, kept, earned = slice(part.groups.start, part.groups.stop), [], [], []
        for place, taken in enumerate(part.transitions):
            width = len(part.prompts) // len(taken.parent)
            node = width, place if bonuses is not None else -1
            if node not in advantage_of:
                # Nodes above the leaves are compared without changing the memory of the leaves.
                advantage, values = _at_node(method, shaped, weights, context, width,
                                             None if bonuses is None else bonuses[..., place])
                advantage_of[node] = local(advantage)
                inner = leaves if width == 1 else of_nodes(selection, leaves, advantage, context.groups.splits)
                kept_of[node] = local(inner & ~values.isnan().all(2))
            alike = advantage_of[node][at].flatten()
            advantages.append(spread(cast(Completions, taken), alike, totals[at]) if spread else alike)
            kept.append(kept_of[node][at].flatten())
            earned.append(totals[at].flatten().view(-1, width).nanmean(1))
        if method.tuning.weight:
            part = towards_best(part, advantage_of[1, -1][at], method.tuning)
        if isinstance(method.target, LatentEdits):
            part = with_rewards(part, local(weighted_sum(shaped, weights))[at].flatten())
        yield part.with_advantages(advantages, kept, earned)


def _bonuses(method: Method, parts: list[Part], rewards: Tensor, context: Context) -> Tensor | None:
    """Return the bonus [P,G,K] of every trained step; None if the method gives none."""
    if method.credit.progress is None:
        return None
    assert len({len(part.transitions) for part in parts}) <= 1, "samples have different numbers of trained steps"
    return method.credit.progress.bonuses(rewards, context)


def _at_node(method: Method, shaped: Tensor, weights: list[float], context: Context, width: int, bonus: Tensor | None
             ) -> tuple[Tensor, Tensor]:
    """Return the advantages [P,G/width] of nodes above `width` leaves, and what they compare [P,G/width,R].

    bonus: [P,G] of the leaves at the nodes' step, one more reward.
    """
    context, progress = replace(context, run=copy.deepcopy(context.run)), method.credit.progress
    if bonus is not None and progress is not None:
        bonus = bonus.to(shaped).masked_fill(shaped.isnan().all(2), torch.nan)
        shaped = torch.cat([shaped, bonus[..., None]], 2)
        weights = [*(progress.outcome * weight for weight in weights), progress.weight]
        win_rates = context.rewards.win_rates and [*context.rewards.win_rates, False]
        context = replace(context, rewards=replace(context.rewards, weights=weights, win_rates=win_rates))
    values = below(shaped, width)
    return method.credit.advantage(values, weights, context), values


def towards_best(part: Part, advantages: Tensor, tuning: LayerTuning) -> Part:
    """Return the part with a goal for each of its transitions, from the best leaf of its group.

    The goal is the mean that the transition would have with the output v* of the policy on the path to the best leaf,
    and its weight by `tuning`. advantages: [N, G] of the leaves of the part's N groups. The part must have its means
    recorded.
    """
    return replace(part, transitions=tuple(_add_target(taken, part, advantages, tuning) for taken in part.transitions))


def _add_target(taken: Any, part: Part, advantages: Tensor, tuning: LayerTuning) -> Transitions:
    assert taken.old.mean is not None, "LayerTuning needs recorded means"
    exploration, groups, edges = part.exploration, len(advantages), len(taken.parent)
    width, best = len(part.prompts) // edges, advantages.argmax(1)
    weight = tuning.weights(advantages, edges // groups, len(taken.x) // groups)
    of_best = torch.arange(groups) * (edges // groups) + best.cpu() // width
    parent, group = taken.parent, torch.arange(edges) // (edges // groups)
    rest = exploration.transition(taken.x, torch.zeros_like(taken.x), exploration.grid, taken.step).mean
    device = rest.device
    drawn = taken.old.mean[of_best.to(device), 0] - rest[parent[of_best].to(device)]  # slope * v*
    mean = rest[parent.to(device)] + drawn[group.to(device)]
    return replace(taken, regression_target=RegressionTarget(mean[:, None], weight.cpu()[group, None].to(mean)))
