"""Training loop, from prompt to gradient, independent of model and method.

prompts -> conditioning -> rollout -> decode -> rewards -> advantage -> replay -> objective -> optimizer
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from flowgrpo import rewards
from flowgrpo.config.geometry import geometry
from flowgrpo.config.schema import Config
from flowgrpo.curriculum.epoch_batch import EpochBatch
from flowgrpo.data.prompts import Prompt
from flowgrpo.device import queued
from flowgrpo.distributed.processes import Processes
from flowgrpo.distributed.signals import Stop
from flowgrpo.evaluation import held_out
from flowgrpo.log import PhaseTimer
from flowgrpo.methods import validate
from flowgrpo.objectives.reductions import reduced
from flowgrpo.policies.policy import Policy
from flowgrpo.rollouts.base import Encoded
from flowgrpo.rollouts.build import make_rollouts
from flowgrpo.samplers.rollout import Part
from flowgrpo.training import drawing, extras, state
from flowgrpo.training.ahead import make_ahead
from flowgrpo.training.best import BestWeights
from flowgrpo.training.contexts import context_of
from flowgrpo.training.credit import credit
from flowgrpo.training.critic import make_critic
from flowgrpo.training.data_term import DataTerm
from flowgrpo.training.endings import saved
from flowgrpo.training.first_ratio import ROUNDED, FirstRatio
from flowgrpo.training.guided import GuidedSampling
from flowgrpo.training.hindsight import make_hindsight
from flowgrpo.training.hints import RewardHints
from flowgrpo.training.kl_reference import KLReference
from flowgrpo.training.measures import examined, of_groups
from flowgrpo.training.metrics import Log, UpdateStats, shown
from flowgrpo.training.optimizer import clip_gradients, make_optimizer, make_scaler, rate, update_average
from flowgrpo.training.out_of_memory import fitted
from flowgrpo.training.phases import Phases
from flowgrpo.training.recorded_groups import make_recorded
from flowgrpo.training.rehearsal import make_rehearsing
from flowgrpo.training.saving import Saving
from flowgrpo.training.scorer import Scorer
from flowgrpo.training.scoring import Functions, Scoring
from flowgrpo.training.shares import shares, slices, whole_groups
from flowgrpo.training.throughput import Throughput
from flowgrpo.training.trajectory import make_trajectory
from flowgrpo.types import Scored, required

if TYPE_CHECKING:
    from accelerate import Accelerator

T = TypeVar("T")


class Trainer:
    """One run: the policy, its prompts, its rewards and its method, and the state of its checkpoints."""

    def __init__(self, config: Config, accelerator: Accelerator, policy: Policy, train_rewards: Functions,
                 prompts: tuple[list[Prompt], list[Prompt]]):
        self.config, self.accelerator, self.policy = config, accelerator, policy
        self.prompts, self.held_out = prompts
        self.keys = [prompt.key for prompt in self.prompts]
        self.method = validate.resolve(config, policy.process)
        self.processes = Processes(accelerator, config.memory.context_parallel)
        self.processes.turns = policy.turns
        self.geometry = geometry(config.train, self.processes.count)
        self.scoring = Scoring(train_rewards, config.rewards, self.geometry.group, self.processes)
        rewards.bind(train_rewards, policy)
        self.clock, self.stop = PhaseTimer(policy.device.type == "cuda"), Stop(self.processes.members > 1)
        self.hints, self.phases = RewardHints(self.method.credit.advantage), Phases(config)
        self.throughput = Throughput(config, policy, self.processes)
        self.say: Callable[[str], None] = print
        self.rollouts = make_rollouts(config, policy, self.method, self.geometry, self.processes, self.clock,
                                      first=self.prompts[0])
        self.rollouts.decodes = self.scoring.reads_outputs
        self.data = DataTerm(self)
        self.processes.agree(policy.weights.parameters())
        self.optimizer = make_optimizer(config.train, policy.weights.parameters())
        self.scaler = make_scaler(config.precision, policy.device)
        self.ema = policy.weights.kept() if config.train.ema else None
        self.best = BestWeights(config.eval)
        self.memory = self.scoring.limits.memory  # state of the method's parts and of constraints between epochs
        self.kl_reference = KLReference(self.method, policy, self.memory, keep=config.train.inner_epochs > 1)
        self.hindsight, self.rehearsing = make_hindsight(self.rollouts), make_rehearsing(self.rollouts)
        self.first_ratio = FirstRatio(self.rollouts, self.method.loss.surrogate, policy.exact,
                                      math.inf if policy.modality == "text" else ROUNDED)
        self.critic = make_critic(self.method, policy, self.geometry, self.processes)
        self.guided, self.recorded, self.ahead = GuidedSampling(self.rollouts), make_recorded(self), make_ahead(self)
        self.trajectory = make_trajectory(self)
        self.epoch = self.update = self.skipped = self.sampled = 0
        self.reported: dict[str, float] = {}  # metrics of the method's parts, until the epoch ends
        self.unmeasured = False  # the last epoch is trained, and its evaluation is due
        self.seconds = self.reward_wait_seconds = self.begun = 0.0
        self.marked = state.counters(self)
        self.saving = Saving(self)

    # --- one epoch, read from top to bottom --------------------------------------------------------------------------

    def run_epoch(self) -> dict[str, Any]:
        """Run one epoch, from prompts to gradient; return its metrics.

        Every process samples its share of the epoch's prompts; comparisons are over all of them.
        """
        with self.phases.epoch(self):
            epoch_batch, parts, conditioning = (self.ahead or self).draw()
            prompts, scores = epoch_batch.compared()
            if self.trajectory is not None:
                self.trajectory.see(epoch_batch.totals)
            metrics = self.scoring.metrics(epoch_batch.first, self.say)
            self.scoring.require_scores(metrics, epoch_batch.prompts[0].text, self.epoch, self.say)
            metrics |= self.scoring.limits.learn(metrics)
            self.hints.epoch(metrics, self.scoring.spreads, self.epoch, self.say)
            parts = self.fitted(partial(examined, self, parts, conditioning), "update")
            self.data.collect(epoch_batch, scores, parts)
            credited = self.credit(parts, scores, [prompt.key for prompt in prompts])
            return metrics | epoch_batch.metrics() | self.learn(credited, conditioning, epoch_batch.own())

    def draw(self) -> tuple[EpochBatch, list[Part], Encoded]:
        """Sample the epoch's prompts, and the replacements that the method asks for.
        Returns (all groups, the parts of this process, the conditioning of its prompts).
        """
        train, parts = self.config.train, []
        self.scoring.enter(self.epoch, train.epochs, self.memory)
        epoch_batch = drawing.empty(self, self.epoch)
        batch = self.guided.first(drawing.chosen(self, self.epoch), epoch_batch)
        while batch:
            local, turn = self.processes.own(self.geometry.sliced(batch)), epoch_batch.turn
            new_parts, conditioning, scores = self.fitted(partial(self.sample, local, turn))
            parts += self.guided.take(new_parts, local)
            scores = whole_groups(self.processes.gather(scores), train.group)
            self.sampled += 0 if self.config.preferences else scores[..., 0].numel()
            epoch_batch.add(batch, scores, self.scoring.weighted(scores[..., :len(self.scoring.functions)]),
                            *of_groups(self, new_parts, len(batch)))
            batch = self.guided.following()
        self.method.curriculum.learn(self.memory, epoch_batch)
        rewards.end(self.scoring.functions)
        return epoch_batch, parts, self.guided.end(conditioning)

    def sample(self, batch: list[Prompt], turn: int = 0) -> tuple[list[Part], Encoded, torch.Tensor]:
        """Sample and score groups of these prompts; a thread scores one part while the next one is sampled.

        turn: the number of earlier draws in the epoch, so every turn has separate noise.
        Returns (the parts, the prompts' conditioning, scores [groups,G,R]); samples finished in several granularities
        have R scores in each.
        """
        parts, pending, scoring = [], [], self.scoring
        if self.hindsight is not None:
            self.hindsight.begin(batch, self.epoch, turn)
        self.rollouts.old_policy.updates = self.update
        scoring.begin(turn)
        self.geometry.begin()
        with self.processes.together(), Scorer(self.stop, self.scoring.waits) as scorer:
            conditioning = self.rollouts.conditioning(batch, self.epoch)
            for part, outputs in drawing.sampled(self, scoring, conditioning, batch, self.epoch, turn):
                parts.append(part)
                pending += drawing.judged(self, scoring, scorer, batch, part, outputs, conditioning)
            with self.clock("reward"):
                scores = drawing.columns(self, scorer.results(pending))
        scoring.leave()
        return parts, conditioning, scores

    def credit(self, parts: list[Part], scores: torch.Tensor, keys: list[str]) -> list[Part | None]:
        """Apply `credit.credit` of this method: return the parts of this process with advantages.

        scores: [groups,G,R] of all processes; keys: of their prompts.
        """
        weights = list(self.scoring.weights.values()) * len(self.method.rollout.strides)
        return list(credit(self.method, parts, self.scoring.shaped(scores), weights, context_of(self, parts, keys),
                           lambda values: self.processes.own(slices(values, self.geometry.slices))))

    def learn(self, credited: list[Part | None], conditioning: Encoded, prompts: Sequence[Prompt] = ()
              ) -> dict[str, Any]:
        """Replay the recorded decisions and minimise the method's loss: `updates` optimizer steps per inner epoch.

        Every process adds the gradient of its own parts; one that has none in a step still takes part in it.
        """
        stats = UpdateStats()
        parts = [part for part in credited if part is not None]
        if self.first_ratio.found is None or self.first_ratio.rescore:
            sampled = self.guided.sampled(conditioning)
            parts = self.fitted(partial(self.first_ratio, parts, sampled, self.say), "update")
        if self.critic is not None:
            parts = self.critic(parts, conditioning)
        weights = self.rollouts.step_weights(parts, self.epoch)
        parts, conditioning = extras.prepare(self, parts, conditioning, prompts, weights)
        self.kl_reference.begin(self.epoch, self.config.train.epochs)
        with self.clock("update"):
            replay = partial(self.rollouts.replay, conditioning=conditioning)
            self.fitted(partial(self.kl_reference.ahead, parts, replay, self.processes))
        for inner in range(self.config.train.inner_epochs):
            steps = shares(parts, self.geometry, self.processes, self.method.loss.reduction)
            for share, count in self.data.interleaved(steps):
                with self.clock("update"):
                    stats.decisions += self.fitted(partial(self.gradient, share, conditioning, weights, count))
                    self.processes.add_gradients(self.policy.weights.parameters())
                    self.data.add(self.update, self.fitted)
                    with self.processes.together():
                        self.step_optimizer(stats)
        self.scoring.leave()  # a reward whose gradient was followed
        metrics = stats.summary(self.processes) | self.rollouts.metrics() | extras.finish(self, parts, conditioning)
        return metrics | {"skipped_updates": self.skipped} | self.kl_reference.end(self.epoch, metrics.get("kl"))

    def gradient(self, share: list[Part], conditioning: Encoded, weights: dict[int, float], count: int
                 ) -> list[torch.Tensor]:
        """Compute the gradient of one optimizer step's parts anew; return the statistics of their decisions."""
        stats = UpdateStats()
        self.optimizer.zero_grad()
        self.rollouts.meet(share, conditioning, partial(self.reference, conditioning=conditioning))
        with self.processes.together():
            for part in share:
                self.leave()
                self.backward(part, conditioning, weights, count, stats)
            if self.rehearsing is not None:
                self.rehearsing.add(self.update, lambda loss: self.policy.backward(self.scaler.scale(loss)))
        return stats.decisions

    def leave(self) -> None:
        """Raise Stopped if a stop was requested and this epoch has changed nothing that a checkpoint holds."""
        if self.update == self.marked["update"] and self.critic is None:
            self.stop.asked = self.processes.any_of_team(self.stop.asked)
            self.stop.check()

    def fitted(self, work: Callable[[], T], phase: str = "") -> T:
        """Return work(), repeated with half the micro-batch each time that memory runs out.

        phase: its name; without one the clock's.
        """
        def say(text: str) -> None:
            self.kl_reference.known = {}  # scores of larger batches
            if self.processes.first:
                self.say(text)

        return fitted(work, self.geometry, self.processes, lambda: phase or self.clock.phase, say)

    def backward(self, part: Part, conditioning: Encoded, weights: dict[int, float], count: int, stats: UpdateStats
                 ) -> None:
        """Add one part's gradient, a batch of one recorded step at a time.

        weights: of the steps; count: the divisor of every loss, `decisions` of the whole optimizer step.
        """
        method, kl, device = self.method, self.kl_reference.kl, self.policy.device
        reference = self.reference(part, conditioning)
        loss_inputs = self.rollouts.loss_inputs(part, conditioning, reference)
        for batch, (k, rows, new) in enumerate(self.rollouts.replay(part, conditioning)):
            transitions, advantage = part.transitions[k], queued(part.advantage(k, rows), device)
            old = transitions.old.rows(rows).to(device)
            log_ratio, loss_input = method.loss.log_ratio(new, old), loss_inputs(batch, k, rows, new, old)
            loss = method.loss.surrogate(log_ratio, advantage, loss_input) * (part.weights or weights)[transitions.step]
            if transitions.correction is not None:
                loss = loss * queued(transitions.correction[rows], device)
            penalty = self.kl_reference.penalty(new, reference[batch], part.rewards[k][rows]) if kl.weight else None
            loss = loss if penalty is None else loss + penalty
            if transitions.goal is not None:
                loss = loss + method.tuning(new, transitions.goal.rows(rows).to(device))
            self.policy.backward(self.scaler.scale(reduced(loss, method.loss.reduction(new.mask), count)))
            clipped = method.loss.surrogate.clipped(log_ratio, advantage, loss_input)
            stats.add(transitions.step, new.mask, log_ratio, clipped, loss,
                      None if penalty is None else penalty / kl.weight)

    def reference(self, part: Part, conditioning: Encoded) -> list[Scored]:
        """Return the reference's scores of a part's transitions, where they are needed."""
        replay = self.hindsight.replay if self.hindsight else partial(self.rollouts.replay, conditioning=conditioning)
        return self.kl_reference.scores(part, replay)

    def step_optimizer(self, stats: UpdateStats) -> None:
        """Clip the gradient and step; a gradient that is not finite is skipped and counted."""
        train, parameters = self.config.train, self.policy.weights.parameters()
        has_gradients = any(parameter.grad is not None for parameter in parameters)  # false if no sample is trained
        if has_gradients:
            self.scaler.unscale_(self.optimizer)
        norm = clip_gradients(parameters, train.clip_grad)
        stats.norms.append(norm)
        if not torch.isfinite(norm):
            self.skipped += 1
            self.scaler.update()
            return
        for group in self.optimizer.param_groups:
            group["lr"] = train.lr * rate(self.update, self.total_updates, train)
        if has_gradients:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        self.update += 1
        if self.ema is not None:
            update_average(self.ema, self.policy.weights.named, train.ema)

    @property
    def total_updates(self) -> int:
        train = self.config.train
        return train.epochs * train.inner_epochs * train.updates

    def evaluated_weights(self) -> dict[str, torch.Tensor]:
        """Return the weights that are measured and saved: `eval.weights`."""
        averaged = self.config.eval.weights == "ema"
        return required(self.ema) if averaged else self.policy.weights.snapshot()

    # --- around the epochs -------------------------------------------------------------------------------------------

    def train(self, folder: Path, measured: Functions) -> None:
        """Run the remaining epochs; save in between, at the end, and when asked to stop."""
        train = self.config.train
        log = Log(folder, self.accelerator, train.epochs, self.epoch)
        self.say, self.begun = log.say, time.perf_counter() - self.seconds
        with closing(log), self.stop, saved(self, folder):
            if self.unmeasured:  # the run was stopped in the evaluation of its last epoch
                log.amend(self.measure(folder, measured))
            while self.epoch < train.epochs and not self.best.stopped:
                metrics = self.throughput.epoch(lambda: self.run_epoch() | self.clock.take(), lambda: self.sampled)
                self.reward_wait_seconds += metrics["seconds/reward"]
                self.seconds = time.perf_counter() - self.begun
                self.epoch += 1
                self.unmeasured = bool(self.config.eval.every) and self.epoch % self.config.eval.every == 0
                self.marked = state.counters(self)
                metrics |= {"evaluations": self.marked["evaluations"], "seconds": round(self.seconds, 2)}
                try:
                    if self.unmeasured:
                        metrics |= self.measure(folder, measured)
                finally:
                    log.epoch(self.epoch, metrics, shown(metrics, self.config))
                log.report(self)
                self.saving.look()
                with self.processes.together():
                    self.stop.check()
                last = self.epoch == train.epochs or self.best.stopped
                if last or self.epoch % train.save_every == 0:
                    self.saving(folder, last)

    def measure(self, folder: Path, measured: Functions) -> dict[str, float]:
        """Measure held-out scores after an epoch and return them; the time is not training's."""
        paused = time.perf_counter()
        metrics = held_out.sample_pictures(self, measured, folder)
        self.best.see(metrics, self.epoch, self.evaluated_weights)
        self.unmeasured = self.marked["unmeasured"] = False
        self.begun += time.perf_counter() - paused
        return metrics
