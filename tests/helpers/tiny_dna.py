"""Sequence design with a known optimum: the world of try_drakes.py with four letters, and all that its process
does by enumeration."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

sys.path.append(str(Path(__file__).parents[2] / "scripts" / "measure"))

import try_drakes  # noqa: E402

LENGTH = 4
SIZE = len(try_drakes.TOKENS)


def model(steps: int = 400):
    """(model, tokenizer) of a few thousand weights, trained in seconds."""
    return try_drakes.build_model(LENGTH, steps)


def sequences(size: int, length: int = LENGTH) -> Tensor:
    """All sequences of tokens below size, int64 [size^length, length]."""
    return torch.tensor(list(itertools.product(range(size), repeat=length)))


class Process:
    """An unmasking by lot, one place after the other, by enumeration of its states.

    conditionals(states int64 [S,L]) -> [S,L,n]: what is drawn at a place of a state, of n tokens; the mask is n.
    """

    def __init__(self, conditionals: Callable[[Tensor], Tensor], size: int, length: int):
        self.size, self.states = size, sequences(size + 1, length)
        self.masked = self.states == size
        self.conditionals = conditionals(self.states).double()
        self.reached = self._reached()

    def _reached(self) -> Tensor:
        """The chance of every state to be passed: [S]."""
        found = torch.zeros(len(self.states), dtype=torch.float64)
        found[-1] = 1.0  # all masks
        weights = (self.size + 1) ** torch.arange(self.states.shape[1] - 1, -1, -1)
        for left in range(self.states.shape[1], 0, -1):
            for place, weight in enumerate(weights.tolist()):
                at = ((self.masked.sum(1) == left) & self.masked[:, place]).nonzero()[:, 0]
                for token in range(self.size):
                    found[at + (token - self.size) * weight] += found[at] * self.conditionals[at, place, token] / left
        return found

    @property
    def finals(self) -> Tensor:
        """The law of what is finished, in the order of `sequences(size)`: [n^L]."""
        return self.reached[~self.masked.any(1)]

    def divergence(self, other: Process) -> Tensor:
        """The KL of this process to another, path by path."""
        p, q = self.conditionals, other.conditionals
        each = ((p * (p / q).log()).sum(-1) * self.masked).sum(1) / self.masked.sum(1).clamp(min=1)
        return (self.reached * each).sum()


def of_model(policy) -> Process:
    """The process of a masked language model whose prompt is `=`."""
    @torch.no_grad()
    def conditionals(states: Tensor) -> Tensor:
        inputs = torch.cat([torch.full((len(states), 1), try_drakes.PROMPT), states], 1)
        return policy.model(input_ids=inputs).logits[:, 1:, :-1].softmax(-1)

    return Process(conditionals, SIZE - 1, LENGTH)


def optimum(finals: Tensor, rewards: Tensor, alpha: float) -> tuple[float, float]:
    """(the expected reward, the KL) of the law p exp(R / alpha) / Z, the best for E R - alpha KL."""
    tilted = (finals.log() + rewards / alpha).softmax(0)
    return (tilted * rewards).sum().item(), (tilted * (tilted / finals).log()).sum().item()
