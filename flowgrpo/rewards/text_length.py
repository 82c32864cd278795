"""How long a completion is: within a window, or not beyond a limit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from flowgrpo.errors import UserError
from flowgrpo.rewards.about import About
from flowgrpo.rewards.text_keys import LICENCE
from flowgrpo.rewards.wire import one_line

UNITS = ("words", "characters", "tokens")
TOKENS = "completion_tokens"  # of the metadata


def sizes(reward: str, completions: Sequence[str], prompts: Sequence[str], metadata: Sequence[dict[str, Any]],
          unit: str) -> list[float]:
    """The length of each completion: words between spaces, characters, or the tokens that its metadata tell under
    `completion_tokens`. UserError where they tell no number from 0 up."""
    if unit == "words":
        return [len(text.split()) for text in completions]
    if unit == "characters":
        return [len(text) for text in completions]
    for entry, prompt in zip(metadata, prompts):
        told = entry.get(TOKENS)
        if type(told) not in (int, float) or not told >= 0:
            raise UserError(f"reward {reward!r}: metadata.{TOKENS} is {one_line(repr(told)[:80])}, expected how many "
                            f"tokens the completion has; or set unit: words (prompt: {one_line(prompt[:80])!r})")
    return [entry[TOKENS] for entry in metadata]


def window(size: float, low: float, high: float, margin: float) -> float:
    """1 within [low, high], falling evenly to 0 at a distance of `margin` from it; with a margin of 0, at once."""
    beyond = max(low - size, size - high, 0)
    return 1.0 if beyond == 0 else max(0.0, 1 - beyond / margin) if margin else 0.0


def overlong(size: float, longest: float, buffer: float) -> float:
    """0 up to longest - buffer, falling evenly to -1 at `longest`, and -1 beyond (DAPO, 2503.14476, equation 13)."""
    if size > longest:
        return -1.0
    return min(0.0, (longest - buffer - size) / buffer) if buffer else 0.0


def _require(reward: str, holds: bool, unit: str, expected: str) -> None:
    if unit not in UNITS:
        raise UserError(f"reward {reward!r}: unit is {unit!r}, expected {', '.join(UNITS)}")
    if not holds:
        raise UserError(f"reward {reward!r}: expected {expected}")


@dataclass(frozen=True)
class Length:
    """1 where a completion is as long as wanted, from `low` to `high`, falling evenly to 0 within a margin.

    unit: words, characters, or tokens, whose number the metadata have to tell as `completion_tokens`.
    """

    low: float
    high: float
    margin: float = 0.0
    unit: str = "words"
    about = About(modality="text", range=(0, 1), needs="", licence=LICENCE)

    def __post_init__(self) -> None:
        _require("text_length", 0 <= self.low <= self.high and self.margin >= 0, self.unit,
                 f"0 <= low <= high and a margin of 0 or more, got {self.low}, {self.high}, {self.margin}")

    def __call__(self, completions: Sequence[str], prompts: Sequence[str], metadata: Sequence[dict]) -> list[float]:
        return [window(size, self.low, self.high, self.margin)
                for size in sizes("text_length", completions, prompts, metadata, self.unit)]


@dataclass(frozen=True)
class Overlong:
    """0 for a completion that ends in time, falling evenly to -1 over the last `buffer` before `longest` (DAPO).

    Soft overlong punishment (2503.14476, equation 13; there 20480 tokens with a buffer of 4096). unit: as of `Length`.
    """

    longest: float
    buffer: float
    unit: str = "tokens"
    about = About(modality="text", range=(-1, 0), needs="", licence=LICENCE)

    def __post_init__(self) -> None:
        _require("overlong", 0 <= self.buffer <= self.longest and self.longest > 0, self.unit,
                 f"0 <= buffer <= longest, above 0, got buffer {self.buffer}, longest {self.longest}")

    def __call__(self, completions: Sequence[str], prompts: Sequence[str], metadata: Sequence[dict]) -> list[float]:
        return [overlong(size, self.longest, self.buffer)
                for size in sizes("overlong", completions, prompts, metadata, self.unit)]
