"""Whether a completion's answer is the one that its prompt's metadata holds, letter by letter after normalising."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass

from flowgrpo.rewards.about import About
from flowgrpo.rewards.text_keys import LICENCE, keys, several, spoken, stated

OUTER = " \t\n\r.,;:!?\"'`*_$()[]{}\u00ab\u00bb\u2018\u2019\u201c\u201d\u3002"


def normalised(text: str, case: bool = False) -> str:
    """A text in NFKC, its spaces single, without punctuation, quotes and Markdown around it; in lower case unless
    `case` matters. A text of nothing but punctuation stays."""
    text = " ".join(unicodedata.normalize("NFKC", text).split())
    text = text.strip(OUTER) or text
    return text if case else text.casefold()


@dataclass(frozen=True)
class ExactMatch:
    """1 where a completion's answer equals the one in the metadata after normalising, otherwise 0.

    key: of the metadata, a text, a number or a list of accepted ones; None for a prompt without it. extract: compare
    the answer that the completion states (as of `text_keys.stated`), and what follows its thoughts only where it states
    none; else always all of it. case: whether upper and lower case differ.
    """

    key: str = "answer"
    extract: bool = True
    case: bool = False
    about = About(modality="text", range=(0, 1), needs="", licence=LICENCE)

    def __call__(self, completions: Sequence[str], prompts: Sequence[str],
                 metadata: Sequence[dict]) -> list[float | None]:
        wanted = keys("exact_match", metadata, self.key, prompts, several)
        return [None if accepted is None else self._one(completion, accepted)
                for completion, accepted in zip(completions, wanted)]

    def answer(self, completion: str) -> str:
        """What a completion answers, normalised."""
        answer = stated(completion) if self.extract else completion
        return normalised(spoken(completion) if answer is None else answer, self.case)

    def _one(self, completion: str, accepted: Sequence[str]) -> float:
        return float(self.answer(completion) in {normalised(each, self.case) for each in accepted})
