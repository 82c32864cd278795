"""An error the user can fix: printed as one line without a traceback, exit code 2."""

from __future__ import annotations

import difflib

LIKE = 0.6  # likeness from 0 to 1 at which one word is taken for a slip of another


class UserError(ValueError):
    """One line with what was got, what was expected and the fix."""


def nearest(word: str, choices: list[str]) -> str:
    """Return the end of an error about an unknown word: the nearest valid one, or all choices.

    The last part of dotted words counts first, so `lr` finds `train.lr`, and `eval.stepss` finds `eval.steps`.
    """
    def likeness(choice: str) -> tuple[float, float]:
        ends = word.rpartition(".")[2], choice.rpartition(".")[2]
        return difflib.SequenceMatcher(None, *ends).ratio(), difflib.SequenceMatcher(None, word, choice).ratio()

    best = max(choices, key=likeness, default="")
    near = likeness(best)[0] >= LIKE
    return f": did you mean {best!r}?" if near else f"; there are: {', '.join(choices) or 'none'}"
