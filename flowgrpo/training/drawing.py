"""Steps of an epoch's draw: prompts, samples, and calls of the rewards."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

import torch

from flowgrpo.curriculum.epoch_batch import EpochBatch
from flowgrpo.data.prompts import Prompt
from flowgrpo.rollouts.base import Encoded, Outputs
from flowgrpo.samplers.rollout import Part
from flowgrpo.training.scorer import Scorer
from flowgrpo.training.scoring import Scoring


def empty(run: Any, epoch: int) -> EpochBatch:
    """Return the record of an epoch of a `train.Trainer`, without groups."""
    return EpochBatch(run.prompts, epoch, run.config.train.epochs, run.config.seed, run.processes, run.memory)


def chosen(run: Any, epoch: int, count: int | None = None) -> list[Prompt]:
    """Return the prompts with which an epoch begins, of all processes. count: None means `train.prompts`."""
    weights, train = run.method.credit.advantage.prompt_weights(run.memory, run.keys), run.config.train
    return run.method.curriculum(run.prompts, train.prompts if count is None else count, epoch, run.config.seed,
                                 None if weights is None else weights.tolist(), run.memory, train.group)


def sampled(run: Any, scoring: Scoring, conditioning: Encoded, batch: list[Prompt], epoch: int, turn: int
            ) -> Iterator[tuple[Part, Sequence[Outputs | None]]]:
    """Yield the parts of a batch, with their outputs per granularity. Raises Stopped if a stop was requested."""
    for part, outputs in run.rollouts.sample(conditioning, epoch, partial(scoring.total, batch),
                                             partial(scoring.value, batch), turn):
        run.stop.asked = run.processes.any_of_team(run.stop.asked)
        run.stop.check()
        yield part, outputs


def judged(run: Any, scoring: Scoring, scorer: Scorer, batch: list[Prompt], part: Part,
           outputs: Sequence[Outputs | None], conditioning: Encoded) -> list[Future[torch.Tensor]]:
    """Submit a part's outputs to the rewards; return the futures of their scores, one per granularity."""
    base = run.rollouts.base(part, conditioning) if scoring.compares else None
    return [scorer.submit(scoring.judge, batch, part.prompts, *given, base)
            for given in zip(outputs, scoring.latents(part.finals, len(outputs)))]


def columns(run: Any, scores: list[torch.Tensor]) -> torch.Tensor:
    """Return the scores [groups,G,R] of parts; samples finished in several granularities have R scores in each."""
    strides = len(run.method.rollout.strides)
    joined = [torch.cat(scores[stride::strides]) for stride in range(strides)]
    return torch.cat(joined, 1).unflatten(0, (-1, run.geometry.group))
