"""Inputs of a method's parts besides rewards, for the groups of an epoch."""

from __future__ import annotations

import torch

from flowgrpo.samplers.rollout import Part
from flowgrpo.training.state import Run
from flowgrpo.types import Context


def context_of(run: Run, parts: list[Part], keys: list[str]) -> Context:
    """Return the inputs of all processes in one order of prompts. parts: of this process; keys: of all groups."""
    shape, of, method, scoring = run.geometry, run.geometry.sliced(keys), run.method, run.scoring
    places = [int(place) for part in parts for place in part.prompts[::shape.group]]
    share = len(of) // run.processes.count
    groups = [of[first + place] for first in range(0, len(of), share) for place in places][::shape.slices]
    columns = run.processes.gather(torch.cat([part.leaves() for part in parts]))
    logp, lengths, deducted, entropy, reference, expert, baseline, *predicted = columns.view(
        -1, run.config.train.group, columns.shape[1]).unbind(2)
    metadata = {prompt.key: prompt.metadata for prompt in run.prompts} | run.guided.metadata
    strides = len(method.rollout.strides)
    return Context(
        groups, logp.float(), lengths.long(), epoch=run.epoch, epochs=run.config.train.epochs, memory=run.memory,
        longest=sum(transitions.old.logp.shape[1] for transitions in parts[0].transitions),
        win_rates=scoring.paired * strides, deducted=deducted.float(),
        weights=list(scoring.weights.values()) * strides, names=list(scoring.weights) * strides,
        splits=run.rollouts.splits(run.epoch), expert=expert.bool(), likelihood=run.kl_reference.likelihood,
        entropy=entropy.float() if "entropy" in method.needs else None,
        reference=reference.float() if "reference" in method.needs else None,
        metadata=[metadata.get(key, {}) for key in groups],
        predicted=torch.stack(predicted, 2).float() if predicted else None,
        baseline=baseline.float() if parts[0].baseline is not None else None, metrics=run.reported)
