"""Measurements that a method's credit reads: entropies, log-probabilities under the reference, drift of the policy; and
its value model, or the quality head of its draws (`text.critic`).

A measurement is one replay of recorded decisions without gradients, for methods that need it alone (`Method.needs`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from flowgrpo.advantages.gae import Recall
from flowgrpo.distributed.processes import Processes
from flowgrpo.methods.method import Method
from flowgrpo.samplers.rollout import Part
from flowgrpo.training.epoch import Epoch
from flowgrpo.training.extension import Extension, Metrics
from flowgrpo.training.kl_reference import KLReference
from flowgrpo.training.replay_buffer import Recalling
from flowgrpo.training.run import Run
from flowgrpo.types import Scored, required

Replay = Callable[[Part], Iterator[tuple[int, slice, Scored]]]


class MeasuredCredit(Extension):
    """Measurements that the credit reads besides rewards: taken before rewards are compared, and after the updates."""

    def on_drawn(self, epoch: Epoch) -> None:
        epoch.parts = self.trainer.with_oom_retry(partial(self._examined, epoch), "update")

    def _examined(self, epoch: Epoch) -> list[Part]:
        trainer, parts, replay = self.trainer, epoch.parts, self._replay(epoch)
        if trainer.method.needs:
            parts = measured(trainer.method, parts, replay, trainer.kl_reference, trainer.processes)
        trainer.kl_reference.score_samples(parts, replay, trainer.processes)
        return parts

    def on_trained(self, epoch: Epoch) -> Metrics:
        trainer = self.trainer
        if "drift" in trainer.method.needs:
            trainer.with_oom_retry(partial(drifted, trainer.method, trainer.memory, epoch.parts, self._replay(epoch),
                                   trainer.processes), "update")
        return {}

    def _replay(self, epoch: Epoch) -> Replay:
        return partial(self.trainer.rollouts.replay, conditioning=epoch.conditioning)


@torch.no_grad()
def measured(method: Method, parts: list[Part], replay: Replay, reference: KLReference, processes: Processes
             ) -> list[Part]:
    """Return the parts with the entropies of their decisions and their log-probabilities under the reference, as far
    as the credit reads them; the policy is still the one that drew them."""
    if "entropy" in method.needs:
        with processes.collective():
            parts = [_with_entropies(part, replay(part)) for part in parts]
    if "reference" in method.needs:
        with processes.collective():
            parts = [part.with_measured(reference=reference.leaves(part, replay)) for part in parts]
    return parts


def _with_entropies(part: Part, replayed: Iterator[tuple[int, slice, Scored]]) -> Part:
    entropies = [torch.zeros_like(taken.old.logp) for taken in part.transitions]
    for k, rows, new in replayed:
        entropies[k][rows] = required(new.entropy).to(entropies[k])
    return replace(part, transitions=tuple(replace(taken, old=replace(taken.old, entropy=entropy))
                                           for taken, entropy in zip(part.transitions, entropies)))


def drifted(method: Method, memory: dict[str, Any], parts: list[Part], replay: Replay, processes: Processes) -> None:
    """Add an epoch's `drift` to memory["drift"], where decisions have a log-probability."""
    if method.target.has_logp:
        memory["drift"] = memory.get("drift", 0.0) + drift(parts, replay, processes)


@torch.no_grad()
def drift(parts: list[Part], replay: Replay, processes: Processes) -> float:
    """Return the KL of the policy that drew the parts to the present one: the mean of r - 1 - log r over the decisions
    of all processes, without those drawn under guidance that is not learned; 0 without any."""
    terms = [torch.empty(0)]
    with processes.collective():
        for part in parts:
            for k, rows, new in replay(part):
                old = part.transitions[k].old.rows(rows)
                log_ratio, counted = new.logp.float().cpu() - old.logp.float().cpu(), new.mask.cpu()
                if old.guided is not None:
                    counted = counted & ~old.guided.cpu()[:, None]
                terms.append((log_ratio.expm1() - log_ratio)[counted])
    every = processes.gather(torch.cat(terms))
    return every.mean().item() if len(every) else 0.0


class ValueModel(Extension):
    """Gives parts the advantages of their tokens, and learns from an epoch's returns behind its updates."""

    name = "critic"
    changes = True

    def __init__(self, trainer: Run):
        super().__init__(trainer)
        self.critic: Any = _critic(trainer)

    def on_credited(self, epoch: Epoch) -> None:
        self.critic.geometry = self.trainer.geometry
        epoch.parts = self.critic(epoch.parts, epoch.conditioning)

    def on_trained(self, epoch: Epoch) -> Metrics:
        with self.trainer.clock("update"):
            return self.critic.fit()

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        return self.critic.state()

    def load_state(self, tensors: dict[str, Tensor], values: dict[str, Any]) -> None:
        self.critic.load_state(tensors, values)


def _critic(trainer: Run) -> Any:
    """Return the value model of edits, or of a language model, or the quality head of its draws."""
    part = trainer.method.credit.value
    policy: Any = trainer.policy  # of edits, or of texts
    if isinstance(part, Recall):
        return Recalling(part, policy.editor, trainer.processes)
    from flowgrpo.text.critic import make_critic

    return make_critic(trainer.method, policy, trainer.geometry, trainer.processes)
