"""Diversity of texts: of a group's completions, and of answers that agree with a reference."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flowgrpo.errors import UserError
from flowgrpo.rewards.about import About
from flowgrpo.rewards.guards import distances
from flowgrpo.text.rewards.answer_keys import LICENCE, keys, several
from flowgrpo.text.rewards.rules import normalised


def ngrams(text: str, most: int) -> set[tuple[str, ...]]:
    """Return the n-grams of a text's words, of 1 to `most` words, in lower case."""
    words = normalised(text).split()
    return {tuple(words[at:at + n]) for n in range(1, most + 1) for at in range(len(words) - n + 1)}


def likeness(one: set[tuple[str, ...]], other: set[tuple[str, ...]]) -> float:
    """Return the share of common n-grams among all of two texts, 1 for two empty ones (Jaccard)."""
    return len(one & other) / len(one | other) if one | other else 1.0


def lexical(texts: Sequence[str], most: int) -> list[float]:
    """Return the mean of 1 - `likeness` of each text to the others; 0 for a single one."""
    grams, count = [ngrams(text, most) for text in texts], max(len(texts) - 1, 1)
    return [sum(1 - likeness(one, other) for at, other in enumerate(grams) if at != row) / count
            for row, one in enumerate(grams)]


@dataclass(frozen=True)
class TextDiversity:
    """Diversity: mean distance of a completion to the others of its group (MultiRole-R1).

    ngram: the distance is 1 - the share of common n-grams of up to so many words.
    features: `file.py:function`, texts to [B, D], for the distance of meanings or perspectives instead: Euclidean.
    """

    ngram: int = 2
    features: str | Callable[[Sequence[str]], Any] | None = None
    group = True
    about = About(modality="text", range=(0, None), needs="", licence=LICENCE)

    def __post_init__(self) -> None:
        if self.ngram < 1:
            raise UserError(f"reward 'text_diversity': ngram is {self.ngram}, expected 1 or more")
        if isinstance(self.features, str):
            from flowgrpo.user_code import load

            object.__setattr__(self, "features", load(self.features))

    def __call__(self, completions: Sequence[str], prompts: Sequence[str], metadata: Sequence[dict[str, Any]],
                 group: int) -> list[float]:
        if callable(self.features):
            features: Tensor = torch.as_tensor(self.features(completions))
            return distances(features.reshape(len(features) // group, group, -1)).flatten().tolist()
        return [score for at in range(0, len(completions), group)
                for score in lexical(completions[at:at + group], self.ngram)]


@dataclass(frozen=True)
class ReferenceBand:
    """Agreement with the reference answer, as good within a range of std as an exact copy, plus a bonus for
    diverse answers there (DARL).

    The deviation is 1 - the largest share of common n-grams with an accepted answer. Up to `deviation` the score is 1,
    plus `bonus` times the mean distance to the group's others. Beyond, it falls linearly to 0 at a deviation of 1. The
    paper measures agreement by the policy's likelihood of the reference; n-grams are a reconstruction.

    key: of the metadata, an answer or a list of them; None for a prompt without it.
    ngram: as in `text_diversity`.
    """

    deviation: float = 0.4
    bonus: float = 0.2
    key: str = "answer"
    ngram: int = 2
    group = True
    keyed = True
    about = About(modality="text", range=(0, None), needs="", licence=LICENCE)

    def __post_init__(self) -> None:
        if not 0 <= self.deviation < 1 or self.bonus < 0 or self.ngram < 1:
            raise UserError(f"reward 'reference_band': `deviation` is {self.deviation}, bonus {self.bonus} and ngram "
                            f"{self.ngram}, expected 0 to below 1, 0 or more, and 1 or more")

    def __call__(self, completions: Sequence[str], prompts: Sequence[str], metadata: Sequence[dict[str, Any]],
                 group: int) -> list[float | None]:
        references = keys("reference_band", metadata, self.key, prompts, several)
        apart = [score for at in range(0, len(completions), group)
                 for score in lexical(completions[at:at + group], self.ngram)]
        return [None if accepted is None else self._one(completion, accepted, distance)
                for completion, accepted, distance in zip(completions, references, apart)]

    def _one(self, completion: str, accepted: Sequence[str], distance: float) -> float:
        grams = ngrams(completion, self.ngram)
        deviation = 1 - max(likeness(grams, ngrams(answer, self.ngram)) for answer in accepted)
        if deviation <= self.deviation:
            return 1 + self.bonus * distance
        return (1 - deviation) / (1 - self.deviation)
