"""Pictures as the numbers that rewards without a model look at."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

LUMA = (0.299, 0.587, 0.114)  # ITU-R BT.601


def eight_bit(pictures: Tensor) -> np.ndarray:
    """Pictures [..., 3, H, W] in [0, 1] as bytes [..., H, W, 3], rounded to the nearest."""
    return (pictures.detach().cpu().float() * 255).round().clamp(0, 255).to(torch.uint8).movedim(-3, -1).numpy()


def grey(pictures: Tensor) -> Tensor:
    """Luminance [..., H, W] in [0, 1] of pictures [..., 3, H, W] in [0, 1], in float64 on the CPU."""
    return torch.einsum("...chw,c->...hw", pictures.detach().cpu().double(), torch.tensor(LUMA, dtype=torch.float64))
