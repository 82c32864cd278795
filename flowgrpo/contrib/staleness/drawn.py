"""Epoch that is drawn ahead of its update."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import torch

from flowgrpo.data.prompts import Prompt
from flowgrpo.rollouts.base import Encoded, Outputs
from flowgrpo.samplers.rollout import Part
from flowgrpo.training import sampling
from flowgrpo.training.scoring import Scoring


@dataclass(eq=False)
class Drawn:
    """Epoch that is drawn and waits for its update.

    batch: its prompts on all processes; prompts: those of this one.
    at: the epoch before whose update it was drawn; update: the optimizer updates of the oldest weights that drew it.
    older: of partial rollouts, as of `partial_rollouts.older`.
    conditioning, scoring, scorer: None until an epoch of a checkpoint is scored again.
    pending: the futures of the scores of every part, one per granularity.
    """

    epoch: int
    at: int
    update: int
    batch: list[Prompt]
    prompts: list[Prompt]
    parts: list[Part] = field(default_factory=list)
    outputs: list[Sequence[Outputs | None]] = field(default_factory=list)
    older: tuple[int, int] = (0, 1)
    conditioning: Encoded | None = None
    scoring: Scoring | None = None
    scorer: sampling.Scorer | None = None
    pending: list[Future[torch.Tensor]] = field(default_factory=list)
