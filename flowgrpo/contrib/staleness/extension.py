"""Epochs that are drawn ahead of their update: asynchronous rewards with bounded staleness (AReaL, 2505.24298).

With `train.staleness` N, epoch k + N is sampled before the update of epoch k, while a thread computes the rewards of
epochs k + 1 to k + N. So an epoch is trained by weights that are at most N epochs newer than those that drew it. Groups
of partial rollouts (`partial_rollouts`) have tokens of several epochs' weights. The loss of both is decoupled:
(pi_prox / pi_behaviour) * clipped(pi / pi_prox). The proximal policy is the one before the update, around which the
surrogate clips, and the behaviour policy is the one that drew the decision (`behaviour_weights`).
"""

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from flowgrpo.config.features import DryRun
from flowgrpo.config.schema import Config
from flowgrpo.contrib.features import PartialRolloutKeys, StalenessKeys
from flowgrpo.contrib.staleness.partial_rollouts import Pool
from flowgrpo.contrib.staleness.rollout_ranks import KEY, Drawn, RolloutRanks
from flowgrpo.data.prompts import Prompt, as_line, of_records
from flowgrpo.distributed.sides import Side
from flowgrpo.methods import capabilities
from flowgrpo.methods.setup import Setup
from flowgrpo.objectives.ratios import LogRatio
from flowgrpo.rewards.reward import EPOCH, MEMORY, POLICY, inside
from flowgrpo.rollouts.base import Outputs
from flowgrpo.samplers.growth import rescore
from flowgrpo.samplers.rollout import Part
from flowgrpo.storage.checkpoint import Tensors, within
from flowgrpo.text.credit import StepScores
from flowgrpo.text.policies import engines
from flowgrpo.text.samplers.groups import Independent
from flowgrpo.training import sampling
from flowgrpo.training.epoch import Epoch
from flowgrpo.training.extension import Extension, Metrics, Run
from flowgrpo.training.memory import Measured
from flowgrpo.training.state import restore_part, store_part
from flowgrpo.types import Completion, Scored, unwrap


def add(phases: dict[str, dict[str, int]], measured: Measured) -> None:
    """Add the recorded states of the epochs that wait to all phases."""
    for parts in phases.values():
        parts["epochs drawn ahead"] = measured.recorded * StalenessKeys.read(measured.config).staleness


def behaviour_weights(log_ratio: Tensor, mask: Tensor, cap: float) -> Tensor:
    """Weight pi_prox / pi_behaviour [B, N] of decisions, without a gradient: 0 above the cap, 1 where mask is false.

    log_ratio: [B, N], the method's, of the proximal policy to the behaviour policy.
    """
    excess = log_ratio.detach().masked_fill(~mask, 0.0)
    return excess.exp().masked_fill(excess > math.log(cap), 0.0)


