"""First half of an epoch: prompts are chosen, samples drawn, and a thread of rewards scores them meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from functools import partial
from queue import SimpleQueue
from typing import Any

import torch

from flowgrpo.advantages.group import AdvantageRule
from flowgrpo.curriculum.epoch_batch import EpochBatch
from flowgrpo.curriculum.history import gradient_norms
from flowgrpo.data import sources
from flowgrpo.data.prompts import NOTHING, Prompt
from flowgrpo.device import current_stream, hand_over, second_stream, use_stream
from flowgrpo.distributed import signals
from flowgrpo.distributed.signals import Stop, Stopped
from flowgrpo.nouns import quantity
from flowgrpo.rollouts.base import Encoded, Outputs
from flowgrpo.samplers.rollout import Part
from flowgrpo.training.epoch import Epoch
from flowgrpo.training.extension import Run
from flowgrpo.training.scoring import Scoring


def draw(trainer: Run) -> Epoch:
    """Sample and score a group for each of the epoch's prompts."""
    epoch = new_epoch(trainer)
    draw_groups(trainer, epoch, choose_prompts(trainer, trainer.epoch))
    trainer.scoring.end_epoch()
    return epoch


def new_epoch(trainer: Run) -> Epoch:
    """The trainer's epoch without groups, and tell its rewards that it begins."""
    trainer.scoring.start_epoch(trainer.epoch, trainer.config.train.epochs, trainer.memory)
    return Epoch(empty_batch(trainer, trainer.epoch))


def empty_batch(trainer: Run, epoch: int) -> EpochBatch:
    return EpochBatch(trainer.prompts, epoch, trainer.config.train.epochs, trainer.config.seed, trainer.processes,
                      trainer.memory)


def choose_prompts(trainer: Run, epoch: int) -> list[Prompt]:
    """The prompts with which an epoch begins, of all processes."""
    train, rule, weights = trainer.config.train, trainer.method.credit.advantage, None
    if type(rule).prompt_weights is not AdvantageRule.prompt_weights:  # few rules read them, and the prompts are many
        weights = rule.prompt_weights(trainer.memory, [prompt.key for prompt in trainer.prompts])
    chosen = trainer.method.curriculum(trainer.prompts, train.prompts, epoch, trainer.config.seed,
                                       None if weights is None else weights.tolist(), trainer.memory, train.group)
    return readable(trainer, chosen, epoch)


def readable(trainer: Run, batch: list[Prompt], epoch: int) -> list[Prompt]:
    """The prompts of all processes, with others in the place of those whose files cannot be read any more."""
    if all(prompt.image is None and prompt.inputs == NOTHING for prompt in batch):
        return batch
    frames = trainer.config.call.get("num_frames")
    errors = [sources.fault(prompt, frames) for prompt in batch]
    lost = trainer.processes.gather(torch.tensor([[error is not None for error in errors]], dtype=torch.int64)).any(0)
    if not lost.any():
        return batch
    kept = sources.stand_ins(batch, lost.tolist(), trainer.prompts, frames)
    for error, prompt in zip(errors, kept):
        if error is not None and trainer.processes.first:
            trainer.log(f"epoch {epoch}: {error}: another prompt is sampled in its place ({prompt.text[:40]!r}; "
                        f"{sources.count_lost(trainer.prompts)} of {quantity(len(trainer.prompts), 'prompt')} lost)")
    return kept


def draw_groups(trainer: Run, epoch: Epoch, batch: list[Prompt]) -> list[Part]:
    """Sample and score a group for each prompt, and add them to the epoch; return the parts of this process.
    batch: of all processes."""
    scoring, own = trainer.scoring, trainer.processes.own(trainer.geometry.repeat_per_slice(batch))
    parts, epoch.conditioning, scores = trainer.with_oom_retry(partial(sample, trainer, own, epoch.groups.turn))
    scores = trainer.processes.gather(scores).flatten(0, 1).unflatten(0, (-1, trainer.config.train.group))
    totals = scoring.sum_rewards(scores[..., :len(scoring.functions)])
    epoch.groups.add(batch, scores, totals, *group_signals(trainer, parts, len(batch)))
    epoch.own = epoch.own + own
    epoch.parts = epoch.parts + parts
    if not trainer.config.preferences:
        trainer.progress.sampled += scores[..., 0].numel()
    return parts


def sample(trainer: Run, batch: list[Prompt], turn: int = 0) -> tuple[list[Part], Encoded, torch.Tensor]:
    """Sample and score groups of this process's prompts; a thread scores one part while the next one is sampled.
    turn: the number of earlier draws in the epoch, so every turn has separate noise.
    Returns (the parts, the prompts' conditioning, scores [groups,G,R]); samples finished in several granularities have
    R scores in each."""
    parts: list[Part] = []
    pending: list[Future[torch.Tensor]] = []
    scoring = trainer.scoring
    trainer.rollouts.old_policy.updates = trainer.optimization.update
    scoring.start_turn(turn)
    trainer.geometry.start_turn()
    with trainer.processes.collective(), Scorer(trainer.stop, scoring.waits) as scorer:
        conditioning = trainer.rollouts.conditioning(batch, trainer.epoch)
        for part, outputs in sample_parts(trainer, scoring, conditioning, batch, trainer.epoch, turn):
            parts.append(part)
            pending += submit(trainer, scoring, scorer, batch, part, outputs, conditioning)
        with trainer.clock("reward"):
            scores = columns(trainer, scorer.results(pending))
    scoring.offload()
    return parts, conditioning, scores


