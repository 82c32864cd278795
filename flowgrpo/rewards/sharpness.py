"""How sharp a picture is: the variance of its Laplacian (Pech-Pacheco et al. 2000). Noise counts as sharp."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from flowgrpo.errors import UserError
from flowgrpo.rewards.about import About
from flowgrpo.rewards.pixels import grey


def sharpness(images: Any, prompts: Any) -> Tensor:
    """Variance of the Laplacian of a picture's luminance, in [0, 1], without its outermost pixels."""
    light = grey(images)
    if min(light.shape[-2:]) < 3:
        raise UserError(f"reward 'sharpness': got pictures of {light.shape[-1]} x {light.shape[-2]} pixels, expected "
                        "3 x 3 or more")
    inside = light[..., 1:-1, 1:-1]
    around = light[..., :-2, 1:-1] + light[..., 2:, 1:-1] + light[..., 1:-1, :-2] + light[..., 1:-1, 2:]
    return (around - 4 * inside).flatten(-2).var(-1, correction=0)


sharpness.about = About(modality="image", range=(0, None), needs="", licence="Apache-2.0")
