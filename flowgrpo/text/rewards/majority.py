"""Agreement of a completion's answer with those of its group.

    reward: {majority: {args: {score: share, certainty: 0.1}}}

It needs no answer key: it trains on prompts alone.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

from flowgrpo.errors import UserError
from flowgrpo.rewards.about import About
from flowgrpo.text.rewards.answer_keys import LICENCE
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
