"""Measures of an image without a model, and SSIM of two images.

Size as a JPEG: "compressibility" and "incompressibility" of DDPO (2305.13301), in kilobytes of 1,000 bytes at quality
95. They are known to ruin images if nothing counteracts them.

Sharpness: the variance of the Laplacian (Pech-Pacheco et al. 2000). Noise counts as sharp.

SSIM (Wang et al. 2004, "Image quality assessment: from error visibility to structural similarity") is of the luminance,
with the paper's window and constants.
"""

from __future__ import annotations

import io
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from flowgrpo.errors import UserError
from flowgrpo.rewards.about import About, described
from flowgrpo.rewards.preprocessing import eight_bit, grey

QUALITY = 95
SIDE, DEVIATION = 11, 1.5  # pixels of SSIM's Gaussian window
STEADY = 0.01**2, 0.03**2  # SSIM's constants, for values in [0, 1]


def kilobytes(images: Tensor) -> list[float]:
    """Return the size of each picture as a JPEG, in kilobytes."""
    from PIL import Image

    sizes = []
    for picture in eight_bit(images):
        kept = io.BytesIO()
        Image.fromarray(picture).save(kept, "JPEG", quality=QUALITY)
        sizes.append(kept.tell() / 1000)
    return sizes


@described(About(modality="image", range=(None, 0), needs="", licence="Apache-2.0"))
def jpeg_compressibility(images: Tensor, prompts: Sequence[str]) -> list[float]:
    """Minus the size of an image as a JPEG of quality 95, in kilobytes (DDPO)."""
    return [-size for size in kilobytes(images)]


@described(About(modality="image", range=(0, None), needs="", licence="Apache-2.0"))
def jpeg_incompressibility(images: Tensor, prompts: Sequence[str]) -> list[float]:
    """Size of an image as a JPEG of quality 95, in kilobytes (DDPO)."""
    return kilobytes(images)


@described(About(modality="image", range=(0, None), needs="", licence="Apache-2.0"))
def sharpness(images: Tensor, prompts: Sequence[str]) -> Tensor:
    """Variance of the Laplacian of an image's luminance, in [0, 1], without its outermost pixels."""
    light = grey(images)
    if min(light.shape[-2:]) < 3:
        raise UserError(f"reward 'sharpness': got images of {light.shape[-1]} x {light.shape[-2]} pixels, expected "
                        "3 x 3 or more")
    inside = light[..., 1:-1, 1:-1]
    around = light[..., :-2, 1:-1] + light[..., 2:, 1:-1] + light[..., 1:-1, :-2] + light[..., 1:-1, 2:]
    return (around - 4 * inside).flatten(-2).var(-1, correction=0)


def ssim(one: Tensor, two: Tensor) -> Tensor:
    """Return SSIM at each place of two luminances [H, W] in [0, 1] that the window fits into: [H-10, W-10]."""
    places = torch.arange(SIDE, dtype=one.dtype) - SIDE // 2
    line = torch.exp(-places.square() / (2 * DEVIATION**2))
    window = (line[:, None] * line / line.sum() ** 2)[None, None]
    maps = torch.stack([one, two, one * one, two * two, one * two])[:, None]
    mean, other, square, other_square, product = F.conv2d(maps, window)[:, 0]
    variance, other_variance, covariance = square - mean**2, other_square - other**2, product - mean * other
    light, contrast = STEADY
    return ((2 * mean * other + light) * (2 * covariance + contrast)
            / ((mean**2 + other**2 + light) * (variance + other_variance + contrast)))
