"""Reward for images in colours of your own, such as a brand's."""

import re
from collections.abc import Sequence

import torch
from torch import Tensor

from flowgrpo.errors import UserError
from flowgrpo.rewards.about import About, built_in

# Linear sRGB to the responses of three cones, and their cube roots to lightness and two opponent colours.
CONES = torch.tensor([[0.4122214708, 0.5363325363, 0.0514459929], [0.2119034982, 0.6806995451, 0.1073969566],
                      [0.0883024619, 0.2817188376, 0.6299787005]])
OPPONENT = torch.tensor([[0.2104542553, 0.7936177850, -0.0040720468], [1.9779984951, -2.4285922050, 0.4505937099],
                         [0.0259040371, 0.7827717662, -0.8086757660]])
LEAST = 1e-6  # of a cone's response, whose cube root has a gradient


def oklab(images: Tensor) -> Tensor:
    """Oklab coordinates of sRGB images [B, 3, H, W] in [0, 1]; black and white are 1 apart (Ottosson, 2020)."""
    linear = torch.where(images <= 0.04045, images / 12.92, ((images.clamp(min=0.04045) + 0.055) / 1.055) ** 2.4)
    cones, opponent = CONES.to(images), OPPONENT.to(images)
    return torch.einsum("ij,bjhw->bihw", opponent,
                        torch.einsum("ij,bjhw->bihw", cones, linear).clamp(min=LEAST) ** (1 / 3))


@built_in("palette", "colour color brand hex tone")
class Palette:
    """Mean closeness of an image's pixels to the nearest of some colours, exp(-(d / tolerance)^2), d in Oklab.

    colours: as "#rrggbb".
    tolerance: distance at which a pixel counts 1/e; black and white are 1 apart.
    """

    colours: tuple[str, ...] | list[str]
    tolerance: float = 0.1
    differentiable = True
    about = About(modality="image", range=(0, 1), needs="", licence="Apache-2.0")

    def __post_init__(self) -> None:
        for colour in self.colours or ("",):
            if not re.fullmatch("#[0-9a-fA-F]{6}", str(colour)):
                raise UserError(f"reward 'palette': got the colour {colour!r}, expected colours such as '#ff8800'")
        if self.tolerance <= 0:
            raise UserError(f"reward 'palette': tolerance is {self.tolerance}, expected above 0")

    def __call__(self, images: Tensor, prompts: Sequence[str]) -> Tensor:
        wanted = torch.tensor([[*bytes.fromhex(colour[1:])] for colour in self.colours]).to(images) / 255
        places = oklab(wanted[:, :, None, None])[:, None]  # [colours, 1, 3, 1, 1]
        nearest = (oklab(images) - places).square().sum(2).amin(0)
        return (-nearest / self.tolerance**2).exp().mean((-2, -1))
