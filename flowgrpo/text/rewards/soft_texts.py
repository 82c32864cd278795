"""Texts whose tokens carry a graph, for differentiable rewards, and a reader of both kinds of texts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from flowgrpo.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, eq=False)
class SoftTexts:
    """B texts as token weights.

    weights: [B,L,V], one-hot, with a graph, 0 after a text's end.
    tokens: the V strings.
    """

    weights: Tensor
    tokens: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.weights)

    def __getitem__(self, rows: Sequence[int]) -> SoftTexts:
        return SoftTexts(self.weights[rows], self.tokens)


def letters(texts: SoftTexts | Sequence[str], alphabet: Sequence[str]) -> Tensor:
    """Return the weight of each of A letters at each place of B texts: [B,L,A], a column per letter of `alphabet`.

    Ordinary texts: float32, 1 or 0, L the length of the longest, a character per place. `SoftTexts`: a token per place,
    in the texts' graph. A reward that reads its texts only by this function is differentiable and works with any
    method.
    Raises UserError for a letter that is not a token.
    """
    import torch

    if isinstance(texts, SoftTexts):
        if missing := [letter for letter in alphabet if letter not in texts.tokens]:
            raise UserError(f"{missing[0]!r} is none of the model's {len(texts.tokens)} tokens: a reward whose "
                            "gradient is followed reads whole tokens")
        return texts.weights[..., [texts.tokens.index(letter) for letter in alphabet]]
    weights = torch.zeros(len(texts), max((len(text) for text in texts), default=0), len(alphabet))
    for row, text in enumerate(texts):
        for place, character in enumerate(text):
            if character in alphabet:
                weights[row, place, alphabet.index(character)] = 1
    return weights
