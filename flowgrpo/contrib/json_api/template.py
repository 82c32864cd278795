"""JSON of a request, made of a template and a sample, and values at a path of an answer."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from flowgrpo.errors import UserError, nearest
from flowgrpo.escaped import one_line
from flowgrpo.rewards.failures import Failed
from flowgrpo.rewards.vlm_judge.pictures import data_url, spaced

if TYPE_CHECKING:
    from torch import Tensor

NAMES = ("prompt", "image", "frames", "text", "metadata")  # of slots; metadata.KEY too
SLOT = re.compile(r"\{([A-Za-z]\w*(?:\.[\w-]+)*)\}")
NOUNS = {"text": "texts", "image": "pictures", "frames": "videos"}  # what samples are, by their slot


@dataclass(frozen=True)
class Template:
    """JSON with slots in its strings, such as {prompt}.

    who: begins errors. longest: pixels of a picture's longer side; larger ones are shrunk. encoding: png or webp.
    frames: of a video, evenly spaced.
    Raises UserError for an unknown slot.
    """

    who: str
    json: Any
    longest: int = 1024
    encoding: str = "png"
    frames: int = 8

    def __post_init__(self) -> None:
        for name in _slots(self.json):
            if name not in NAMES and not name.startswith("metadata."):
                raise UserError(f"{self.who}: its request has the slot {{{name}}}"
                                f"{nearest(name, [*NAMES, 'metadata.KEY'])}")

    @property
    def sends(self) -> list[str]:
        """Return what requests hold, in words, for what a run prints."""
        words = {"prompt": "prompts", "metadata": "metadata", "text": "texts", "image": "images", "frames": "frames"}
        names = {name.partition(".")[0] for name in _slots(self.json)}
        return [word for name, word in words.items() if name in names] or ["requests"]

    def filled(self, output: Tensor | str, prompt: str, entry: dict[str, Any]) -> Any:
        """Return the JSON of a sample.

        output: a picture [3, H, W] or a video [F, 3, H, W] in [0, 1], or a text. entry: the prompt's metadata.
        Raises Failed for metadata that the prompt lacks and a picture that is not finite, UserError for a slot of
        another kind of samples.
        """
        return _filled(self.json, {name: self._value(name, output, prompt, entry) for name in {*_slots(self.json)}})

    def _value(self, name: str, output: Tensor | str, prompt: str, entry: dict[str, Any]) -> Any:
        """Return what a slot is replaced by."""
        if name == "prompt":
            return prompt
        if name.startswith("metadata"):
            return reached(entry, name.partition(".")[2], f"{self.who}: the prompt's metadata")
        kind = "text" if isinstance(output, str) else "image" if output.ndim == 3 else "frames"
        if name != kind and (name, kind) != ("frames", "image"):
            raise UserError(f"{self.who}: its request has the slot {{{name}}}, and its samples are {NOUNS[kind]}: "
                            f"write {{{kind}}}")
        if isinstance(output, str):
            return output
        if name == "image":
            return self._base64(output)
        pictures = output[None] if kind == "image" else output[spaced(len(output), self.frames)]
        return [self._base64(picture) for picture in pictures]

    def _base64(self, picture: Tensor) -> str:
        if not picture.isfinite().all():
            raise Failed(f"{self.who}: a picture holds NaN or an infinity")
        return data_url(picture, self.longest, self.encoding).partition(",")[2]


def reached(value: Any, path: str, whose: str) -> Any:
    """Return the value at a path of keys and of places in lists, joined by dots; "" is the whole value.
    Raises Failed, which begins with `whose`, if there is none."""
    for part in path.split(".") if path else ():
        if isinstance(value, dict) and part in value:
            value = value[part]
        elif isinstance(value, list) and part.isdecimal() and int(part) < len(value):
            value = value[int(part)]
        else:
            raise Failed(f"{whose} has no {path!r}: {part!r} is not in {_described(value)}")
    return value


def _described(value: Any) -> str:
    """Return what a path can go into, in some words."""
    if isinstance(value, dict):
        return f"an object of {one_line(', '.join(map(str, value)))[:200] or 'no keys'}"
    return f"a list of {len(value)}" if isinstance(value, list) else f"a value of type {type(value).__name__}"


def _slots(template: Any) -> Iterator[str]:
    """Yield the names of a template's slots."""
    if isinstance(template, str):
        yield from SLOT.findall(template)
    elif isinstance(template, (dict, list)):
        for inner in template.values() if isinstance(template, dict) else template:
            yield from _slots(inner)


def _filled(template: Any, values: Mapping[str, Any]) -> Any:
    """Return a template with its slots replaced; what stands in a value is not replaced again."""
    if isinstance(template, dict):
        return {key: _filled(inner, values) for key, inner in template.items()}
    if isinstance(template, list):
        return [_filled(inner, values) for inner in template]
    if not isinstance(template, str):
        return template
    if whole := SLOT.fullmatch(template):
        return values[whole[1]]
    return SLOT.sub(lambda slot: values[slot[1]] if isinstance(values[slot[1]], str) else json.dumps(values[slot[1]]),
                    template)
