"""Rehearsal: samples of the base model, drawn once, on which the policy is held to it by a divergence."""

import math
import random
from dataclasses import replace
from functools import partial
from typing import Annotated, Any, Literal

import torch
from torch import Tensor

from flowgrpo.errors import UserError
from flowgrpo.methods import capabilities
from flowgrpo.methods.setup import Setup
from flowgrpo.objectives.reductions import reduce_loss
from flowgrpo.parts import Above, part
from flowgrpo.samplers.rollout import Part
from flowgrpo.text.policies import engines
from flowgrpo.training.epoch import Epoch
from flowgrpo.training.extension import Extension, Metrics, Run
from flowgrpo.training.optimizer import decisions
from flowgrpo.types import unwrap


class RehearsedSamples(Extension):
    """Recorded samples of the base model. A resumed run draws the same ones again, so a checkpoint holds none.

    parts: of this process, on the CPU, once they are drawn; means: the mean divergence of each update of an epoch.
    """

    lacks = {capabilities.ONE_POLICY: "parts.rehearsal, which replays samples of the base model"}

    def __init__(self, trainer: Run):
        super().__init__(trainer)
        self.config, self.processes = trainer.config, trainer.processes
        self.part = unwrap(trainer.method.loss.rehearsal)
        self.parts: list[Part] | None = None
        self.conditioning: Any = None
        self.means: list[Tensor] = []

    @classmethod
    def require(cls, setup: Setup) -> None:
        if setup.method.for_tokens and engines.uses_engine(setup.config):
            raise UserError("parts.rehearsal samples from the base model, and an engine has the trained one: leave "
                            "text.engine out")

    def on_credited(self, epoch: Epoch) -> None:
        if self.parts is None:
            self.trainer.with_oom_retry(self._draw)

    def _draw(self) -> None:
        """Draw and record the base model's samples of some prompts. Raises UserError if none counts."""
        train, rollouts, scoring = self.config.train, self.trainer.rollouts, self.trainer.scoring
        chosen = random.Random(f"rehearsal/{self.config.seed}").choices(self.trainer.prompts, k=train.prompts)
        batch, parts = self.processes.own(rollouts.geometry.repeat_per_slice(chosen)), []
        with rollouts.policy.reference(), self.processes.collective():
            self.conditioning = rollouts.conditioning(batch, 0)
            judge = partial(scoring.total, batch)
            for part, outputs in rollouts.sample(self.conditioning, 0, judge, partial(scoring.value, batch)):
                solved: Part | None = part
                if self.part.least is not None:  # without decisions whose samples earn less in the mean
                    latents = part.finals[0].float().cpu() if part.finals else None
                    totals = judge(outputs[0], rollouts.geometry.group, part.prompts, latents).flatten()
                    keep = [totals.view(len(taken.parent), -1).nanmean(1) >= self.part.least
                            for taken in part.transitions]
                    solved = part.with_advantages([torch.zeros(len(each)) for each in keep], keep)
                parts.append(solved)
        self.parts = [replace(part, finals=()) for part in parts if part is not None]
        if not self.processes.any(bool(self.parts)):
            raise UserError(f"parts.rehearsal.least is {self.part.least}, which no sample of the base model reaches: "
                            "lower it, or leave it out")

    def on_backward(self, update: int) -> None:
        """Add the gradient of one part's divergence in turn: a mean over decisions, whatever the loss."""
        trainer, parts = self.trainer, self.parts or []
        part = parts[update % len(parts)] if parts else None
        [count] = self.processes.total([decisions([part] if part else [])])
        total = torch.zeros(())
        for k, rows, new in self.trainer.rollouts.replay(part, self.conditioning) if part else ():
            old = part.transitions[k].old.rows(rows).to(new.logp.device)
            loss = reduce_loss(self.part(new.logp, old.logp), new.mask, count)
            trainer.optimization.backward(loss)
            total = total + loss.detach().cpu()
        self.means.append(total / self.part.weight)

    def on_trained(self, epoch: Epoch) -> Metrics:
        means, self.means = self.means, []
        return {"rehearsal": self.processes.gather(torch.stack(means).mean()[None]).sum().item()} if means else {}


@part("rehearsal")
class Rehearsal:
    """weight * D(policy, base), an f-divergence: it covers all modes of the base model, on samples that the base
    generated once (DPH-RL, 2509.07430), [B, N].

    Every optimizer step adds the mean of f(u), u = p / p_base, over the decisions of one part of the recorded samples:
    train.prompts groups, drawn before the first update with their log-probabilities.

    divergence: "forward_kl": f = -log u, KL(base || policy). "js": f = u log u - (u + 1) log((u + 1) / 2), twice the
        Jensen-Shannon divergence. "alpha": f = (u^(1 - alpha) - (1 - alpha) u - alpha) / (alpha (alpha - 1)), between
        the reverse KL (alpha near 0) and the forward one (near 1), with alpha and its default as in the released code.
    least: samples with a lower total reward are left out (the paper rehearses what the base solves); None: none is.
    """

    weight: Annotated[float, Above(0, below=math.inf)] = 0.1
    divergence: Literal["forward_kl", "js", "alpha"] = "forward_kl"
    alpha: float = 0.2
    least: float | None = None

    def __post_init__(self) -> None:
        if self.alpha in (0, 1):
            raise ValueError(f"Rehearsal: alpha is {self.alpha}, expected another number: 1 is forward_kl")

    def __call__(self, logp: Tensor, base: Tensor) -> Tensor:
        """weight * f(u) of log-probabilities [B, N] of the policy and of the base model: [B, N]."""
        log_ratio = logp - base
        if self.divergence == "forward_kl":
            return -self.weight * log_ratio
        ratio = log_ratio.exp()
        if self.divergence == "js":
            return self.weight * (ratio * log_ratio - (ratio + 1) * (log_ratio.expm1() / 2).log1p())
        power = 1 - self.alpha
        return self.weight * (power * log_ratio.expm1() - (power * log_ratio).expm1()) / (power * self.alpha)
