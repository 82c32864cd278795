"""Hints for prompts that no sample solves: a part of a method's `redraw`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from flowgrpo.advantages import RELATIVE_NOISE
from flowgrpo.data import Prompt

if TYPE_CHECKING:
    from flowgrpo.drawn import Drawn

BOOK = "hinted"  # the key of the metadata under which a prompt with hints keeps what it came from


@dataclass(frozen=True)
class Hints:
    """A group without a sample above `fail` is sampled again with a hint in its prompt, and with one more while it
    still fails and hints are left (Scaf-GRPO, 2510.19807; GHPO, 2507.10628).

    Hints stand in the prompt's metadata, from the vaguest to the plainest: a list of texts under `hints`. With `shares`
    they are the first so large parts of the text under `solution`, by words. text: how prompt and hints become one.
    after: the share of the run before which nobody is helped. Samples and replays, old and new probabilities, all read
    the prompt with its hints, so that ratios are those of the policy that answered. A prompt without hints stays.
    """

    shares: tuple[float, ...] = ()
    after: float = 0.0
    fail: float = 0.0
    text: str = "{prompt}\n\nHint: {hint}"

    def __post_init__(self) -> None:
        if any(not 0 < share <= 1 for share in self.shares) or list(self.shares) != sorted(set(self.shares)):
            raise ValueError(f"Hints: shares are {list(self.shares)}, expected rising numbers above 0 to 1")
        if not 0 <= self.after <= 1:
            raise ValueError(f"Hints: after is {self.after}, expected 0 to 1")
        if "{prompt}" not in self.text or "{hint}" not in self.text:
            raise ValueError(f"Hints: text is {self.text!r}, expected both {{prompt}} and {{hint}} in it")

    def __call__(self, drawn: Drawn) -> list[tuple[int, Prompt]]:
        if drawn.epoch < self.after * drawn.epochs:
            return []
        best = drawn.totals.nan_to_num(float("-inf")).amax(1)
        failed = (best <= self.fail + RELATIVE_NOISE * abs(self.fail)).tolist()
        helped = [(place, self.helped(drawn.prompts[place])) for place in drawn.standing() if failed[place]]
        return [(place, prompt) for place, prompt in helped if prompt is not None]

    def helped(self, prompt: Prompt) -> Prompt | None:
        """The prompt with one more hint; None where none is left."""
        book = prompt.metadata.get(BOOK, {"prompt": prompt.text, "given": 0})
        hints, given = self.hints(prompt.metadata), book["given"] + 1
        if given > len(hints):
            return None
        hint = hints[given - 1] if self.shares else "\n".join(hints[:given])
        text = self.text.replace("{prompt}", book["prompt"]).replace("{hint}", hint)
        return Prompt(text, prompt.negative, prompt.metadata | {BOOK: book | {"given": given}}, prompt.image,
                      prompt.weight)

    def hints(self, metadata: dict[str, Any]) -> list[str]:
        """What a prompt's metadata offers: hints, or ever longer beginnings of its solution."""
        if not self.shares:
            return [str(hint) for hint in metadata.get("hints", ())]
        words = str(metadata.get("solution", "")).split()
        return [" ".join(words[:max(1, round(share * len(words)))]) for share in self.shares] if words else []
