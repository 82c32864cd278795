"""The error of a person: one clear line, shown without a traceback, exit code 2."""

from __future__ import annotations

import difflib


class UserError(ValueError):
    """What was got, what was expected and how to fix it, in one line."""


def nearest(word: str, choices: list[str]) -> str:
    """The end of an error about an unknown word: its nearest right one, or all there are.

    Of dotted words the last part counts first, so that `lr` finds `train.lr`, and `eval.stepss` finds `eval.steps`.
    """
    def likeness(choice: str) -> tuple[float, float]:
        ends = word.rpartition(".")[2], choice.rpartition(".")[2]
        return difflib.SequenceMatcher(None, *ends).ratio(), difflib.SequenceMatcher(None, word, choice).ratio()

    best = max(choices, key=likeness, default="")
    return f": did you mean {best!r}?" if likeness(best)[0] >= 0.5 else f"; there are: {', '.join(choices) or 'none'}"
