"""Rehearsal of a run: samples of the base model, drawn once, on which the policy is held to it."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from flowgrpo.data.prompts import Prompt
from flowgrpo.errors import UserError
from flowgrpo.methods import capabilities
from flowgrpo.methods.setup import Setup
from flowgrpo.objectives.reductions import reduced
from flowgrpo.samplers.rollout import Part
from flowgrpo.text.policies import engines
from flowgrpo.training.epoch import Epoch
from flowgrpo.training.extension import Extension, Metrics
from flowgrpo.training.optimizer import decisions
from flowgrpo.training.run import Run
from flowgrpo.training.scoring import Scoring
from flowgrpo.types import required


class Rehearsal(Extension):
    """Recorded samples of the base model. A resumed run draws the same ones again, so a checkpoint holds none.

    parts: of this process, on the CPU, once they are drawn; means: the mean divergence of each update of an epoch.
    """

    def __init__(self, trainer: Run):
        super().__init__(trainer)
        self.config, self.processes = trainer.config, trainer.processes
        self.part = required(trainer.method.loss.rehearsal)
        self.parts: list[Part] | None = None
        self.conditioning: Any = None
        self.means: list[Tensor] = []

    @classmethod
    def require(cls, setup: Setup) -> None:
        if setup.method.for_tokens and engines.wanted(setup.config):
            raise UserError("parts.rehearsal samples from the base model, and an engine has the trained one: leave "
                            "text.engine out")

    @classmethod
    def lacks(cls, setup: Setup) -> dict[str, str]:
        return {capabilities.ONE_POLICY: "parts.rehearsal, which replays samples of the base model"}

    def on_credited(self, epoch: Epoch) -> None:
        if self.parts is None:
            self.trainer.with_oom_retry(partial(self._draw, self.trainer.prompts, self.trainer.scoring))

    def _draw(self, prompts: list[Prompt], scoring: Scoring) -> None:
        """Draw and record the base model's samples of some prompts. Raises UserError if none counts."""
        train, rollouts = self.config.train, self.trainer.rollouts
        chosen = random.Random(f"rehearsal/{self.config.seed}").choices(prompts, k=train.prompts)
        batch, parts = self.processes.own(rollouts.geometry.sliced(chosen)), []
        with rollouts.policy.reference(), self.processes.together():
            self.conditioning = rollouts.conditioning(batch, 0)
            judge = partial(scoring.total, batch)
            for part, outputs in rollouts.sample(self.conditioning, 0, judge, partial(scoring.value, batch)):
                parts.append(part if self.part.least is None else self._solved(part, outputs[0], judge))
        self.parts = [replace(part, finals=()) for part in parts if part is not None]
        if not self.processes.any(bool(self.parts)):
            raise UserError(f"parts.rehearsal.least is {self.part.least}, which no sample of the base model reaches: "
                            "lower it, or leave it out")

    def _solved(self, part: Part, outputs: Any, judge: Callable[..., Tensor]) -> Part | None:
        """Return the part without the decisions whose samples earn less than `least` in the mean."""
        latents = part.finals[0].float().cpu() if part.finals else None
        totals = judge(outputs, self.trainer.rollouts.geometry.group, part.prompts, latents).flatten()
        least = required(self.part.least)
        keep = [totals.view(len(taken.parent), -1).nanmean(1) >= least for taken in part.transitions]
        return part.credited([torch.zeros(len(each)) for each in keep], keep)

    def on_backward(self, update: int) -> None:
        """Add the gradient of one part's divergence, that of the update's turn."""
        trainer = self.trainer
        parts, reduction = self.parts or [], self.trainer.rollouts.method.loss.reduction
        part = parts[update % len(parts)] if parts else None
        [count] = self.processes.total([decisions([part] if part else [], reduction)])
        total = torch.zeros(())
        for k, rows, new in self.trainer.rollouts.replay(part, self.conditioning) if part else ():
            old = part.transitions[k].old.rows(rows).to(new.logp.device)
            loss = reduced(self.part(new.logp, old.logp), reduction(new.mask), count)
            trainer.optimization.backward(loss)
            total = total + loss.detach().cpu()
        self.means.append(total / self.part.weight)

    def on_trained(self, epoch: Epoch) -> Metrics:
        """Return the mean divergence of the epoch's updates, over all processes."""
        means, self.means = self.means, []
        return {"rehearsal": self.processes.gather(torch.stack(means).mean()[None]).sum().item()} if means else {}

