"""Images that prompts bring beside their text, for pages that show the source left of before and after."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from PIL import Image

from flowgrpo.data.images import Clip, frame_count, read_image
from flowgrpo.data.inputs import Inputs
from flowgrpo.data.prompts import Prompt
from flowgrpo.errors import UserError
from flowgrpo.storage import atomic

if TYPE_CHECKING:
    import torch

NAMES = {"image": "source", "images": "source", "mask_image": "mask", "last_image": "last frame",
         "video": "source", "control_image": "control", "ip_adapter_image": "IP-Adapter"}
FOLDER = "source"  # of a run or a page, with the files that `save` writes
SHOWN, KEPT = 512, 2048  # maximum longer side of an image on a page, and on disk


class Source(NamedTuple):
    """Image [3, H, W] in [0, 1] or clip [F, 3, H, W] of a prompt, and its name on a page."""

    name: str
    image: torch.Tensor


def frames_of(sample: torch.Tensor | str) -> int | None:
    """Number of frames of a clip [F, 3, H, W]; None for others."""
    return len(sample) if not isinstance(sample, str) and sample.ndim == 4 else None


def read_sources(prompt: Prompt, sample: torch.Tensor | str) -> list[Source]:
    """A prompt's images and videos, in order, as upright RGB, but for files that cannot be read any more. sample: what
    was made of the prompt; a source video has as many frames, or all beside anything else than a clip."""
    import torch
    from torchvision.transforms.functional import to_tensor

    found: list[Source] = []
    for key, images in _read(prompt, frames_of(sample)):
        tensors = [to_tensor(within(image, SHOWN).convert("RGB")) for image in images]
        found.append(Source(NAMES[key], torch.stack(tensors) if key == "video" else tensors[0]))
    # Numbers behind names that several have.
    count, seen = Counter(source.name for source in found), Counter[str]()
    for place, source in enumerate(found):
        seen[source.name] += 1
        if count[source.name] > 1:
            found[place] = source._replace(name=f"{source.name} {seen[source.name]}")
    return found


def save(folder: Path, prompts: Sequence[Prompt], frames: int | None = None) -> list[list[str]]:
    """Write what prompts bring into a folder, in place of earlier files: images as 000-image.png, the second of
    several as 000-image-1.png, a video as 000-video.webp without loss. Return the names of each prompt's files."""
    if folder.is_dir():
        for file in folder.iterdir():
            if re.fullmatch(r"\d+-\w+(-\d+)?\.(png|webp)", file.name):
                file.unlink()
    names: list[list[str]] = []
    for number, prompt in enumerate(prompts):
        names.append([])
        seen = Counter[str]()
        for key, images in _read(prompt, frames):
            key = "image" if key == "images" else key
            name = f"{key}-{seen[key]}" if seen[key] else key
            seen[key] += 1
            file = folder / f"{number:03d}-{name}.{'webp' if key == 'video' else 'png'}"
            first, *rest = [within(image, KEPT) for image in images]
            with atomic.replacing(file) as place:
                if key == "video":
                    first.save(place, format="WEBP", save_all=True, append_images=rest, lossless=True, loop=0)
                else:
                    first.save(place, format="PNG")
            names[-1].append(file.name)
    return names


def _read(prompt: Prompt, frames: int | None) -> Iterator[tuple[str, list[Image.Image]]]:
    """Yield each key of a prompt's files with the image, or the frames of the clip."""
    image: Any = prompt.image
    if isinstance(image, Image.Image):  # given as an object
        yield "image", [image.convert("RGB")]
    for key, path in prompt.inputs.paths() if isinstance(prompt.inputs, Inputs) else ():
        try:
            if key == "video":
                yield key, Clip.open(path, min(frames or 2**31, frame_count(path))).frames
            else:
                yield key, [read_image(path)]
        except (OSError, UserError):  # removed or damaged since the run read it
            continue


def within(image: Image.Image, side: int) -> Image.Image:
    """Image scaled down to a longer side of at most so many pixels."""
    factor = side / max(image.size)
    if factor >= 1:
        return image
    width, height = (max(1, round(length * factor)) for length in image.size)
    return image.resize((width, height), Image.Resampling.LANCZOS)
