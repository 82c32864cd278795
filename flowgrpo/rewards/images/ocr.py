"""Text in a picture, read by PP-OCRv4 (rapidocr-onnxruntime, which includes its weights) and compared with the text
that the prompt asks for.

That text is the metadata's `text`, or else the first part of the prompt in double quotes. Spaces and case do not count,
as in Flow-GRPO (2505.05470, its reward "ocr").
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from torch import Tensor

from flowgrpo.errors import UserError
from flowgrpo.extras import needed
from flowgrpo.rewards.about import About
from flowgrpo.rewards.pixels import eight_bit

QUOTED = re.compile(r'["“”„«]([^"“”„«»]+)["“”»]')


def asked(prompt: str, metadata: dict[str, Any]) -> str | None:
    """Return the text that a prompt asks for, None if none."""
    text = metadata.get("text")
    if text is None and (quoted := QUOTED.search(prompt)):
        text = quoted[1]
    return str(text) if text is not None and plain(str(text)) else None


def plain(text: str) -> str:
    """Return a text without spaces and case, which do not count."""
    return "".join(text.split()).lower()


def edits(text: str, target: str, anywhere: bool = False) -> int:
    """Return the edit distance: the least number of inserted, deleted and substituted characters from `text` to
    `target`.

    anywhere: to `target` from its nearest part of `text` (Sellers 1980).
    """
    row = [0 if anywhere else i for i in range(len(text) + 1)]
    for done, letter in enumerate(target, 1):
        before, row = row, [done]
        for i, other in enumerate(text, 1):
            row.append(min(before[i] + 1, row[-1] + 1, before[i - 1] + (letter != other)))
    return min(row) if anywhere else row[-1]


def exact(text: str, target: str) -> float:
    """Return 1 if exactly the wanted text is read, else 0."""
    return float(plain(text) == plain(target))


def edit(text: str, target: str) -> float:
    """Return Flow-GRPO's score: 1 - min(d, n) / n with edit distance d and length n of the text; 1 if it is contained.
    """
    text, target = plain(text), plain(target)
    return 1.0 if target in text else 1 - min(edits(text, target), len(target)) / len(target)


def partial(text: str, target: str) -> float:
    """Return 1 - d / n with the edit distance d to the nearest part of the read text: other writing costs nothing."""
    return 1 - edits(plain(text), plain(target), anywhere=True) / len(plain(target))


SCORES = {"edit": edit, "exact": exact, "partial": partial}


@dataclass(frozen=True)
class Ocr:
    """Share of the wanted text that a picture shows, read by PP-OCRv4; None if the prompt asks for none.

    score: `edit`, `exact` or `partial`.
    Raises UserError for another score, and if rapidocr-onnxruntime is missing.
    """

    score: str = "edit"
    about = About(modality="image", range=(0, 1), needs="ocr", licence="Apache-2.0")

    def __post_init__(self) -> None:
        if self.score not in SCORES:
            raise UserError(f"reward 'ocr': score is {self.score!r}, expected {', '.join(SCORES)}")
        reader()

    def __call__(self, images: Tensor, prompts: Sequence[str],
                 metadata: Sequence[dict[str, Any]]) -> list[float | None]:
        texts = [asked(prompt, entry) for prompt, entry in zip(prompts, metadata)]
        pictures = eight_bit(images)
        return [None if text is None else SCORES[self.score](read(picture), text)
                for picture, text in zip(pictures, texts)]


def read(picture: np.ndarray) -> str:
    """Return the lines of text in a picture, bytes [H, W, 3], from top to bottom.

    Upside-down text is not turned, as in Flow-GRPO.
    """
    lines, _ = reader()(picture[..., ::-1], use_cls=False)  # the reader takes blue, green, red
    return " ".join(text for _, text, _ in lines or ())


@lru_cache(maxsize=1)
def reader() -> Any:
    """Return the engine: detector and recogniser.
    Raises UserError if its package is missing."""
    return needed("rapidocr_onnxruntime", "ocr", "reward 'ocr'").RapidOCR()