def sample_parts(trainer: Run, scoring: Scoring, conditioning: Encoded, batch: list[Prompt], epoch: int, turn: int
                  ) -> Iterator[tuple[Part, Sequence[Outputs | None]]]:
    """Yield the parts of a batch, with their outputs per granularity. Raises Stopped if a stop was requested."""
    for part, outputs in trainer.rollouts.sample(conditioning, epoch, partial(scoring.total, batch),
                                                 partial(scoring.value, batch), turn):
        trainer.stop.asked = trainer.processes.any_of_team(trainer.stop.asked)
        if trainer.stop.asked:
            raise Stopped
        yield part, outputs


def submit(trainer: Run, scoring: Scoring, scorer: Scorer, batch: list[Prompt], part: Part,
           outputs: Sequence[Outputs | None], conditioning: Encoded) -> list[Future[torch.Tensor]]:
    """Submit a part's outputs to the rewards; return the futures of their scores, one per granularity."""
    base = trainer.rollouts.base(part, conditioning) if scoring.compares else None
    shown = [scoring.where_read(output, scorer.behind) for output in outputs]
    return [scorer.submit(scoring.judge, batch, part.prompts, *given, base)
            for given in zip(shown, scoring.latents(part.finals, len(outputs)))]


def columns(trainer: Run, scores: list[torch.Tensor]) -> torch.Tensor:
    """The scores [groups,G,R] of parts; samples finished in several granularities have R scores in each."""
    strides = len(trainer.method.rollout.strides)
    joined = [torch.cat(scores[stride::strides]) for stride in range(strides)]
    return torch.cat(joined, 1).unflatten(0, (-1, trainer.geometry.group))


def group_signals(trainer: Run, parts: list[Part], groups: int) -> tuple[Sequence[float], Sequence[torch.Tensor]]:
    """(diversity, norms of gradients [G]) of every group of a turn of all processes; () for what the curriculum does
    not read, and for norms of images. parts: of this process; groups: the number of all."""
    curriculum, norms = trainer.method.curriculum, ()
    if getattr(curriculum, "reads_norms", False) and trainer.policy.unit == "tokens":
        olds = [part.transitions[0].old for part in parts]
        values = trainer.processes.gather(torch.cat([gradient_norms(old.logp.cpu(), old.mask.cpu()) for old in olds]))
        norms = tuple(values.view(groups, -1))
    return trainer.scoring.diversities(curriculum, groups), norms


class Scorer:
    """Context manager around a rollout. A reward that hangs holds neither a stop nor the end of the process.
    On a GPU its thread has a stream of its own: rewards and sampler do not wait for each other.

    waits: calls begin with `results`, when nothing is sampled any more.

    At a stop the scores are dropped. At any other error the call that runs is waited for, and the rest is dropped.
    Without the context, `start` and `end` wait for nothing. after: a scorer whose calls come first.
    """

    def __init__(self, stop: Stop, waits: bool = False, after: Scorer | None = None):
        self.stop, self._closed, self._begun = stop, False, threading.Event()
        if not waits:
            self._begun.set()
        self._calls: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        self._idle = Future[None]()  # done at the thread's end
        self._after = None if after is None else after._idle

    def start(self) -> Scorer:
        stream = current_stream()
        stream = stream and second_stream(stream.device)
        threading.Thread(target=self._work, args=(stream,), daemon=True, name="rewards").start()
        return self

    def end(self, drop: bool = False) -> None:
        """End the thread behind the calls that were submitted; drop: behind the one that runs."""
        self._closed = drop
        self._begun.set()
        self._calls.put(None)

    def __enter__(self) -> Scorer:
        return self.start()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.end(drop=kind is not None)
        if kind is None or issubclass(kind, Exception):
            signals.result(self._idle, self.stop.check)

    def submit(self, function: Callable[..., torch.Tensor], *arguments: Any) -> Future[torch.Tensor]:
        future = Future[torch.Tensor]()
        self._calls.put((future, hand_over(function, *arguments)))
        return future

    @property
    def behind(self) -> bool:
        """True if a call waits for one before it, or for `results`."""
        return not self._calls.empty()

    def results(self, futures: list[Future[torch.Tensor]]) -> list[torch.Tensor]:
        """The results in order. Raises Stopped when a stop was requested."""
        self._begun.set()
        return [signals.result(future, self.stop.check) for future in futures]

    def _work(self, stream: torch.cuda.Stream | None) -> None:
        use_stream(stream)
        self._begun.wait()
        if self._after is not None:
            wait([self._after])
        while (call := self._calls.get()) is not None:
            if not self._closed:
                signals.complete(*call)
            del call  # and with it the tensors that it holds
        self._idle.set_result(None)
