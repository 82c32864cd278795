"""Weights of supervised tokens: `part(logp, entropy, mask) -> weights`, all [B, L], without a gradient.

logp: log-probabilities of the tokens under the present weights. mask: true for tokens of the answer.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Protocol

import torch
from torch import Tensor

from flowgrpo.parts import Above, AtLeast, part
from flowgrpo.types import required, wide


class Distribution(Protocol):
    """Reading of logits in place of their log-softmax, called as a decoding is."""

    def __call__(self, logits: Tensor, taken: Tensor | None = None) -> Tensor:
        """Return [n,V], of which the tokens `taken` [n] are read."""

    def temperatures(self, ids: Tensor) -> Tensor | None:
        """Return None: no place has a temperature of its own."""


class TokenWeight:
    """Weights of tokens; base class.

    reads_entropy: it reads the entropy of each token's distribution, in nats.
    """

    reads_entropy = False

    def __call__(self, logp: Tensor, entropy: Tensor | None, mask: Tensor) -> Tensor:
        """Return the weights [B, L]."""
        raise NotImplementedError

    def distribution(self, seed: int) -> Distribution | None:
        """Return what reads the model's logits in place of their log-softmax; None: nothing. seed: of its draws."""
        return None


@part("data.token_weight")
class EqualTokens(TokenWeight):
    """1 for every token: plain cross entropy."""

    def __call__(self, logp: Tensor, entropy: Tensor | None, mask: Tensor) -> Tensor:
        return torch.ones_like(logp)


@part("data.token_weight")
class Uncertain(TokenWeight):
    """p (1 - p) of the token's probability p (CHORD, 2508.11408): 1/4 at p = 1/2, and 0 for tokens that the policy is
    sure of or would never say."""

    def __call__(self, logp: Tensor, entropy: Tensor | None, mask: Tensor) -> Tensor:
        p = logp.detach().exp()
        return p * (1 - p)


@part("data.token_weight", reads_entropy=True)
class EntropyAware(TokenWeight):
    """scale * exp(-H), H the mean entropy of the answer's tokens (SRFT, 2506.19767): an answer counts less where the
    policy wavers. The mean per answer is our choice."""

    scale: Annotated[float, Above(0)] = 0.5

    def __call__(self, logp: Tensor, entropy: Tensor | None, mask: Tensor) -> Tensor:
        known = required(entropy).detach() * mask
        mean = known.sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp(min=1)
        return (self.scale * (-mean).exp()).expand_as(logp)


@part("data.token_weight", jointly={"samples wrong": "1 or more, and 0 or less"})
class OneToken(TokenWeight):
    """Policy gradient on tokens sampled at every position of the answer (One-Token Rollout, 2509.26313).

    At each place `samples` tokens are drawn from the policy, behind the answer's own beginning. A drawn token of the
    answer has the reward 1, another one `wrong`. The loss of a place is -(1/K) sum of R log p(drawn). Where the
    answer's token is never drawn and `wrong` is 0, a place has no gradient.
    """

    samples: Annotated[int, AtLeast(1)] = 64
    wrong: Annotated[float, AtLeast(-math.inf, to=0)] = 0.0

    def __call__(self, logp: Tensor, entropy: Tensor | None, mask: Tensor) -> Tensor:
        return torch.ones_like(logp)

    def distribution(self, seed: int) -> Distribution:
        return Drawn(self.samples, self.wrong, seed)


@dataclass(frozen=True)
class Drawn:
    """Objective of a place, at its token: the mean of reward times log-probability over `samples` drawn tokens."""

    samples: int
    wrong: float
    seed: int

    def __call__(self, logits: Tensor, taken: Tensor | None = None) -> Tensor:
        (logits,) = wide(logits)
        log_probs, tokens = logits.log_softmax(-1), required(taken)
        generator = torch.Generator(logits.device).manual_seed(self.seed)  # anew: a backward pass may compute it again
        drawn = torch.multinomial(log_probs.detach().exp(), self.samples, replacement=True, generator=generator)
        reward = torch.where(drawn == tokens[:, None], 1.0, self.wrong).to(log_probs)
        value = (reward * log_probs.gather(1, drawn)).mean(1, keepdim=True)
        return torch.zeros_like(log_probs).scatter(1, tokens[:, None], value)

    def temperatures(self, ids: Tensor) -> Tensor | None:
        return None
