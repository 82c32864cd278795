"""Epoch of a run, on its way from prompts to gradient."""

from dataclasses import dataclass, field
from typing import Any

from flowgrpo.curriculum.epoch_batch import EpochBatch
from flowgrpo.data.prompts import Prompt
from flowgrpo.rollouts.base import Encoded
from flowgrpo.samplers.rollout import Part


@dataclass(eq=False)
class Epoch:
    """Groups of one epoch.

    groups: prompts and scores of all processes.
    own: prompts of this process's groups, turn by turn.
    parts: samples of this process; `credit.compare` gives them their advantages.
    conditioning: `own` as the loss reads it; sampled: as the samples were drawn, None for the same.
    weights: of the steps of the loss, by step.
    left_out: parts without transitions, all of whose completions the loss leaves out.
    metrics: the epoch's line of metrics.jsonl.
    """

    groups: EpochBatch
    own: list[Prompt] = field(default_factory=list)
    parts: list[Part] = field(default_factory=list)
    conditioning: Encoded = None  # type: ignore[assignment]
    sampled: Encoded | None = None
    weights: dict[int, float] = field(default_factory=dict)
    metrics: dict[str, Any] = field(default_factory=dict)
    left_out: list[Part] = field(default_factory=list)
