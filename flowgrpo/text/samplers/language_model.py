"""Protocols of language models: what samplers of completions read of a policy."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Generator, Tensor

if TYPE_CHECKING:
    from flowgrpo.config.sections import Text
    from flowgrpo.text.samplers.decoding import Decoding
    from flowgrpo.text.samplers.records import SampledCompletions, TokenizedPrompts
    from flowgrpo.types import Completion, Scored


class LanguageModel(Protocol):
    """Policy that draws completions, token by token or mask by mask.

    ends: the tokens that end a completion.
    """

    tokenizer: Any
    text: Text
    ends: list[int]

    def sample(self, tokenized: TokenizedPrompts, decoding: Decoding, generators: Sequence[Generator], greedy: Tensor
               ) -> SampledCompletions:
        """Sample a completion of each row from its own generator; greedy: bool [B], rows of most likely tokens."""


class CausalModel(LanguageModel, Protocol):
    """Language model that draws one token after the other.

    model: of transformers.
    quality: a run's head that gives logits [n] of the success of partial completions, of states [n,H]; None: none.
    """

    model: Any
    device: torch.device
    quality: Callable[[Tensor], Tensor] | None

    def generators(self, seeds: Iterable[int]) -> list[Generator]:
        """Return a generator per seed."""

    def written(self, ids: Tensor, mask: Tensor) -> list[Completion]:
        """Return the texts of ids [B,L] where mask is true."""

    def log_probs(self, tokenized: TokenizedPrompts, prompts: Tensor, ids: Tensor, mask: Tensor, decoding: Decoding,
                  entropy: bool | str = False) -> Scored:
        """Return the score [B,L] of completions ids [B,L] of the prompts [B], 0 where mask is false."""

    def states_before(self, tokenized: TokenizedPrompts, ids: Tensor) -> Tensor:
        """Return the states [B,L,H] before each token of the completions ids [B,L]."""

    def head_alone(self, tokenized: TokenizedPrompts) -> bool:
        """Return True if the model's logits are those of its head alone."""
