"""Pictures of a judge's message: outputs, and the source that an edit started from."""

from __future__ import annotations

import base64
import functools
import io
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flowgrpo.data.client_files import require_open
from flowgrpo.errors import UserError
from flowgrpo.rewards.failures import Failed

if TYPE_CHECKING:
    from torch import Tensor

ENCODINGS = {"png": {"compress_level": 1}, "webp": {"quality": 90}}
KEPT = 64  # encoded source pictures in memory


def spaced(count: int, number: int) -> list[int]:
    """Return `number` of `count` frames, evenly spaced from first to last; the middle one for one, all if fewer."""
    if number >= count:
        return list(range(count))
    return [count // 2] if number == 1 else [round(i * (count - 1) / (number - 1)) for i in range(number)]


def data_url(picture: Tensor, longest: int, encoding: str) -> str:
    """Return a picture [3, H, W] in [0, 1] as an 8-bit data URL, its longer side at most `longest` pixels.
    Raises Failed for a picture that holds NaN or an infinity."""
    from PIL import Image

    from flowgrpo.rewards.preprocessing import eight_bit

    if not picture.isfinite().all():
        raise Failed("a judge: a picture holds NaN or an infinity")
    image, file = Image.fromarray(eight_bit(picture)), io.BytesIO()
    if max(image.size) > longest:
        width, height = (max(1, round(side * longest / max(image.size))) for side in image.size)
        image = image.resize((width, height), Image.Resampling.LANCZOS)
    image.save(file, encoding.upper(), **ENCODINGS[encoding])
    return f"data:image/{encoding};base64,{base64.b64encode(file.getvalue()).decode()}"


def picture_part(url: str) -> dict[str, Any]:
    """Return a picture's part of a message."""
    return {"type": "image_url", "image_url": {"url": url}}


def text_part(text: str) -> dict[str, Any]:
    """Return a text's part of a message."""
    return {"type": "text", "text": text}


def sources(entry: dict[str, Any]) -> tuple[str, list[str]]:
    """Return (the metadata key, the paths) of what a prompt's output is made from; ("", []) for none."""
    for key in ("images", "image", "video"):
        if key in entry:
            return key, [str(path) for path in entry[key]] if isinstance(entry[key], list) else [str(entry[key])]
    return "", []


def source_parts(entry: dict[str, Any], frames: int, longest: int, encoding: str) -> list[dict[str, Any]]:
    """Return the labelled source pictures of a prompt, or `frames` frames of its source video, as parts of a message.

    entry: the prompt's metadata; without a source there are no parts. Raises UserError for an unreadable file.
    """
    key, paths = sources(entry)
    if paths:
        require_open()
    parts: list[dict[str, Any]] = []
    for number, path in enumerate(paths, 1):
        try:
            urls = _urls(path, Path(path).stat().st_mtime_ns, key == "video", frames, longest, encoding)
        except (OSError, UserError) as error:
            raise UserError(f"a judge: the source under metadata.{key} cannot be shown ({error})") from None
        parts += [text_part(f"Source {number}:" if len(paths) > 1 else "Source:"), *map(picture_part, urls)]
    return parts


@functools.lru_cache(maxsize=KEPT)
def _urls(path: str, modified: int, video: bool, frames: int, longest: int, encoding: str) -> tuple[str, ...]:
    """Return a source's pictures as data URLs. modified: of the file, which a changed one differs in."""
    from flowgrpo.data.pictures import Clip, frame_count, read_picture
    from flowgrpo.rewards.preprocessing import tensor_of

    pictures = [read_picture(path)] if not video else []
    if video:
        clip = Clip.of(path, frame_count(path)).frames
        pictures = [clip[at] for at in spaced(len(clip), frames)]
    return tuple(data_url(tensor_of(picture), longest, encoding) for picture in pictures)
