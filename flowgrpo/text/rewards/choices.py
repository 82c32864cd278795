"""Reward of questions with several right choices: partial credit for a part of them (TW-GRPO)."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from flowgrpo.rewards.about import About
from flowgrpo.text.rewards.answer_keys import LICENCE, keys, several, spoken, stated

_APART = re.compile(r"[,;/&\n]|\band\b|\bor\b", re.I)


def chosen(text: str) -> set[str]:
    """Return the choices that an answer names, in upper case: parts between commas, or the letters of such as "ACD"."""
    parts = {part.strip(" .()[]{}\t\"'").upper() for part in _APART.split(text)} - {""}
    letters = "".join(parts)
    runs = len(parts) == 1 and letters.isalpha() and len(set(letters)) == len(letters) <= 6 and text.strip().isupper()
    return set(letters) if runs else parts


@dataclass(frozen=True)
class MultiChoice:
    """Share of choices that answer and reference have in common, among those that either has (TW-GRPO's soft reward, in
    a form of ours): 1 for the same set, 0 for none.

    key: of the metadata, a choice or a list of all right ones; None for a prompt without it.
    strict: an answer with a wrong choice scores 0, and one without them the share of the right ones that it names.
    """

    key: str = "answer"
    strict: bool = False
    about = About(modality="text", range=(0, 1), needs="", licence=LICENCE)
    keyed = True  # nothing is scored without the key

    def __call__(self, completions: Sequence[str], prompts: Sequence[str],
                 metadata: Sequence[dict[str, Any]]) -> list[float | None]:
        references = keys("multi_choice", metadata, self.key, prompts, several)
        return [None if right is None else self._one(chosen(stated(text) or spoken(text)),
                                                     {choice.strip().upper() for choice in right})
                for text, right in zip(completions, references)]

    def _one(self, answer: set[str], right: set[str]) -> float:
        if self.strict and answer - right:
            return 0.0
        return len(answer & right) / len(right if self.strict else answer | right)
