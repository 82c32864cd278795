"""Training loop, from prompt to gradient, independent of model and method.

    prompts -> conditioning -> samples -> rewards -> advantages -> replay -> loss -> gradient -> optimizer

`training/sampling.py` draws and scores, `training/credit.py` compares. An `Extension` adds what most runs lack.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from flowgrpo import domains
from flowgrpo.config.geometry import geometry
from flowgrpo.config.schema import Config
from flowgrpo.data.prompts import Prompt
from flowgrpo.device import to_device
from flowgrpo.distributed.processes import Processes
from flowgrpo.distributed.signals import Stop, Stopped
from flowgrpo.log import PhaseTimer
from flowgrpo.methods import validate
from flowgrpo.objectives.reductions import Divisor, reduce_loss
from flowgrpo.policies.policy import Policy
from flowgrpo.samplers.rollout import Part
from flowgrpo.training import credit, endings, epochs, extensions, sampling, state
from flowgrpo.training.epoch import Epoch
from flowgrpo.training.first_ratio import FirstRatio
from flowgrpo.training.kl_reference import make_reference
from flowgrpo.training.metrics import UpdateStats
from flowgrpo.training.optimizer import Optimization, shares
from flowgrpo.training.progress import Progress
from flowgrpo.training.scoring import RewardFunctions, Scoring

if TYPE_CHECKING:
    from accelerate import Accelerator

T = TypeVar("T")


class Trainer:
    """One run: the policy, its prompts, its rewards and its method.

    memory: the state of the method's parts between epochs. progress: what the run has done so far.
    """

    def __init__(self, config: Config, accelerator: Accelerator, policy: Policy, train_rewards: RewardFunctions,
                 prompts: tuple[list[Prompt], list[Prompt]]):
        self.config = config
        self.accelerator = accelerator
        self.policy = policy
        self.prompts, self.held_out = prompts
        self.method = validate.resolve(config, policy.process)
        self.processes = Processes(accelerator, config.memory.context_parallel)
        self.processes.lockstep = policy.turns
        self.geometry = geometry(config.train, self.processes.count)
        self.memory: dict[str, Any] = {}
        self.scoring = Scoring(train_rewards, config.rewards, self.geometry.group, self.processes, self.memory, policy)
        self.clock = PhaseTimer(policy.device.type == "cuda")
        self.stop = Stop(self.processes.members > 1)
        self.log: Callable[[str], None] = print
        make_rollouts = domains.sampled_by(policy.process).rollouts
        self.rollouts = make_rollouts(config, policy, self.method, self.geometry, self.processes, self.clock,
                                      first=self.prompts[0])
        self.rollouts.decodes = self.scoring.reads_outputs
        self.extensions = extensions.make_extensions(self)  # some add weights, so that they are before the optimizer
        self.processes.require_equal(policy.weights.parameters())
        self.optimization = Optimization(config, policy, self.processes, not self.extensions.add_gradients)
        self.kl_reference = make_reference(config.train, self.method, policy, self.memory)
        self.first_ratio = FirstRatio(self.rollouts)
        self.epoch = 0
        self.progress = Progress.begin(policy, self.processes, extensions.best_weights(config, self.method))
        self.progress.saved_counters = state.counters(self)

    # --- one epoch, read from top to bottom --------------------------------------------------------------------------

    def run_epoch(self) -> dict[str, Any]:
        """Run one epoch, from prompts to gradient; return its metrics.

        Every process samples its share of the epoch's prompts; comparisons are over all of them.
        """
        with self.extensions.around_epoch():
            # Sample and score groups.
            epoch = self.extensions.draw_epoch() or sampling.draw(self)
            # Let the curriculum and the extensions see them.
            self.method.curriculum.learn(self.memory, epoch.groups)
            epoch.metrics |= self.scoring.epoch_metrics(epoch.groups, self.epoch, self.log) | epoch.groups.metrics()
            self.extensions.on_drawn(epoch)
            # Compare within groups, then learn.
            epoch.parts = credit.compare(self, epoch)
            return self.train_on(epoch)

    def train_on(self, epoch: Epoch) -> dict[str, Any]:
        """Learn from an epoch whose parts have advantages; return its metrics."""
        if self.first_ratio.max_log_ratio is None or self.first_ratio.rescore:  # in a run's first epoch, as a rule
            with self.clock("first_ratio"):
                self.with_oom_retry(partial(self.first_ratio.check, epoch, self.rollouts, self.log), "update")
        epoch.weights = self.rollouts.step_weights(epoch.parts, self.epoch)
        self.extensions.on_credited(epoch)
        epoch.metrics |= self.learn(epoch)
        epoch.metrics |= self.extensions.on_trained(epoch)
        return epoch.metrics | self.kl_reference.end(self.epoch, epoch.metrics.get("kl"))

    def learn(self, epoch: Epoch) -> dict[str, Any]:
        """Replay the recorded decisions and minimise the method's loss: `updates` optimizer steps per inner epoch.
        Every process adds the gradient of its own parts; one that has none in a step still takes part in it."""
        stats = UpdateStats()
        self.kl_reference.start_epoch(epoch, self.rollouts, self.epoch, self.config.train.epochs)
        with self.clock("update"):
            self.with_oom_retry(partial(self.kl_reference.score_all, epoch.parts, self.processes))
        for _ in range(self.config.train.inner_epochs):
            steps = shares(epoch.parts + epoch.left_out, self.geometry, self.processes, self.method.loss.reduction)
            for share, count in self.extensions.add_steps(steps):
                with self.clock("update"):
                    stats.batches += self.with_oom_retry(partial(self.gradient, epoch, share, count))
                    self.optimization.gradients.finish(self.log)
                    self.extensions.on_gradients(self.optimization.update)
                    with self.processes.collective():
                        stats.norms.append(self.optimization.step(self.extensions.on_stepped))
        self.scoring.offload()  # a reward whose gradient was followed
        metrics = stats.summary(self.processes) | self.rollouts.metrics()
        return metrics | {"skipped_updates": self.optimization.skipped}

    def gradient(self, epoch: Epoch, share: list[Part], count: Divisor) -> list[torch.Tensor]:
        """Compute the gradient of one optimizer step's parts anew; return the statistics of their decisions."""
        stats = UpdateStats()
        self.optimization.zero_grad()
        self.rollouts.gather_groups(share, epoch.conditioning, self.kl_reference.scores)
        with self.processes.collective(), self.optimization.gradients.step():
            for part in self.processes.in_step(share, self.kl_reference.calls_of, before=self.stop_if_asked):
                self.backward(epoch, part, count, stats, part is share[-1])
            self.extensions.on_backward(self.optimization.update)
        return stats.batches

    def backward(self, epoch: Epoch, part: Part, count: Divisor, stats: UpdateStats, last: bool = False) -> None:
        """Add one part's gradient, a batch of one recorded step at a time.
        count: the divisor of every loss, `decisions` of the whole optimizer step. last: it is the step's last part."""
        method_loss, reference, device = self.method.loss, self.kl_reference, self.policy.device
        left = sum(len(transitions.old.mask) for transitions in part.transitions)
        # Replay: log-probabilities of the recorded decisions under the present weights.
        reference_scores = reference.scores(part)
        loss_inputs = self.rollouts.loss_inputs(part, epoch.conditioning, reference_scores)
        for batch, (k, rows, new) in enumerate(self.rollouts.replay(part, epoch.conditioning)):
            transitions = part.transitions[k]
            old = transitions.old.rows(rows).to(device)
            advantage = to_device(part.advantage(k, rows), device)
            log_ratio = method_loss.log_ratio(new, old)
            loss_extras = loss_inputs(batch, k, rows, new, old)
            # Loss: the surrogate, its weights, and what is added to it.
            loss = method_loss.surrogate(log_ratio, advantage, loss_extras)
            over_tokens = method_loss.surrogate.over_tokens(loss_extras)
            loss = loss if over_tokens is None else loss - over_tokens
            clipped = method_loss.surrogate.clip_mask(log_ratio, advantage, loss_extras)
            loss = loss * (part.weights or epoch.weights)[transitions.step]
            if transitions.importance is not None:  # decisions that other weights or another program drew
                loss = loss * to_device(transitions.importance[rows], device)
            penalty = None
            if reference.kl.weight:
                penalty = reference.penalty(new, reference_scores[batch], part.rewards[k][rows])
                loss = loss + penalty
            if transitions.regression_target is not None:
                loss = loss + self.method.tuning(new, transitions.regression_target.rows(rows).to(device))
            # Gradient.
            total = reduce_loss(loss, method_loss.reduction(new.mask), count)
            if over_tokens is not None:
                total = total + reduce_loss(over_tokens, new.mask, count.tokens)
                loss = loss + over_tokens
            left -= len(new.mask)
            self.optimization.backward(total, last and not left)
            stats.add(transitions.step, new.mask, log_ratio, clipped, loss,
                      None if penalty is None else penalty / reference.kl.weight)

    # --- around the epochs -------------------------------------------------------------------------------------------

    def train(self, folder: Path, measured: RewardFunctions) -> None:
        """Run the remaining epochs; save in between, at the end, and when asked to stop."""
        epochs.run(self, folder, measured)

    def stop_if_asked(self) -> None:
        """Raise Stopped if a stop was requested and this epoch has changed nothing that a checkpoint holds."""
        if self.optimization.update == self.progress.saved_counters["update"] and not self.extensions.change:
            self.stop.asked = self.processes.any_of_team(self.stop.asked)
            if self.stop.asked:
                raise Stopped

    def with_oom_retry(self, work: Callable[[], T], phase: str = "") -> T:
        """Repeat work with half the micro-batch while memory runs out. phase: its name, or the clock's."""
        return endings.with_oom_retry(self, work, phase)