class Staleness(Extension):
    """Epochs that are drawn ahead. bound: how many, 0 or more. cap: of the weights of their decisions."""

    name = "ahead"
    needs = frozenset({capabilities.ONE_DRAW, capabilities.AS_LEARNED, capabilities.OWN_SAMPLES,
                       capabilities.RECORDABLE, capabilities.ENCODED_ONCE})

    def __init__(self, trainer: Run):
        super().__init__(trainer)
        settings, self.run = StalenessKeys.read(trainer.config), trainer
        self.pool = Pool(trainer) if PartialRolloutKeys.read(trainer.config).over_provision else None
        self.bound, self.cap = settings.staleness, settings.staleness_cap
        self.queue: list[Drawn] = []
        self.current: Drawn | None = None
        self.weights: list[torch.Tensor] = []  # [n] of the decisions that older weights drew, of the present epoch
        self._before: tuple[int, list[Drawn], Any] = (-1, [], None)  # an epoch, and the queue and pool before it began
        self._last: sampling.Scorer | None = None
        side: Any = trainer.accelerator
        self.ranks = RolloutRanks(trainer, side, self.bound) if isinstance(side, Side) else None

    @classmethod
    def enabled_by(cls, setup: Setup) -> str:
        extra = PartialRolloutKeys.read(setup.config).over_provision
        staleness = StalenessKeys.read(setup.config).staleness
        return f"text.over_provision is {extra:g}" if extra else f"train.staleness is {staleness}"

    @classmethod
    def requirements(cls, setup: Setup) -> frozenset[str]:
        ranks = StalenessKeys.read(setup.config).rollout_ranks
        return cls.needs | ({capabilities.WHOLE_WEIGHTS} if ranks else set())

    @classmethod
    def missing(cls, setup: Setup) -> dict[str, str]:
        key = "train.staleness" if StalenessKeys.read(setup.config).staleness else "text.over_provision"
        return {capabilities.PRESENT_WEIGHTS: f"{key}, whose samples earlier weights drew"}

    @classmethod
    def conflicts(cls, setup: Setup) -> dict[str, bool]:
        config, method = setup.config, setup.method
        loss, parts = method.loss, [(name, part) for name, reward in setup.trained.items() for part in inside(reward)]
        wrong = {
            "memory.context_parallel, whose first process scores": config.memory.context_parallel > 1,
            f"a method that trains {method.target.trains}": not method.target.has_logp,
            f"the surrogate {type(loss.surrogate).__name__}, which compares samples": loss.surrogate.reads_groups,
            f"the reference {type(loss.reference).__name__}, whose prompts are of one epoch": method.teaches_itself,
            "memory.rewards: cpu": config.memory.rewards == "cpu",
            f"{KEY} and text.engine or text.engine_precision, which have not been tried together":
                StalenessKeys.read(config).rollout_ranks > 0 and engines.uses_engine(config)}
        if PartialRolloutKeys.read(config).over_provision:
            rollout, spread = method.generation, method.credit.spread
            wrong = {f"{setup.all_processes} processes": setup.all_processes > 1} | wrong | {
                "text.engine or text.engine_precision, which draw whole completions": engines.uses_engine(config),
                f"parts.draws {type(rollout.draws).__name__}": not isinstance(rollout.draws, Independent),
                "greedy samples or answers in a group": bool(rollout.decoding.greedy or rollout.decoding.expert),
                f"parts.spread {type(spread).__name__}, which draws or scores segments":
                    isinstance(spread, StepScores) or bool(spread and spread.samples),
                f"the surrogate {type(loss.surrogate).__name__}, which reads all tokens": loss.surrogate.reads_uniform}
        wrong |= {f"the reward {name!r}, which remembers earlier epochs": True for name, part in parts
                  if {MEMORY, EPOCH} & part.reads}
        return wrong | {f"the reward {name!r}, which reads the policy": True for name, part in parts
                        if POLICY in part.reads}

    # --- the run -----------------------------------------------------------------------------------------------------

    def whole_run(self, run: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        if self.ranks is None:
            return run()
        return self.ranks.follow(self._sample_epoch) if self.ranks.side.samples else self.ranks.lead(run)

    # --- one epoch ---------------------------------------------------------------------------------------------------

    def draw_epoch(self) -> Epoch:
        """Draw epochs as far ahead as the bound allows, and wait for the rewards of the present one. Raises the error
        of a reward of any epoch that is drawn."""
        run, epochs, every = self.run, self.run.config.train.epochs, self.run.config.eval.every
        if self.ranks is not None:
            with run.clock("rollout"), run.processes.collective():
                self.current, scores = self.ranks.assemble(self.ranks.receive())
            run.clock.seconds["reward"] += 0.0  # rewards are waited for elsewhere
            return self._make_epoch(self.current, scores)
        self._before = run.epoch, [*self.queue], self.pool and self.pool.state()
        self.queue = [drawn for drawn in self.queue if drawn.epoch >= run.epoch]
        with run.processes.collective():  # a reward that has failed on one process ends the run on all
            for drawn in self.queue:
                if drawn.scoring is None:
                    self._score(drawn)
                for future in drawn.pending:
                    if future.done():
                        future.result()
        last = self.queue[-1].epoch if self.queue else run.epoch - 1
        for epoch in range(last + 1, min(run.epoch + self.bound, epochs - 1) + 1):
            self.queue.append(self._sample_epoch(epoch))
        self.current = self.queue.pop(0)
        with run.clock("reward"), run.processes.collective():
            scores = sampling.columns(run, unwrap(self.current.scorer).results(self.current.pending))
            if every and (run.epoch + 1) % every == 0:  # an evaluation calls the same rewards
                for waiting in self.queue:
                    unwrap(waiting.scorer).results(waiting.pending)
        scores = run.processes.gather(scores).flatten(0, 1)
        return self._make_epoch(self.current, scores.unflatten(0, (-1, run.config.train.group)))

    def _sample_epoch(self, epoch: int) -> Drawn:
        """Sample the groups of an epoch, and begin to score them."""
        run = self.run
        if self.pool is None:
            batch = sampling.choose_prompts(run, epoch)
            drawn = run.with_oom_retry(partial(self._sample_batch, epoch, batch))
        else:
            whole = run.with_oom_retry(partial(self.pool.draw, epoch))
            prompts = [prompt for prompt, _ in whole]
            versions = torch.cat([group.versions[group.token_mask] for _, group in whole])  # of weights, by token
            drawn = Drawn(epoch, run.epoch, int(versions.min()), prompts, prompts,
                          older=(int((versions < run.optimization.update).sum()), len(versions)))
            for part, outputs in self.pool.parts(whole):
                drawn.parts.append(part)
                drawn.outputs.append(outputs)
            self._score(drawn)
        run.progress.sampled += len(drawn.batch) * run.config.train.group
        return drawn

    def _sample_batch(self, epoch: int, batch: list[Prompt]) -> Drawn:
        run = self.run
        own = run.processes.own(run.geometry.repeat_per_slice(batch))
        drawn = Drawn(epoch, run.epoch, run.optimization.update, batch, own)
        run.geometry.start_turn()
        with run.processes.collective(), self._scoring(drawn):
            drawn.conditioning = run.rollouts.conditioning(own, epoch)
            parts = sampling.sample_parts(run, unwrap(drawn.scoring), drawn.conditioning, own, epoch, 0)
            for part, outputs in parts:
                drawn.parts.append(part)
                drawn.outputs.append(outputs)
                self._submit(drawn, part, outputs)
        return drawn

    def _score(self, drawn: Drawn) -> None:
        with self._scoring(drawn):
            drawn.conditioning = self.run.rollouts.conditioning(drawn.prompts, drawn.epoch)
            for part, outputs in zip(drawn.parts, drawn.outputs):
                self._submit(drawn, part, outputs)

    @contextlib.contextmanager
    def _scoring(self, drawn: Drawn) -> Iterator[None]:
        """Context manager: a thread scores what is submitted, behind the epochs before, and goes on after the end."""
        run = self.run
        drawn.scoring, drawn.scorer = run.scoring.fork(), sampling.Scorer(run.stop, after=self._last).start()
        drawn.scoring.start_epoch(drawn.epoch, run.config.train.epochs, run.memory)
        try:
            yield
            self._last = drawn.scorer
        finally:
            drawn.scorer.end(drop=self._last is not drawn.scorer)

    def _submit(self, drawn: Drawn, part: Part, outputs: Sequence[Outputs | None]) -> None:
        drawn.pending += sampling.submit(self.run, unwrap(drawn.scoring), unwrap(drawn.scorer), drawn.prompts, part,
                                         outputs, unwrap(drawn.conditioning))

    def _make_epoch(self, drawn: Drawn, scores: torch.Tensor) -> Epoch:
        """Epoch of the scores [P,G,R] of all processes, and of parts whose old policy is the present one."""
        run = self.run
        run.scoring.adopt(unwrap(drawn.scoring))
        run.scoring.start_epoch(run.epoch, run.config.train.epochs, run.memory)
        epoch_batch, count = sampling.empty_batch(run, drawn.epoch), len(run.scoring.functions)
        epoch_batch.add(drawn.batch, scores, run.scoring.sum_rewards(scores[..., :count]),
                        *sampling.group_signals(run, drawn.parts, len(drawn.batch)))
        parts, self.weights = drawn.parts, []
        if drawn.update != run.optimization.update:
            parts = run.with_oom_retry(partial(self.decouple, drawn), "update")
        return Epoch(epoch_batch, drawn.prompts, parts, unwrap(drawn.conditioning))

    def decouple(self, drawn: Drawn) -> list[Part]:
        """Parts of an epoch that older weights drew, scored by the present ones."""
        run = self.run
        with torch.no_grad(), run.clock("rescore"), run.processes.collective():
            parts = [decouple_part(part, run.rollouts.replay(part, drawn.conditioning), run.method.loss.log_ratio,
                                   self.cap)
                     for part in drawn.parts]
        self.weights = [unwrap(taken.importance).cpu()[taken.old.mask.cpu()] for part in parts
                        for taken in part.transitions]
        return parts

    def on_trained(self, epoch: Epoch) -> Metrics:
        """Age of the present epoch's weights in epochs, mean weight of its decisions, and the share above the cap. Of
        partial rollouts also the share of trained tokens older than their epoch's draw."""
        current = unwrap(self.current)
        own = torch.cat([torch.empty(0), *self.weights]).double()
        sums = torch.stack([own.sum(), (own == 0).sum(), torch.tensor(len(own))])
        weight, above, count = self.run.processes.gather(sums[None]).sum(0).tolist()
        metrics: Metrics = {"staleness/epochs": current.epoch - current.at,
                            "staleness/weight": weight / count if count else 1.0,
                            "staleness/above": above / max(count, 1)}
        if self.pool is not None:
            before, every = current.older
            metrics |= {"partial/older": before / every, "partial/groups": len(self.pool.groups)}
        if self.ranks is not None:
            self.ranks.publish(self.run.epoch + 1)
            metrics |= self.ranks.bytes()
        return metrics

    def close(self) -> None:
        for drawn in self.queue:
            if drawn.scorer is not None:
                drawn.scorer.end(drop=True)

    # --- checkpoints -------------------------------------------------------------------------------------------------

    def state(self) -> tuple[Tensors, dict[str, Any]]:
        """Samples and outputs of the epochs that were drawn at the end of the last whole one; their scores are computed
        again. Of several processes, each with samples of its own, nothing is stored: a resumed run samples anew."""
        if self.ranks is not None:
            return self.ranks.state()
        if self.run.processes.count > 1:
            return {}, {}
        begun, queue, pool = self._before
        if begun != self.run.epoch:
            queue, pool = self.queue, self.pool and self.pool.state()
        groups, values = pool or ({}, {})
        tensors: Tensors = {f"pool.{name}": value for name, value in groups.items()}
        listed = []
        for place, drawn in enumerate(queue):
            parts = []
            for number, (part, outputs) in enumerate(zip(drawn.parts, drawn.outputs)):
                kept, of = store_part(part)
                shown = {f"output.{granularity}": output.cpu().clone() for granularity, output in enumerate(outputs)
                         if isinstance(output, torch.Tensor)}
                # Texts with their tokens' number and the tags before them.
                texts = [[[str(text), getattr(text, "tokens", 0), getattr(text, "opened", "")] for text in output]
                         if isinstance(output, list) else None for output in outputs]
                tensors |= {f"{place}.{number}.{name}": value for name, value in (kept | shown).items()}
                parts.append(of | {"outputs": texts})
            listed.append({"epoch": drawn.epoch, "at": drawn.at, "update": drawn.update, "older": drawn.older,
                           "parts": parts, "prompts": [as_line(prompt) for prompt in drawn.prompts]})
        return tensors, {"drawn": listed, "pool": values}

    def load_state(self, tensors: Tensors, values: dict[str, Any]) -> None:
        """Restore the epochs of a checkpoint; the next draw scores them. Several processes sample them anew."""
        self.queue = []
        if self.ranks is not None:
            self.ranks.load_state(tensors, values)
            return
        if self.run.processes.count > 1:
            return
        for place, entry in enumerate(values.get("drawn", ())):
            prompts = of_records(entry["prompts"])
            drawn = Drawn(entry["epoch"], entry["at"], entry["update"], prompts, prompts,
                          older=(entry["older"][0], entry["older"][1]))
            for number, part in enumerate(entry["parts"]):
                own = within(tensors, f"{place}.{number}.")
                drawn.parts.append(restore_part(own, part, self.run.rollouts, drawn.epoch))
                drawn.outputs.append([own.get(f"output.{granularity}") if of is None else
                                      [Completion(text, tokens, (), *opened) for text, tokens, *opened in of]
                                      for granularity, of in enumerate(part["outputs"])])
            self.queue.append(drawn)
        if self.pool is not None:
            self.pool.load_state(within(tensors, "pool."), values.get("pool", {}))


class StaleDryRun(DryRun):
    """Epochs drawn as ever, and scored again as those that older weights drew: without a thread, and without a queue,
    whose bytes are counted beside the epoch."""

    def begin(self, trainer: Any) -> None:
        present = trainer.extensions.present
        trainer.extensions.present = [Rescored(each) if isinstance(each, Staleness) else each for each in present]

    def waiting(self, config: Config) -> int:
        return StalenessKeys.read(config).staleness


class Rescored(Extension):
    """Stand-in for `Staleness` in a dry run."""

    def __init__(self, staleness: Staleness):
        super().__init__(staleness.trainer)
        self.staleness = staleness

    def draw_epoch(self) -> Epoch:
        """Draw an epoch and score its parts with the weights before the update."""
        trainer, epoch = self.trainer, sampling.draw(self.trainer)
        drawn = Drawn(trainer.epoch, trainer.epoch - 1, 0, epoch.groups.prompts, epoch.own, epoch.parts,
                      conditioning=epoch.conditioning)
        epoch.parts = self.staleness.decouple(drawn)
        return epoch


def decouple_part(part: Part, replayed: Iterator[tuple[int, slice, Scored]], log_ratio: LogRatio, cap: float) -> Part:
    """Part that older weights drew, whose old scores are those of its replay, the proximal policy's. Its decisions are
    weighted by `behaviour_weights`, times the correction that they have."""
    weights = [torch.ones_like(taken.old.logp, dtype=torch.float32) for taken in part.transitions]

    def weigh_rows() -> Iterator[tuple[int, slice, Scored]]:
        for k, rows, new in replayed:
            behaviour = part.transitions[k].old.rows(rows).to(new.logp.device)
            weights[k][rows] = behaviour_weights(log_ratio(new, behaviour), new.mask, cap).to(weights[k])
            yield k, rows, new

    proximal = rescore(part, weigh_rows())
    return replace(proximal, transitions=tuple(
        replace(taken, importance=weight if before.importance is None else weight * before.importance.to(weight))
        for taken, before, weight in zip(proximal.transitions, part.transitions, weights)))
