"""Records of language-model sampling: tokenized prompts and sampled completions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from flowgrpo.types import Completion


@dataclass(frozen=True, eq=False)
class TokenizedPrompts:
    """Prompts as the model reads them.

    prompts: their texts.
    ids: their tokens, int64 [S] each.
    answers: of each prompt, the answers that may join its group, if a method asks for them.
    references: the right answers, by which those are ranked; empty: they are not.
    begun: the tokens of each row's completion with which its ids end, if they hold any.
    """

    prompts: list[str]
    ids: list[Tensor]
    answers: Sequence[Sequence[str]] = field(default=(), kw_only=True)
    references: Sequence[str | None] = field(default=(), kw_only=True)
    begun: Sequence[Tensor] = field(default=(), kw_only=True)

    def rows(self, index: Tensor) -> TokenizedPrompts:
        """Return the rows `index` (int64 [B]); a row may be taken several times."""
        return TokenizedPrompts([self.prompts[i] for i in index.tolist()], [self.ids[i] for i in index.tolist()])


@dataclass(frozen=True, eq=False)
class SampledCompletions:
    """Completions of B prompts.

    ids: int64 [B,L].
    logp: float32 [B,L].
    mask: bool [B,L], true for drawn tokens up to the end.
    cut: bool [B], those without an end.
    texts: the decoded completions.
    expert: bool [B], those that are their prompts' answers.
    """

    ids: Tensor
    logp: Tensor
    mask: Tensor
    cut: Tensor
    texts: list[Completion]
    expert: Tensor | None = field(default=None, kw_only=True)
