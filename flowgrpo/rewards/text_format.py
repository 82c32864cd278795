"""Whether a completion keeps a form of tags: <think>...</think><answer>...</answer>."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from flowgrpo.errors import UserError
from flowgrpo.rewards.about import About
from flowgrpo.rewards.text_keys import LICENCE


@dataclass(frozen=True)
class FormatTags:
    """The share of what a form of tags asks for that a completion keeps; 1 where it keeps it all.

    tags: their names, in their order. Asked for are each opening and each closing tag exactly once, all of them in
    their order, and text inside every pair but none outside; the last two count only with all before them. graded:
    else 1 for all of it and 0 for less. begun: the prompt ends with the first opening tag, as some chat templates do,
    which then counts as kept and may not come again.
    """

    tags: Sequence[str] = ("think", "answer")
    graded: bool = True
    begun: bool = False
    about = About(modality="text", range=(0, 1), needs="", licence=LICENCE)

    def __post_init__(self) -> None:
        fit = isinstance(self.tags, (list, tuple)) and self.tags and all(
            isinstance(tag, str) and re.fullmatch(r"[A-Za-z][\w-]*", tag) for tag in self.tags)
        if not fit or len(set(self.tags)) < len(self.tags):
            raise UserError(f"reward 'format_tags': tags is {self.tags!r}, expected different names, such as "
                            "[think, answer]")

    def __call__(self, completions: Sequence[str], prompts: Sequence[str]) -> list[float]:
        shares = [kept(f"<{self.tags[0]}>{text}" if self.begun else text, self.tags) for text in completions]
        return shares if self.graded else [float(share == 1) for share in shares]


def kept(text: str, tags: Sequence[str]) -> float:
    """The share of 2 T + 2 demands that a text keeps: T opening and T closing tags once, their order, and text inside
    every pair and nowhere else."""
    marks = [mark for tag in tags for mark in (f"<{tag}>", f"</{tag}>")]
    once = [text.count(mark) == 1 for mark in marks]
    places = [text.find(mark) for mark in marks]
    ordered = all(once) and places == sorted(places)
    inner = r"\s*".join(rf"<{tag}>(?=\s*\S)(?!\s*</{tag}>).*?</{tag}>" for tag in tags)
    return (sum(once) + ordered + (ordered and re.fullmatch(rf"\s*{inner}\s*", text, re.S) is not None)) / (
        len(marks) + 2)
