"""Conversions of pictures for rewards without a model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from flowgrpo.data.open_picture import FLOATS, opened, upright
from flowgrpo.errors import UserError

if TYPE_CHECKING:
    from PIL.Image import Image

LUMA = (0.299, 0.587, 0.114)  # ITU-R BT.601


def tensor_of(image: Image) -> Tensor:
    """Return a picture [3, H, W] in [0, 1]. 16-bit grey keeps its levels; `convert("RGB")` would clip them at 255."""
    from torchvision.transforms.functional import to_tensor

    if not image.mode.startswith("I;16"):
        return to_tensor(image.convert("RGB"))
    return torch.from_numpy(np.array(image, dtype=np.float32) / 65535).expand(3, -1, -1)


def read_tensor(path: str | Path) -> Tensor:
    """Return the picture of a file, upright: [3, H, W] in [0, 1]. Raises UserError if it is none."""
    with opened(path, FLOATS) as picture:
        return tensor_of(upright(picture))


def read_tensors(path: str | Path) -> list[Tensor]:
    """Return the frames of an animated picture, upright, each [3, H, W] in [0, 1]; of a still picture one.

    Raises UserError if it is none, and for more than FLOATS pixels in all frames.
    """
    from PIL import ImageSequence

    frames: list[Tensor] = []
    with opened(path, FLOATS) as picture:
        for frame in ImageSequence.Iterator(picture):
            if (len(frames) + 1) * frame.width * frame.height > FLOATS:
                raise UserError(f"{path} has more than {FLOATS:,} pixels in its frames: scale it down, or cut it")
            frames.append(tensor_of(upright(frame)))
    return frames


def eight_bit(pictures: Tensor) -> np.ndarray:
    """Return pictures [..., 3, H, W] in [0, 1] as bytes [..., H, W, 3], rounded to the nearest."""
    return (pictures.detach().cpu().float() * 255).round().clamp(0, 255).to(torch.uint8).movedim(-3, -1).numpy()


def grey(pictures: Tensor) -> Tensor:
    """Return the luminance [..., H, W] in [0, 1] of pictures [..., 3, H, W] in [0, 1], in float64 on the CPU."""
    return torch.einsum("...chw,c->...hw", pictures.detach().cpu().double(), torch.tensor(LUMA, dtype=torch.float64))
