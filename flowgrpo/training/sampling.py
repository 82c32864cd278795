"""First half of an epoch: prompts are chosen, samples drawn, and rewards score them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

import torch

from flowgrpo import rewards
from flowgrpo.advantages.group import AdvantageRule
from flowgrpo.curriculum.epoch_batch import EpochBatch
from flowgrpo.curriculum.gradient_variance import gradient_norms
from flowgrpo.data.prompts import Prompt
from flowgrpo.rollouts.base import Encoded, Outputs
from flowgrpo.samplers.rollout import Part
from flowgrpo.training.epoch import Epoch
from flowgrpo.training.scorer import Scorer
from flowgrpo.training.scoring import Scoring
from flowgrpo.training.shares import whole_groups


def draw(trainer: Any) -> Epoch:
    """Sample and score a group for each of the epoch's prompts."""
    epoch = begun(trainer)
    draw_groups(trainer, epoch, choose_prompts(trainer, trainer.epoch))
    rewards.end(trainer.scoring.functions)
    return epoch


def begun(trainer: Any) -> Epoch:
    """Return the trainer's epoch without groups, and tell its rewards that it begins."""
    trainer.scoring.enter(trainer.epoch, trainer.config.train.epochs, trainer.memory)
    return Epoch(empty_batch(trainer, trainer.epoch))


def empty_batch(trainer: Any, epoch: int) -> EpochBatch:
    """Return the record of an epoch's prompts and scores, without groups."""
    return EpochBatch(trainer.prompts, epoch, trainer.config.train.epochs, trainer.config.seed, trainer.processes,
                      trainer.memory)


def choose_prompts(trainer: Any, epoch: int, count: int | None = None) -> list[Prompt]:
    """Return the prompts with which an epoch begins, of all processes. count: None means `train.prompts`."""
    train, rule, weights = trainer.config.train, trainer.method.credit.advantage, None
    if type(rule).prompt_weights is not AdvantageRule.prompt_weights:  # few rules read them, and the prompts are many
        weights = rule.prompt_weights(trainer.memory, [prompt.key for prompt in trainer.prompts])
    return trainer.method.curriculum(trainer.prompts, train.prompts if count is None else count, epoch,
                                     trainer.config.seed, None if weights is None else weights.tolist(),
                                     trainer.memory, train.group)


def draw_groups(trainer: Any, epoch: Epoch, batch: list[Prompt]) -> list[Part]:
    """Sample and score a group for each prompt, and add them to the epoch; return the parts of this process.

    batch: of all processes.
    """
    scoring, own = trainer.scoring, trainer.processes.own(trainer.geometry.sliced(batch))
    parts, epoch.conditioning, scores = trainer.with_oom_retry(partial(sample, trainer, own, epoch.groups.turn))
    scores = whole_groups(trainer.processes.gather(scores), trainer.config.train.group)
    totals = scoring.weighted(scores[..., :len(scoring.functions)])
    epoch.groups.add(batch, scores, totals, *group_signals(trainer, parts, len(batch)))
    epoch.own = epoch.own + own
    epoch.parts = epoch.parts + parts
    if not trainer.config.preferences:
        trainer.progress.sampled += scores[..., 0].numel()
    return parts


def sample(trainer: Any, batch: list[Prompt], turn: int = 0) -> tuple[list[Part], Encoded, torch.Tensor]:
    """Sample and score groups of this process's prompts; a thread scores one part while the next one is sampled.

    turn: the number of earlier draws in the epoch, so every turn has separate noise.
    Returns (the parts, the prompts' conditioning, scores [groups,G,R]); samples finished in several granularities have
    R scores in each.
    """
    parts: list[Part] = []
    pending: list[Future[torch.Tensor]] = []
    scoring = trainer.scoring
    trainer.rollouts.old_policy.updates = trainer.optimization.update
    scoring.begin(turn)
    trainer.geometry.begin()
    with trainer.processes.together(), Scorer(trainer.stop, scoring.waits) as scorer:
        conditioning = trainer.rollouts.conditioning(batch, trainer.epoch)
        for part, outputs in sampled_parts(trainer, scoring, conditioning, batch, trainer.epoch, turn):
            parts.append(part)
            pending += submit(trainer, scoring, scorer, batch, part, outputs, conditioning)
        with trainer.clock("reward"):
            scores = columns(trainer, scorer.results(pending))
    scoring.leave()
    return parts, conditioning, scores


def sampled_parts(trainer: Any, scoring: Scoring, conditioning: Encoded, batch: list[Prompt], epoch: int, turn: int
                  ) -> Iterator[tuple[Part, Sequence[Outputs | None]]]:
    """Yield the parts of a batch, with their outputs per granularity. Raises Stopped if a stop was requested."""
    for part, outputs in trainer.rollouts.sample(conditioning, epoch, partial(scoring.total, batch),
                                                 partial(scoring.value, batch), turn):
        trainer.stop.asked = trainer.processes.any_of_team(trainer.stop.asked)
        trainer.stop.check()
        yield part, outputs


def submit(trainer: Any, scoring: Scoring, scorer: Scorer, batch: list[Prompt], part: Part,
           outputs: Sequence[Outputs | None], conditioning: Encoded) -> list[Future[torch.Tensor]]:
    """Submit a part's outputs to the rewards; return the futures of their scores, one per granularity."""
    base = trainer.rollouts.base(part, conditioning) if scoring.compares else None
    return [scorer.submit(scoring.judge, batch, part.prompts, *given, base)
            for given in zip(outputs, scoring.latents(part.finals, len(outputs)))]


def columns(trainer: Any, scores: list[torch.Tensor]) -> torch.Tensor:
    """Return the scores [groups,G,R] of parts; samples finished in several granularities have R scores in each."""
    strides = len(trainer.method.rollout.strides)
    joined = [torch.cat(scores[stride::strides]) for stride in range(strides)]
    return torch.cat(joined, 1).unflatten(0, (-1, trainer.geometry.group))


def group_signals(trainer: Any, parts: list[Part], groups: int) -> tuple[Sequence[float], Sequence[torch.Tensor]]:
    """Return (diversity, norms of gradients [G]) of every group of a turn of all processes; () for what the curriculum
    does not read, and for norms of images.

    parts: of this process; groups: the number of all.
    """
    curriculum, norms = trainer.method.curriculum, ()
    if getattr(curriculum, "reads_norms", False) and trainer.policy.modality == "text":
        olds = [part.transitions[0].old for part in parts]
        values = trainer.processes.gather(torch.cat([gradient_norms(old.logp.cpu(), old.mask.cpu()) for old in olds]))
        norms = tuple(values.view(groups, -1))
    return trainer.scoring.diversities(curriculum, groups), norms
