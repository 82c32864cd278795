"""Losses of supervised terms: the interface, and next tokens of a language model's answers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from flowgrpo.data.prompts import Prompt
from flowgrpo.errors import UserError
from flowgrpo.methods.supervised import NextToken
from flowgrpo.samplers.text.decoding import Decoding

DRAWS = 2210_03142  # separates the draws for examples from others of a run


@dataclass(frozen=True, eq=False)
class Example:
    """Output of a prompt that is learned.

    Its content is the path of a picture, an answer's text, or what the run sampled: a final state [*D], or the tokens
    [n] of an answer, on the CPU.
    """

    prompt: Prompt
    content: str | Tensor
    reward: float = 1.0
    source: str = ""


class DataLosses(Protocol):
    """Loss of a run's supervised term."""

    def divisor(self, examples: Sequence[Example]) -> int:
        """Return what the summed loss of a batch is divided by."""

    def __call__(self, examples: Sequence[Example], places: Sequence[int], update: int) -> Iterator[Tensor]:
        """Yield summed losses, 0-d, each with a graph of its own; their sum over the divisor is the batch's loss.

        places: of the examples in the batch of all processes. update: the number of earlier optimiser steps.
        """

    def metrics(self, total: Callable[[Sequence[int]], list[int]]) -> dict[str, float]:
        """Return an epoch's further metrics; all processes call it. total: sums over processes."""
        return {}


class TokenLosses(DataLosses):
    """Cross entropy of answers' tokens under a causal language model. rollouts: of a `CausalLM`."""

    def __init__(self, part: NextToken, rollouts: Any):
        self.part, self.rollouts, self.policy = part, rollouts, rollouts.policy

    def tokens(self, example: Example) -> Tensor:
        """Return the tokens [n] of an example's answer, an end included."""
        if isinstance(example.content, Tensor):
            return example.content
        ids = self.policy.tokenizer(example.content, add_special_tokens=False)["input_ids"]
        return torch.tensor([*ids, self.policy.ends[0]])

    def require(self, recorded: Iterable[Example]) -> None:
        """Raise UserError for the first recorded answer with more tokens than a completion may have."""
        most = self.rollouts.config.text.max_tokens
        for example in recorded:
            if (count := len(self.tokens(example))) > most:
                raise UserError(f"parts.data: the recorded answer of the prompt {example.prompt.text[:60]!r} has "
                                f"{count} tokens, its end included, and text.max_tokens is {most}: raise it, or "
                                "shorten the answer")

    def divisor(self, examples: Sequence[Example]) -> int:
        return sum(len(self.tokens(example)) for example in examples)

    def __call__(self, examples: Sequence[Example], places: Sequence[int], update: int) -> Iterator[Tensor]:
        rows = [self.tokens(example) for example in examples]
        ids = pad_sequence(rows, batch_first=True, padding_value=self.policy.padding)
        mask = torch.arange(ids.shape[1]) < torch.tensor([len(row) for row in rows])[:, None]
        encoded = self.rollouts.conditioning([conditioned(self.part.condition, example) for example in examples])
        weigh = self.part.token_weight
        seed = seed_of(self.rollouts.config.seed, update, places[0])
        scored = self.policy.log_probs(encoded, torch.arange(len(rows)), ids, mask,
                                       weigh.distribution(seed) or Decoding(), weigh.reads_entropy)
        weights = torch.tensor([self.part.weight(example.reward) for example in examples])[:, None].to(scored.logp)
        yield -(weights * weigh(scored.logp, scored.entropy, scored.mask) * scored.logp * scored.mask).sum()


def conditioned(condition: str, example: Example) -> Prompt:
    """Return an example's prompt as the model reads it."""
    return replace(example.prompt, text=condition.format(prompt=example.prompt.text, source=example.source))


def seed_of(seed: int, update: int, place: int) -> int:
    """Return the seed of an example's draws. place: its place in the batch of an optimiser step."""
    return int(np.random.SeedSequence((seed, update, place, DRAWS)).generate_state(1, np.uint64)[0] >> 1)
