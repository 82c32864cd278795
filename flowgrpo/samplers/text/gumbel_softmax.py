"""Reward backpropagation through discrete samples: the unmasking of an answer in one graph, by Gumbel-softmax.

An answer is weights of tokens x [n,L,V], one-hot wherever a token has been drawn. Every step chooses places by lot, as
`Unmasking(order="random")` does, and draws their tokens from Gumbel noise: the law is that of ordinary sampling, and
the tokens are functions of the logits with a (biased) gradient. With one place per step this is the jump chain of the
continuous-time process of masked diffusion: every mask leaves at the same rate, whatever the model says, so that the
order is uniform and weights decide the tokens alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from flowgrpo.objectives import schedules
from flowgrpo.samplers.text.decoding import Unmasking
from flowgrpo.types import Context

Logits = Callable[[Tensor], Tensor]  # of answers [n,L,V]: [n,L,V], -inf where a token is never drawn


@dataclass(frozen=True)
class GumbelSoftmax:
    """The reward's gradient through the last steps of an unmasking, less `kl` times the KL of its process to the base
    model's (DRAKES, 2410.13643).

    A drawn token is one-hot and has the gradient of softmax((log p + gumbel) / temperature), straight through; with
    `relaxed` it is that mixture itself until the answer is finished, as in the released code. A low temperature has
    little bias and much variance; `cooling` changes it from epoch to epoch, as `schedules` do. last: so many steps have
    a gradient. truncate_kl: the KL is that of these steps alone; otherwise it is of all, in the states of earlier ones
    too, which are constants.
    """

    temperature: float = 1.0
    cooling: Any = schedules.Constant()
    last: int = 50
    kl: float = 0.1
    truncate_kl: bool = False
    relaxed: bool = False
    of_tokens = True

    def __post_init__(self) -> None:
        if not isinstance(self.cooling, (schedules.Constant, schedules.Linear)):
            raise ValueError(f"GumbelSoftmax: cooling is {type(self.cooling).__name__}, which reads a KL's weight: "
                             "expected Constant or Linear")
        if not self.temperature > 0 or not getattr(self.cooling, "last", 1) > 0:
            raise ValueError(f"GumbelSoftmax: temperature is {self.temperature} and cooling {self.cooling}, expected "
                             "temperatures above 0")
        if self.last < 1 or not self.kl >= 0:
            raise ValueError(f"GumbelSoftmax: last is {self.last} and kl {self.kl}, expected 1 or more and 0 or more")

    def in_epoch(self, epoch: int, epochs: int) -> GumbelSoftmax:
        """The part at the temperature of an epoch."""
        now = self.cooling(self.temperature, Context(epoch=epoch, epochs=epochs))
        return replace(self, temperature=now, cooling=schedules.Constant())


def straight_through(soft: Tensor) -> Tensor:
    """The one-hot of the largest of soft [...,V], exactly, with the gradient of soft."""
    hard = one_hot(soft.argmax(-1), soft.shape[-1]).to(soft)
    return hard + (soft - soft.detach())


def divergence(log_probs: Tensor, reference: Tensor) -> Tensor:
    """KL(p || q) [...] of log-probabilities [...,V], 0 log 0 = 0. (The rate form of the paper, the sum of
    q - p + p log(p / q), is the same: both sum to 1.)"""
    apart = (log_probs - reference).masked_fill(log_probs == -torch.inf, 0.0)
    return (log_probs.exp() * apart).sum(-1)


def walk(logits: Logits, reference: Logits, x: Tensor, unmasking: Unmasking, part: GumbelSoftmax, lots: Tensor,
         gumbels: Tensor) -> tuple[Tensor, Tensor]:
    """Unmask answers of masks x [n,L,V]: the finished ones, one-hot [n,L,V], and the KL [n] of the process to that of
    `reference`, both with gradients where they are enabled.

    lots [n,L] and gumbels [n,L,V]: all the noise there is. At a step that unmasks `count` of m masks by lot every mask
    is drawn with the chance count / m, (m_t - m_s) / m_t of a noise schedule m: the KL of the step, exactly, is the sum
    of the divergences at all masks times it. reference is not asked where `part.kl` is 0.
    """
    schedule, with_grad = unmasking.schedule(x.shape[1]), torch.is_grad_enabled()
    begin, masked = len(schedule) - part.last, torch.ones(x.shape[:2], dtype=torch.bool, device=x.device)
    total = x.new_zeros(len(x))
    for step, (first, end, count) in enumerate(schedule):
        here, counts = masked[:, first:end], part.kl > 0 and not (part.truncate_kl and step < begin)
        with torch.set_grad_enabled(with_grad and (counts or step >= begin)):
            log_probs = unmasking(logits(x)[:, first:end])
            if counts:
                each = divergence(log_probs, unmasking(reference(x)[:, first:end]))
                total = total + (each * here).sum(1) * count / here[0].sum()
            at = unmasking.chosen(log_probs, here, lots[:, first:end], count)
            x = _drawn(x, log_probs, gumbels[:, first:end], at, first, part)
        x = x if step >= begin else x.detach()
        masked = masked.scatter(1, at + first, False)
    return straight_through(x), total


def _drawn(x: Tensor, log_probs: Tensor, gumbels: Tensor, at: Tensor, first: int, part: GumbelSoftmax) -> Tensor:
    """The answers x [n,L,V] with tokens drawn at the places at [n,count], counted from `first` as log_probs and gumbels
    are."""
    of = at[..., None].expand(-1, -1, x.shape[2])
    soft = ((log_probs.gather(1, of) + gumbels.gather(1, of)) / part.temperature).softmax(-1)
    return x.scatter(1, of + first, (soft if part.relaxed else straight_through(soft)).to(x.dtype))
