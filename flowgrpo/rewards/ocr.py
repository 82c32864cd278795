"""Text in a picture, read by PP-OCRv6 (small; rapidocr includes its weights) and compared with the text that the prompt
asks for.

That text is the metadata's `text`, or else the first part of the prompt in double quotes. Spaces and case do not count,
as in Flow-GRPO (2505.05470, its reward "ocr"), whose formula this is. Its engine is another one, PaddleOCR's English
model, so that numbers differ where the two read differently.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from flowgrpo.errors import UserError
from flowgrpo.packages import needed
from flowgrpo.rewards.about import About
from flowgrpo.rewards.preprocessing import eight_bit
from flowgrpo.rewards.remote.exchange import side_by_side

MOST = 16  # engines of a process: each holds its own copy of the weights and its workspace
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
    """Share of the wanted text that an image shows, read by PP-OCRv6; None if the prompt asks for none.

    score: `edit`, `exact` or `partial`.
    Raises UserError for another score, and if rapidocr or onnxruntime is missing.
    """

    score: str = "edit"
    about = About(modality="image", range=(0, 1), needs="ocr", licence="Apache-2.0")

    def __post_init__(self) -> None:
        if self.score not in SCORES:
            raise UserError(f"reward 'ocr': score is {self.score!r}, expected {', '.join(SCORES)}")
        _package()

    def __call__(self, images: Tensor, prompts: Sequence[str],
                 metadata: Sequence[dict[str, Any]]) -> list[float | None]:
        texts = [asked(prompt, entry) for prompt, entry in zip(prompts, metadata)]
        lines = iter(read([picture for picture, text in zip(eight_bit(images), texts) if text is not None]))
        return [None if text is None else SCORES[self.score](next(lines), text) for text in texts]


def read(pictures: Sequence[np.ndarray]) -> list[str]:
    """Return the lines of text in each picture, bytes [H, W, 3], from top to bottom.

    Pictures are read by several engines at a time, each on one core. Upside-down text is not turned, as in Flow-GRPO.
    """
    return side_by_side(lambda one: _read(pictures[one.start]), [range(i, i + 1) for i in range(len(pictures))],
                        engines())


def engines() -> int:
    """Return how many pictures are read at a time: this process's share of the cores, at most MOST."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(MOST, cores // int(os.environ.get("LOCAL_WORLD_SIZE", 1))))


_IDLE: list[Any] = []  # engines that read nothing now


def _read(picture: np.ndarray) -> str:
    try:
        engine = _IDLE.pop()
    except IndexError:
        engine = _engine()
    try:
        found = engine(picture[..., ::-1], use_cls=False)  # it takes blue, green, red
    finally:
        _IDLE.append(engine)
    return " ".join(found.txts or ())


def _engine() -> Any:
    """Return a detector and a recogniser of one thread, of this version of PP-OCR whatever the package's default is."""
    package = _package()
    weights = {"ocr_version": package.OCRVersion.PPOCRV6, "model_type": package.ModelType.SMALL}
    threads = {f"EngineConfig.onnxruntime.{kind}_op_num_threads": 1 for kind in ("intra", "inter")}
    return package.RapidOCR(params={"Global.log_level": "error", **threads} | {
        f"{part}.{key}": value for part in ("Det", "Rec") for key, value in weights.items()})


def _package() -> Any:
    """Import the package of the engine. Raises UserError if it, or its runtime, is missing."""
    needed("onnxruntime", "ocr", "reward 'ocr'")
    return needed("rapidocr", "ocr", "reward 'ocr'")
