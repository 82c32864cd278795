"""Rewards of places that a completion names: boxes of an image, and spans of a video."""

import functools
import math
import re
from collections.abc import Sequence
from typing import Any

from flowgrpo.errors import UserError
from flowgrpo.rewards.about import About, built_in
from flowgrpo.text.rewards.answer_keys import LICENCE, Keyed, Metadata, Texts, final_answer, keys, strip_thoughts

Box = tuple[float, float, float, float]
_N = r"\s*(-?\d{1,9}(?:\.\d{1,9})?)\s*"
_BOX = re.compile(rf"[\[(]{_N},{_N},{_N},{_N}[\])]")
_TIME = r"(\d{1,9}(?::\d\d){0,2}(?:\.\d{1,9})?)\s*(?:s\b|sec\b|seconds\b)?"
_SPAN = re.compile(rf"{_TIME}\s*(?:-|\u2013|,|to\b|and\b)\s*{_TIME}", re.I)


def boxes(text: str) -> list[Box]:
    return [(float(a), float(b), float(c), float(d)) for a, b, c, d in _BOX.findall(text)]


def iou(first: Sequence[float], second: Sequence[float]) -> float:
    """The area that two boxes share over that of their union, or the time of two spans; 0 for a box without an area.
    A box or span has its lower ends first, then as many upper ones."""
    sides = len(first) // 2
    both = [*map(max, zip(first[:sides], second[:sides])), *map(min, zip(first[sides:], second[sides:]))]
    shared, *areas = (math.prod(max(0.0, high - low) for low, high in zip(box[:sides], box[sides:]))
                      for box in (both, first, second))
    return shared / (sum(areas) - shared) if min(areas) > 0 else 0.0


def match_score(named: Sequence[Box], wanted: Sequence[Box]) -> float:
    """The sum of the IoU of pairs of boxes over the larger number of boxes: a missed box and a superfluous one both
    count 0. Pairs are formed from the best IoU on, each box in one."""
    pairs = sorted(((iou(box, other), -i, -j) for i, box in enumerate(named) for j, other in enumerate(wanted)),
                   reverse=True)
    total = 0.0
    while pairs:
        value, best, of = pairs[0]
        total += value
        pairs = [pair for pair in pairs if pair[1] != best and pair[2] != of]
    return total / max(len(named), len(wanted), 1)


@built_in("box_iou")
class BoxIoU(Keyed):
    """Mean IoU of the boxes that a completion's answer names with those in the metadata (Visual-RFT).

    A box is [left, top, right, bottom] in the text. The boxes are those of the answer that the completion states (see
    `answer_keys.final_answer`), or of the text after its thoughts. Each is matched with one of the key; missed and
    superfluous boxes count 0.
    key: of the metadata, a box or a list of boxes; None for a prompt without it.
    """

    key: str = "boxes"
    about = About(modality="text", range=(0, 1), needs="", licence=LICENCE)

    def read(self, value: object) -> list[Box]:
        entries: list[Any] = value if isinstance(value, list) and value and isinstance(value[0], list) else [value]
        for box in entries:
            if not (isinstance(box, list) and len(box) == 4 and all(type(side) in (int, float) for side in box)
                    and box[0] < box[2] and box[1] < box[3]):
                raise ValueError("expected a box [left, top, right, bottom], or a list of boxes")
        return [(float(a), float(b), float(c), float(d)) for a, b, c, d in entries]

    def _one(self, completion: str, accepted: Sequence[Box]) -> float:
        return match_score(boxes(final_answer(completion) or strip_thoughts(completion)), accepted)


@built_in("box_format")
class BoxFormat:
    """1 if a completion, thoughts included, names a box and all its boxes are sound, otherwise 0 (GRIT).

    A sound box [left, top, right, bottom] has left < right, top < bottom, and lies inside the image.
    key: metadata key of the image's [width, height]; without it a box only has to start at 0 or more.
    """

    key: str = "size"
    about = About(modality="text", range=(0, 1), needs="", licence=LICENCE)

    def __call__(self, completions: Texts, prompts: Texts, metadata: Metadata) -> list[float]:
        sizes = keys("box_format", metadata, self.key, prompts, _size)
        scores = []
        for text, size in zip(completions, sizes):
            named, (width, height) = boxes(text), size or (float("inf"), float("inf"))
            sound = all(0 <= left < right <= width and 0 <= top < bottom <= height
                        for left, top, right, bottom in named)
            scores.append(float(bool(named) and sound))
        return scores


def _size(value: object) -> tuple[float, float]:
    if isinstance(value, list) and len(value) == 2 and all(type(side) in (int, float) and side > 0 for side in value):
        return float(value[0]), float(value[1])
    raise ValueError("expected [width, height]")


def seconds(text: str) -> float:
    """A time, such as 12.5, 1:05 or 1:02:03.5, in seconds."""
    return functools.reduce(lambda total, part: 60 * total + float(part), text.split(":"), 0.0)


def span(text: str) -> tuple[float, float] | None:
    """The last span of time that a text names, such as "12.5 to 20 s", "[12.5, 20]" or "0:05-0:20"."""
    spans = _SPAN.findall(text)
    return (seconds(spans[-1][0]), seconds(spans[-1][1])) if spans else None


@built_in("time_iou")
class TimeIoU(Keyed):
    """IoU of the span of time that a completion's answer names with the one in the metadata.

    The span is the last one of the answer that the completion states, or of the text after its thoughts.
    key: of the metadata, [start, end] in seconds; None for a prompt without it. floor: an IoU below it scores 0.
    """

    key: str = "span"
    floor: float = 0.0
    about = About(modality="text", range=(0, 1), needs="", licence=LICENCE)

    def __post_init__(self) -> None:
        if not 0 <= self.floor < 1:
            raise UserError(f"reward 'time_iou': floor is {self.floor}, expected from 0 to below 1")

    def read(self, value: object) -> tuple[float, float]:
        if (isinstance(value, list) and len(value) == 2 and all(type(time) in (int, float) for time in value)
                and 0 <= value[0] < value[1]):
            return float(value[0]), float(value[1])
        raise ValueError("expected [start, end] in seconds")

    def _one(self, completion: str, accepted: tuple[float, float]) -> float:
        named = span(final_answer(completion) or strip_thoughts(completion))
        value = 0.0 if named is None else iou(named, accepted)
        return value if value >= self.floor else 0.0
