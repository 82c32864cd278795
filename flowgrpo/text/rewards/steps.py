"""Reward of a solution's steps, compared with the reference's one by one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from flowgrpo.errors import UserError
from flowgrpo.rewards.about import About
from flowgrpo.text.rewards.answer_keys import LICENCE, keys, several
from flowgrpo.text.rewards.rules import normalised


@dataclass(frozen=True)
class StepMatch:
    """Share of a solution's steps that are right up to the first wrong one; 1 for all of them and no more.

    key: of the metadata, the right steps as one text or a list; None for a prompt without it.
    separator: between two steps.
    """

    key: str = "solution"
    separator: str = ";"
    about = About(modality="text", range=(0, 1), needs="", licence=LICENCE)
    keyed = True  # nothing is scored without the key

    def __post_init__(self) -> None:
        if not self.separator:
            raise UserError("reward 'step_match': separator is empty, expected the text between two steps")

    def __call__(self, completions: Sequence[str], prompts: Sequence[str],
                 metadata: Sequence[dict[str, Any]]) -> list[float | None]:
        references = keys("step_match", metadata, self.key, prompts,
                          lambda value: self.separator.join(several(value)))
        return [None if reference is None else self._one(completion, reference)
                for completion, reference in zip(completions, references)]

    def _one(self, completion: str, reference: str) -> float:
        steps, right = ([normalised(step) for step in text.split(self.separator)] for text in (completion, reference))
        equal = [step == other for step, other in zip(steps, right)]
        return (equal.index(False) if False in equal else len(equal)) / max(len(steps), len(right))
