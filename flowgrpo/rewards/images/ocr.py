"""Is the text there? A picture is read by PP-OCRv4 (rapidocr-onnxruntime, its weights inside) and compared with what
its prompt asks for.

What is asked for: the metadata's `text`, or else the first part of the prompt in double quotes. Spaces and case do not
count, as in Flow-GRPO (2505.05470, its reward "ocr").
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from flowgrpo.errors import UserError
from flowgrpo.extras import needed
from flowgrpo.rewards.about import About
from flowgrpo.rewards.pixels import eight_bit

QUOTED = re.compile(r'["“”„«]([^"“”„«»]+)["“”»]')


def asked(prompt: str, metadata: dict[str, Any]) -> str | None:
    """The text that a prompt asks for, None where it asks for none."""
    text = metadata.get("text")
    if text is None and (quoted := QUOTED.search(prompt)):
        text = quoted[1]
    return str(text) if text is not None and plain(str(text)) else None


def plain(text: str) -> str:
    """A text without what does not count: spaces and case."""
    return "".join(text.split()).lower()


def edits(found: str, wanted: str, anywhere: bool = False) -> int:
    """The least number of insertions, deletions and substitutions of characters between `found` and `wanted`.

    anywhere: between `wanted` and that part of `found` which is nearest to it (Sellers 1980).
    """
    row = [0 if anywhere else i for i in range(len(found) + 1)]
    for done, letter in enumerate(wanted, 1):
        before, row = row, [done]
        for i, other in enumerate(found, 1):
            row.append(min(before[i] + 1, row[-1] + 1, before[i - 1] + (letter != other)))
    return min(row) if anywhere else row[-1]


def exact(found: str, wanted: str) -> float:
    """1 where nothing else than the text is read."""
    return float(plain(found) == plain(wanted))


def edit(found: str, wanted: str) -> float:
    """Flow-GRPO's: 1 - min(d, n) / n with the edit distance d and the length n of the text; 1 where it is contained."""
    found, wanted = plain(found), plain(wanted)
    return 1.0 if wanted in found else 1 - min(edits(found, wanted), len(wanted)) / len(wanted)


def partial(found: str, wanted: str) -> float:
    """1 - d / n with the edit distance d to the nearest part of what is read: other writing costs nothing."""
    return 1 - edits(plain(found), plain(wanted), anywhere=True) / len(plain(wanted))


SCORES = {"edit": edit, "exact": exact, "partial": partial}


@dataclass(frozen=True)
class Ocr:
    """How much of the text that its prompt asks for a picture shows, read by PP-OCRv4; None where none is asked for.

    score: `edit`, `exact` or `partial`. UserError for another one, and where rapidocr-onnxruntime is missing.
    """

    score: str = "edit"
    about = About(modality="image", range=(0, 1), needs="ocr", licence="Apache-2.0")

    def __post_init__(self) -> None:
        if self.score not in SCORES:
            raise UserError(f"reward 'ocr': score is {self.score!r}, expected {', '.join(SCORES)}")
        reader()

    def __call__(self, images: Any, prompts: Sequence[str], metadata: Sequence[dict]) -> list[float | None]:
        wanted = [asked(prompt, entry) for prompt, entry in zip(prompts, metadata)]
        pictures = eight_bit(images)
        return [None if text is None else SCORES[self.score](read(picture), text)
                for picture, text in zip(pictures, wanted)]


def read(picture: Any) -> str:
    """The lines of text in a picture, bytes [H, W, 3], one after the other from top to bottom.

    Text that stands on its head is not turned, as in Flow-GRPO.
    """
    lines, _ = reader()(picture[..., ::-1], use_cls=False)  # it takes blue, green, red
    return " ".join(text for _, text, _ in lines or ())


@lru_cache(maxsize=1)
def reader() -> Any:
    """The engine: detector and recogniser. UserError where its package is missing."""
    return needed("rapidocr_onnxruntime", "ocr", "reward 'ocr'").RapidOCR()
