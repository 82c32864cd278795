"""How much a completion repeats itself, by its n-grams."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from flowgrpo.errors import UserError
from flowgrpo.rewards.about import About
from flowgrpo.rewards.text_keys import LICENCE

UNITS = ("words", "characters")


def distinct(text: str, n: int, unit: str = "words") -> float | None:
    """The share of a text's n-grams that are different ones (Li et al. 2016, 1510.03055); None where it has none.

    unit: words between spaces, in lower case, or characters without spaces.
    """
    parts = text.casefold().split()
    parts = list("".join(parts)) if unit == "characters" else parts
    count = len(parts) - n + 1
    return len({tuple(parts[i:i + n]) for i in range(count)}) / count if count > 0 else None


def _require(reward: str, n: int, unit: str) -> None:
    if type(n) is not int or n < 1 or unit not in UNITS:
        raise UserError(f"reward {reward!r}: n is {n!r} and unit {unit!r}, expected 1 or more, and words or characters")


@dataclass(frozen=True)
class Repetition:
    """Minus the share of a completion's n-grams that repeat earlier ones: 0 where none does.

    unit: words, or characters, for a language without spaces.
    """

    n: int = 3
    unit: str = "words"
    about = About(modality="text", range=(-1, 0), needs="", licence=LICENCE)

    def __post_init__(self) -> None:
        _require("repetition", self.n, self.unit)

    def __call__(self, completions: Sequence[str], prompts: Sequence[str]) -> list[float]:
        shares = [distinct(text, self.n, self.unit) for text in completions]
        return [0.0 if share is None else share - 1 for share in shares]


@dataclass(frozen=True)
class Distinct:
    """The share of a completion's n-grams that are different ones, distinct-n; 0 where it has none.

    unit: as of `Repetition`. A short text has a large share by nature.
    """

    n: int = 2
    unit: str = "words"
    about = About(modality="text", range=(0, 1), needs="", licence=LICENCE)

    def __post_init__(self) -> None:
        _require("distinct", self.n, self.unit)

    def __call__(self, completions: Sequence[str], prompts: Sequence[str]) -> list[float]:
        return [distinct(text, self.n, self.unit) or 0.0 for text in completions]
