"""Credit: rewards of samples to advantages of transitions."""

import copy
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor

from flowgrpo.advantages.group import below, weighted_sum
from flowgrpo.advantages.selection import DropZeroVariance, of_nodes
from flowgrpo.advantages.shaping import penalised, shape
from flowgrpo.methods.method import Method
from flowgrpo.methods.targets import LatentEdits
from flowgrpo.objectives.supervised import LayerTuning
from flowgrpo.samplers.latent_edits import with_rewards
from flowgrpo.samplers.rollout import Part, leaves_of
from flowgrpo.training.epoch import Epoch
from flowgrpo.training.extension import Run
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
    """Values [P,G,...] by the `count` S slices of each group: [P*S,G/S,...]."""
    return values if count == 1 else values.unflatten(1, (count, -1)).flatten(0, 1)


def compare(trainer: Run, epoch: Epoch) -> list[Part]:
    """This process's parts of an epoch with their advantages; of what is not trained nothing is left but the
    number of completions that the loss leaves out: `Epoch.left_out`."""
    method, scoring, processes = trainer.method, trainer.scoring, trainer.processes
    prompts, scores = epoch.groups.prompts_and_scores()
    weights = list(scoring.weights.values()) * len(method.rollout.strides)
    context = context_of(trainer, epoch, [prompt.key for prompt in prompts])
    parts = list(credit(method, epoch.parts, scoring.transform(scores), weights, context,
                        lambda values: processes.own(slices(values, trainer.geometry.slices))))
    epoch.metrics |= {name: float(value) for name, value in context.run.metrics.items()}
    epoch.left_out = [part for part in parts if part is not None and not part.transitions]
    return [part for part in parts if part is not None and part.transitions]


def context_of(trainer: Run, epoch: Epoch, keys: list[str]) -> Context:
    """Inputs of credit besides rewards, of all processes in one order of prompts. keys: of all groups."""
    shape, needs, parts = trainer.geometry, trainer.method.needs, epoch.parts
    # Prompts of the groups, in the order in which the processes trained them.
    of = shape.repeat_per_slice(keys)
    places = [int(place) for part in parts for place in part.prompts[::shape.group]]
    share = len(of) // trainer.processes.count
    prompts = [of[first + place] for first in range(0, len(of), share) for place in places][::shape.slices]
    metadata = {prompt.key: prompt.metadata for prompt in epoch.groups.prompts}
    groups = PromptGroups(prompts, [metadata.get(key, {}) for key in prompts], trainer.rollouts.splits(trainer.epoch))
    # Measurements of their samples.
    measured = {name: value.unflatten(0, (-1, trainer.config.train.group)).float()
                for name, value in trainer.processes.gather_named(leaves_of(parts)).items()}
    samples = SampleMeasures(
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
    weights, strides = trainer.scoring.weights, len(trainer.method.rollout.strides)
    rewards = RewardColumns(list(weights) * strides, list(weights.values()) * strides, trainer.scoring.paired * strides)
    return Context(RunState(trainer.epoch, trainer.config.train.epochs, trainer.memory), rewards, groups, samples)


def credit(method: Method, parts: list[Part], rewards: Tensor, weights: list[float], context: Context,
           local: Callable[[Tensor], Tensor]) -> Iterator[Part | None]:
    """Assign every transition its advantage, float32: the mean reward of the samples below it is compared with those of
    its depth in the group. Transitions that the method does not train, and samples to which no reward applies, are left
    out; None for a part of which nothing is left, and no transitions where the loss leaves out all its completions.

    rewards: [P,G,R] of all processes, NaN where one does not apply, compared in float64, where squares and sums of all
        float32 numbers are finite. weights: of the R rewards.
    parts: those of this process; `local` selects its rows from those of all.
    """
    shaping, selection, spread = method.credit.shaping, method.credit.selection, method.credit.spread
    rewards = rewards.double()
    totals, compared = local(weighted_sum(rewards, weights)), rewards
    if before := getattr(selection, "before", None):  # others are compared without the samples that it leaves out
        kept_before = before(penalised(rewards, context), weights, context)
        compared = rewards.masked_fill(~kept_before[..., None], torch.nan)
    # Neither the advantage, nor the loss, nor a filter compares the samples of a group with each other.
    alone = method.credit.advantage.single and not (
        method.loss.surrogate.reads_labels or isinstance(selection, DropZeroVariance))
    shaped = shape(compared, weights, shaping, context, alone)
    weights = [1.0] if shaping and shaping.merges else weights
    advantage, leaves = method.credit.advantage(shaped, weights, context), ~compared.isnan().all(2)
    leaves = selection(advantage, context) & leaves if selection else leaves
    # Advantages and kept samples by node: the number of samples below a transition, and the place of its step where
    # that has a bonus.
    advantage_of, kept_of = {(1, -1): local(advantage)}, {(1, -1): local(leaves)}
    progress = method.credit.progress
    assert progress is None or len({len(part.transitions) for part in parts}) <= 1, \
        "samples have different numbers of trained steps"
    bonuses = None if progress is None else progress.bonuses(rewards, context)  # [P,G,K], of every trained step
    # Each transition of a part has the values of its node.
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
            advantages.append((spread(cast(Completions, taken), alike, totals[at]) if spread else alike).float())
            kept.append(kept_of[node][at].flatten())
            earned.append(totals[at].flatten().view(-1, width).nanmean(1).float())
        if method.tuning.weight:
            part = towards_best(part, advantage_of[1, -1][at].float(), method.tuning)
        if isinstance(method.target, LatentEdits):
            part = with_rewards(part, local(weighted_sum(shaped, weights).float())[at].flatten())
        part = replace(part, left_out=tuple(
            place for taken, at in zip(part.transitions, kept) if taken.left_out is not None
            for place in taken.prompts[at.cpu() & taken.left_out.cpu()].tolist()))
        trained = part.with_advantages(advantages, kept, earned)
        yield replace(part, transitions=()) if trained is None and part.left_out else trained


def _at_node(method: Method, shaped: Tensor, weights: list[float], context: Context, width: int, bonus: Tensor | None
             ) -> tuple[Tensor, Tensor]:
    """The advantages [P,G/width] of nodes above `width` leaves, and what they compare [P,G/width,R].
    bonus: [P,G] of the leaves at the nodes' step, one more reward."""
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
    """The part, whose means are recorded, with a goal for each of its transitions: the mean that it would have with the
    output v* of the policy on the path to its group's best leaf, weighted by `tuning`. advantages: [N, G], of leaves.
    """
    exploration, groups, best = part.exploration, len(advantages), advantages.argmax(1)
    transitions: list[Transitions] = []
    for taken in cast(Any, part.transitions):
        assert taken.old.mean is not None, "LayerTuning needs recorded means"
        edges, parent = len(taken.parent), taken.parent
        weight = tuning.weights(advantages, edges // groups, len(taken.x) // groups)
        of_best = torch.arange(groups) * (edges // groups) + best.cpu() // (len(part.prompts) // edges)
        group = torch.arange(edges) // (edges // groups)
        rest = exploration.transition(taken.x, torch.zeros_like(taken.x), exploration.grid, taken.step).mean
        device = rest.device
        drawn = taken.old.mean[of_best.to(device), 0] - rest[parent[of_best].to(device)]  # slope * v*
        mean = rest[parent.to(device)] + drawn[group.to(device)]
        target = RegressionTarget(mean[:, None], weight.cpu()[group, None].to(mean))
        transitions.append(replace(taken, regression_target=target))
    return replace(part, transitions=tuple(transitions))
