"""Reward backpropagation through discrete samples: the unmasking of an answer in one graph, by Gumbel-softmax.

An answer is weights of tokens x [n,L,V], one-hot where a token has been drawn. Every step chooses places at random, as
`Unmasking(order="random")` does, and draws their tokens from Gumbel noise. The distribution is that of ordinary
sampling, and the tokens are functions of the logits with a (biased) gradient. With one place per step this is the jump
chain of the continuous-time process of masked diffusion: every mask leaves at the same rate for any model. So the order
is uniform, and the weights decide the tokens alone.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Annotated

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from flowgrpo.objectives.kl import Linear
from flowgrpo.parts import AtLeast, part
from flowgrpo.text.samplers.decoding import Unmasking
from flowgrpo.types import RunState

Logits = Callable[[Tensor], Tensor]  # answers [n,L,V] to log-probabilities [n,L,V], -inf where a token is never drawn


@part("relaxation", jointly={"last kl": "1 or more and 0 or more"})
class GumbelSoftmax:
    """Reward gradient through the last steps of an unmasking, less `kl` times the KL of its process to the base model's
    (DRAKES, 2410.13643).

    A drawn token is one-hot and has the gradient of softmax((log p + gumbel) / temperature), straight through. With
    `relaxed` it is that mixture itself until the answer is finished, as in the released code. A low temperature has
    little bias and much variance.
    schedule: of the temperature over epochs (`objectives.kl`); None: constant.
    last: number of last steps with a gradient.
    truncate_kl: the KL covers these steps alone; otherwise all steps, with the states of earlier ones as constants.
    """

    temperature: float = 1.0
    schedule: Linear | None = None
    last: Annotated[int, AtLeast(1)] = 50
    kl: Annotated[float, AtLeast(0)] = 0.1
    truncate_kl: bool = False
    relaxed: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.schedule, (Linear, type(None))):
            raise ValueError(f"GumbelSoftmax: schedule is {type(self.schedule).__name__}, which reads a KL's weight: "
                             "expected Linear or null")
        if not self.temperature > 0 or not getattr(self.schedule, "last", 1) > 0:
            raise ValueError(f"GumbelSoftmax: temperature is {self.temperature} and schedule {self.schedule}, expected "
                             "temperatures above 0")

    def at_epoch(self, epoch: int, epochs: int) -> "GumbelSoftmax":
        if self.schedule is None:
            return self
        now = self.schedule(self.temperature, RunState(epoch, epochs))
        return replace(self, temperature=now, schedule=None)


def straight_through(soft: Tensor) -> Tensor:
    """The exact one-hot of the largest of soft [...,V], with the gradient of soft."""
    hard = one_hot(soft.argmax(-1), soft.shape[-1]).to(soft)
    return hard + (soft - soft.detach())


def divergence(log_probs: Tensor, reference: Tensor) -> Tensor:
    """KL(p || q) [...] of log-probabilities [...,V], with 0 log 0 = 0.
    (The paper's rate form, the sum of q - p + p log(p / q), is the same: both sum to 1.)"""
    apart = (log_probs - reference).masked_fill(log_probs == -torch.inf, 0.0)
    return (log_probs.exp() * apart).sum(-1)


def walk(logits: Logits, reference: Logits, x: Tensor, unmasking: Unmasking, part: GumbelSoftmax, lots: Tensor,
         gumbels: Tensor) -> tuple[Tensor, Tensor]:
    """Unmask answers of masks x [n,L,V]: return the finished ones, one-hot [n,L,V], and the KL [n] to `reference`.

    Both have gradients where they are enabled. lots [n,L] and gumbels [n,L,V] are all the noise there is. At a step
    that unmasks `count` of m masks at random every mask is drawn with probability count / m, (m_t - m_s) / m_t of a
    noise schedule m. So the exact KL of the step is that factor times the sum of the divergences at all masks.
    reference is not evaluated if `part.kl` is 0.
    """
    schedule, with_grad = unmasking.schedule(x.shape[1]), torch.is_grad_enabled()
    begin, masked = len(schedule) - part.last, torch.ones(x.shape[:2], dtype=torch.bool, device=x.device)
    total = x.new_zeros(len(x))
    for step, (first, end, count) in enumerate(schedule):
        here, counts = masked[:, first:end], part.kl > 0 and not (part.truncate_kl and step < begin)
        with torch.set_grad_enabled(with_grad and (counts or step >= begin)):
            log_probs = unmasking(logits(x)[:, first:end])
            if counts:
                divergences = divergence(log_probs, unmasking(reference(x)[:, first:end]))
                total = total + (divergences * here).sum(1) * count / here[0].sum()
            at = unmasking.choose(log_probs, here, lots[:, first:end], count)
            of = at[..., None].expand(-1, -1, x.shape[2])  # the places [n,count] of the new tokens, from `first` on
            soft = ((log_probs.gather(1, of) + gumbels[:, first:end].gather(1, of)) / part.temperature).softmax(-1)
            x = x.scatter(1, of + first, (soft if part.relaxed else straight_through(soft)).to(x.dtype))
        x = x if step >= begin else x.detach()
        masked = masked.scatter(1, at + first, False)
    return straight_through(x), total
