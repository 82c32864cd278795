"""Rewards that compare the samples of a group: a majority's answer, diversity of texts, distance to successes.

    reward: {majority: {args: {score: share, certainty: 0.1}}}

They need no answer key: `majority` trains on prompts alone.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from flowgrpo.errors import UserError
from flowgrpo.rewards.about import About
from flowgrpo.rewards.combine import LIKE_ITS_PARTS, Combined
from flowgrpo.rewards.failures import Failed, numbers
from flowgrpo.rewards.reward import Batch
from flowgrpo.text.rewards.answer_keys import LICENCE
from flowgrpo.text.rewards.diversity import likeness
from flowgrpo.text.rewards.numeric import NumericMatch
from flowgrpo.text.rewards.rules import ExactMatch

# --- pure ------------------------------------------------------------------------------------------------------------


def mode(answers: Sequence[Hashable | None]) -> Hashable | None:
    """Return the most frequent answer, of ties the one that appears first; None, no answer, does not count."""
    counts = Counter(answer for answer in answers if answer is not None)
    return max(counts, key=lambda answer: counts[answer]) if counts else None


def agreement(answers: Sequence[Hashable | None]) -> list[float]:
    """Return 1 for the group's most frequent answer (`mode`), otherwise 0 (MM-UPT)."""
    best = mode(answers)
    return [float(answer is not None and answer == best) for answer in answers]


def frequencies(answers: Sequence[Hashable | None]) -> list[float]:
    """Return the share of the group that has a sample's answer (TTRV); 0 for no answer."""
    counts = Counter(answers)
    return [0.0 if answer is None else counts[answer] / len(answers) for answer in answers]


def certainty(answers: Sequence[Hashable | None]) -> float:
    """Return 1 less the entropy of a group's answers over that of answers that all differ: 1 where all agree."""
    shares = [count / len(answers) for count in Counter(answers).values()]
    return 1 - sum(-share * math.log(share) for share in shares) / math.log(len(answers)) if len(answers) > 1 else 1.0


def ngrams(text: str, n: int) -> set[tuple[str, ...]]:
    """Return the word n-grams of a text in lower case; of a shorter text, all its words."""
    words = text.casefold().split()
    return {tuple(words[i:i + n]) for i in range(max(1, len(words) - n + 1))}


def progress(success: Tensor, apart: Tensor, most: float) -> Tensor:
    """Return 1 for successes, and for failures most * sigmoid(-z), z the distance to the nearest success, standardised
    over the group's failures; 0 for failures of a group without a success.

    success: bool [G]. apart: [G, G], distances between samples. Returns [G].
    """
    values = success.to(apart)
    if not success.any() or success.all():
        return values
    nearest = apart[~success][:, success].amin(1)
    z = (nearest - nearest.mean()) / (nearest.std(correction=0) + 1e-8)
    values[~success] = most * (-z).sigmoid()
    return values


# --- for a recipe ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Majority:
    """Agreement of a completion's answer with those of its group; no answer key is read.

    score: "vote", 1 for the group's most frequent answer, else 0 (MM-UPT), or "share", the answer's share of the group
    (TTRV).
    certainty: weight of the group's certainty, 1 less the normalised entropy of its answers (TTRV). It is the same for
    all samples of a group, so only an advantage with a baseline beyond the group reads it, such as `{scale: running}`.
    kind: "text", answers as `exact_match` reads them, or "number", as `numeric_match` does; without a number there is
    no answer.
    """

    score: str = "vote"
    certainty: float = 0.0
    kind: str = "text"
    group = True
    about = About(modality="text", range=(0, None), needs="", licence=LICENCE)

    def __post_init__(self) -> None:
        if self.score not in ("vote", "share") or self.kind not in ("text", "number") or not self.certainty >= 0:
            raise UserError(f"reward 'majority': score is {self.score!r}, kind {self.kind!r}, certainty "
                            f"{self.certainty}, expected vote or share, text or number, and 0 or more")

    def __call__(self, completions: Sequence[str], prompts: Sequence[str], metadata: Sequence[dict[str, Any]],
                 group: int) -> list[float]:
        read = reader(self.kind)
        rate = agreement if self.score == "vote" else frequencies
        values: list[float] = []
        for start in range(0, len(completions), group):
            answers = [read(text) for text in completions[start:start + group]]
            values += [value + self.certainty * certainty(answers) for value in rate(answers)]
        return values


def reader(kind: str) -> Callable[[str], Hashable | None]:
    """Return the reader of a completion's answer: None if it has none."""
    if kind == "text":
        return lambda text: ExactMatch().answer(text) or None
    return lambda text: getattr(NumericMatch().answer(text), "value", None)


@dataclass(frozen=True, eq=False)
class Progress(Combined):
    """1 for a success, and for a failure its nearness to the successes of its group, below 1 (SRPO).

    rewards: one verdict, with `right`, the score from which on it is a success. features: of pictures as in
    `diversity`; texts are compared by their words, 1 less the Jaccard similarity. most: bound of a failure's reward.
    After SRPO, whose distance is one to the centre of a cluster of successes; here it is that to the nearest success,
    standardised within the group. A group without a success falls back to 0 for all.
    """

    right: float = 1.0
    most: float = 0.8
    features: Any = "pixels"
    unit = "group"
    about = replace(LIKE_ITS_PARTS, modality="image/text", range=(0, 1))

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require(len(self.rewards) == 1, "rewards", "one reward")
        self._require(0 < self.most < 1, "most", "above 0 and below 1")

    def __call__(self, batch: Batch) -> list[float | None | Failed]:
        [column] = self.columns(batch)
        verdicts = torch.tensor(numbers(column), dtype=torch.float64)
        values: list[float | None | Failed] = []
        for start in range(0, len(batch), batch.group):
            at = slice(start, start + batch.group)
            found = progress(verdicts[at] >= self.right, self._apart(batch.samples[at]), self.most).tolist()
            values += [answer if isinstance(answer, Failed) else None if math.isnan(answer) else value
                       for answer, value in zip(column[at], found)]
        return values

    def _apart(self, outputs: Tensor | list[str]) -> Tensor:
        """Return the distances between the samples of a group, [G, G]."""
        if isinstance(outputs, Tensor):
            from flowgrpo.rewards.images.guards import extractor

            features = torch.as_tensor(extractor(self.features)(outputs)).double()
            return (features[:, None] - features[None]).norm(dim=-1)
        words = [ngrams(text, 1) for text in outputs]
        return torch.tensor([[1 - likeness(one, other) for other in words] for one in words], dtype=torch.float64)
