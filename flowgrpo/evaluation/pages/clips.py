"""Clips on disk: an animated WebP and an mp4 for viewing, and a tall picture for reading back."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from PIL import ExifTags, Image

from flowgrpo.errors import UserError
from flowgrpo.evaluation.pages import mp4
from flowgrpo.storage import atomic

if TYPE_CHECKING:
    import torch

SECONDS = 1.2  # shown length of a clip; longer if a frame would be shorter than SHORTEST
SHORTEST, LONGEST = 40, 200  # milliseconds of a frame
MOMENTS = 48  # frames of an animated page


def as_image(picture: torch.Tensor) -> Image.Image:
    """Convert a picture [3, H, W] in [0, 1] to PIL, clamped."""
    pixels = (picture.detach().float().cpu().clamp(0, 1) * 255).round().byte().permute(1, 2, 0)
    return Image.fromarray(pixels.numpy())


def pace(frames: int) -> int:
    """Return the milliseconds of a frame of a clip with so many."""
    return round(min(max(1000 * SECONDS / frames, SHORTEST), LONGEST))


def animate(path: str | Path, frames: Sequence[Image.Image], facts: str | None = None) -> Path:
    """Write pictures of one size as a lossless animated WebP that loops forever, and beside it as an mp4 of the same
    name if there is an encoder. facts: the WebP's EXIF user comment, and the comment of the mp4."""
    path = Path(path)
    with atomic.replacing(path) as file:
        frames[0].save(file, format="WEBP", save_all=True, append_images=frames[1:], duration=pace(len(frames)), loop=0,
                       lossless=True, exif=b"" if facts is None else comment(facts))
    if video := mp4.encode(frames, pace(len(frames)), facts or ""):
        atomic.write_bytes(path.with_suffix(".mp4"), video)
    return path


def comment(text: str) -> bytes:
    """Return EXIF data with a user comment."""
    exif = Image.Exif()
    exif.get_ifd(ExifTags.IFD.Exif)[ExifTags.Base.UserComment] = b"UNICODE\0" + text.encode("utf-16-be")
    return exif.tobytes()


def save_clip(path: str | Path, clip: torch.Tensor, facts: str | None = None) -> Path:
    """Write a clip [F, 3, H, W] in [0, 1] as `animate` does, or for a path that ends with .mp4 as that alone.

    Raises UserError if such an mp4 cannot be encoded.
    """
    path, frames = Path(path), [as_image(frame) for frame in clip]
    if path.suffix != ".mp4":
        return animate(path, frames, facts)
    video = mp4.encode(frames, pace(len(frames)), facts or "")
    if video is None:
        raise UserError(f"{path} cannot be written: {mp4.MISSING}")
    atomic.write_bytes(path, video)
    return path


def moving(images: Sequence[torch.Tensor | str]) -> list[float]:
    """Return the moments, in [0, 1], at which a page of pictures, clips and texts is drawn; empty without clips."""
    count = min(max((len(image) for image in images if getattr(image, "ndim", 0) == 4), default=0), MOMENTS)
    return [i / max(count - 1, 1) for i in range(count)]


def still(image: torch.Tensor, moment: float) -> torch.Tensor:
    """Return the frame [3, H, W] of a picture or a clip at a moment in [0, 1]."""
    return image if image.ndim == 3 else image[round(moment * (len(image) - 1))]


def tall(image: torch.Tensor) -> torch.Tensor:
    """Stack a clip's frames [F, 3, H, W] vertically, [3, F * H, W]; a picture is unchanged."""
    return image if image.ndim == 3 else image.transpose(0, 1).flatten(1, 2)


def untall(image: torch.Tensor, frames: int | None) -> torch.Tensor:
    """Invert `tall`: return the picture (frames: None) or the clip."""
    return image if frames is None else image.unflatten(1, (frames, -1)).transpose(0, 1)
