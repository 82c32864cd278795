"""How large a picture is as a JPEG: the rewards "compressibility" and "incompressibility" of DDPO (2305.13301), in
kilobytes of 1,000 bytes at quality 95. They need neither a model nor a prompt, and are a known case of rewards that
ruin pictures when nothing holds them back."""

from __future__ import annotations

import io
from typing import Any

from flowgrpo.rewards.about import About
from flowgrpo.rewards.pixels import eight_bit

QUALITY = 95


def kilobytes(images: Any) -> list[float]:
    """The size of each picture as a JPEG, in kilobytes."""
    from PIL import Image

    sizes = []
    for picture in eight_bit(images):
        kept = io.BytesIO()
        Image.fromarray(picture).save(kept, "JPEG", quality=QUALITY)
        sizes.append(kept.tell() / 1000)
    return sizes


def jpeg_compressibility(images: Any, prompts: Any) -> list[float]:
    """Minus the size of a picture as a JPEG of quality 95, in kilobytes (DDPO)."""
    return [-size for size in kilobytes(images)]


def jpeg_incompressibility(images: Any, prompts: Any) -> list[float]:
    """The size of a picture as a JPEG of quality 95, in kilobytes (DDPO)."""
    return kilobytes(images)


jpeg_compressibility.about = About(modality="image", range=(None, 0), needs="", licence="Apache-2.0")
jpeg_incompressibility.about = About(modality="image", range=(0, None), needs="", licence="Apache-2.0")
