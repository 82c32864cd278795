"""Signals of an optimizer step: how far it moves what the policy samples.

Two readings of a few recorded decisions, under the weights before a step and behind it, give one number, which is
linear in a small step.

Of a signal `name` is printed; `reach` is the factor by which a step is larger when it is read: the signal is still
linear there, and rounding, which is of one size, matters less. `read` replays its decisions under the present weights;
`rollout_reading` is what the rollout recorded of them, None where it has to be replayed. `sums` of two readings, (sum
of changes, what it is divided by), are added over processes; `size` is the signal of these.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import torch
from torch import Tensor

from flowgrpo.device import to_device
from flowgrpo.samplers.rollout import Part
from flowgrpo.types import Completions, Transitions

Reading: TypeAlias = list[Tensor]
LARGEST = 20.0  # |log ratio| of a token from which on it is cut: its exponential would be all of the sum


def spread(sizes: Sequence[int], count: int) -> list[Tensor]:
    """Places of `count` rows, or of all, evenly spread over tables of these sizes: int64, one tensor each."""
    total = sum(sizes)
    kept = torch.zeros(total, dtype=torch.bool)
    if total:
        kept[torch.linspace(0, total - 1, min(count, total), dtype=torch.float64).round().long()] = True
    return [at.nonzero()[:, 0] for at in kept.split([*sizes])]


class Velocity:
    """|dv| / |v|: relative change of the predicted velocity, or noise, on recorded states.

    It does not depend on the number of latent values or of trained steps. A rollout records log-probabilities and no
    velocities, and from those |dv| has a sampling error of a fifth on 12 states, so that both readings are replayed.
    """

    name = "relative change of the predicted velocity"
    reach = 8.0

    def __init__(self, trainer: Any, parts: Sequence[Part], conditioning: Any, count: int):
        self.trainer, self.conditioning = trainer, conditioning
        self.states: list[tuple[Part, int, Tensor]] = []  # a part, its recorded step, rows of its states
        steps = [(part, k, taken) for part in parts for k, taken in enumerate(part.transitions)
                 if isinstance(taken, Transitions)]
        for (part, k, taken), rows in zip(steps, spread([len(taken.x) for _, _, taken in steps], count)):
            self.states += [(part, k, some) for some in rows.split(trainer.geometry.micro_batch) if len(some)]

    def rollout_reading(self) -> Reading | None:
        return None

    def read(self) -> Reading:
        """Model's output [b,*D] at the states."""
        policy, found = self.trainer.policy, list[Tensor]()
        for part, k, rows in self.states:
            taken, spec = part.transitions[k], part.exploration
            assert isinstance(taken, Transitions) and spec is not None
            x = to_device(taken.x[rows.to(taken.x.device)], policy.device)
            output = policy.replay(self.conditioning.rows(taken.prompts[rows]), x, spec.grid, taken.step,
                                   spec.timesteps)
            found.append(output.detach().float())
        return found

    @staticmethod
    def sums(before: Reading, after: Reading) -> list[float]:
        """Squared norms (of the change, of what it was) of velocities."""
        pairs = zip(before, after, strict=True)
        return [sum((new.double() - old.double()).square().sum().item() for old, new in pairs),
                sum(old.double().square().sum().item() for old in before)]

    def size(self, change: float, divisor: float) -> float:
        return math.sqrt(change / divisor) if divisor else 0.0


class Tokens:
    """z = sqrt(2 KL): by how many nats a step typically changes the log-probability of a whole completion."""

    name = "sqrt(2 KL) of a completion"
    reach = 2.0

    def __init__(self, trainer: Any, parts: Sequence[Part], conditioning: Any, count: int):
        self.trainer, self.conditioning = trainer, conditioning
        taken = [(part, of) for part in parts for of in part.transitions if isinstance(of, Completions)]
        drawn = [(~of.not_sampled).nonzero().flatten() for _, of in taken]
        self.parts = [replace(part, transitions=(of.rows(rows[some]),), advantages=(), rewards=())
                      for (part, of), rows, some in zip(taken, drawn, spread([*map(len, drawn)], count)) if len(some)]

    def rollout_reading(self) -> Reading | None:
        """Scores of the rollout, unless an older policy drew it."""
        if self.trainer.method.rollout.lag.most:
            return None
        return [self._mask_logp(part.transitions[0].old.logp, part) for part in self.parts]

    def read(self) -> Reading:
        replay = self.trainer.rollouts.replay
        return [self._mask_logp(torch.cat([new.logp.detach() for _, _, new in replay(part, self.conditioning)]), part)
                for part in self.parts]

    @staticmethod
    def _mask_logp(logp: Tensor, part: Part) -> Tensor:
        """Log-probabilities [m,L] on the CPU, 0 where a token does not count."""
        return logp.cpu().float().masked_fill(~part.transitions[0].old.mask.cpu(), 0.0)

    @staticmethod
    def sums(before: Reading, after: Reading) -> list[float]:
        """(sum of the KL of completions in nats, their number), from log-probabilities [m,L] of drawn tokens, 0
        elsewhere.

        KL(before || after) is estimated by the sum of exp(d) - 1 - d over tokens, d the change of the log-probability
        (Schulman's k3).
        """
        total, rows = 0.0, 0
        for old, new in zip(before, after, strict=True):
            apart = (new.double() - old.double()).clamp(-LARGEST, LARGEST)
            total, rows = total + (torch.expm1(apart) - apart).sum().item(), rows + len(old)
        return [total, float(rows)]

    def size(self, change: float, divisor: float) -> float:
        return math.sqrt(2 * max(change, 0.0) / divisor) if divisor else 0.0
