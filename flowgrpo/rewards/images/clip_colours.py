"""Colour of an object as GenEval's published evaluation names it: zero-shot classification by CLIP ViT-L/14.

The picture is cut to the object's box. Where the detector gives a mask, all outside it is painted grey, #999. Each of
the ten colours is the normalised mean of the embeddings of three texts; the one nearest to the picture's counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import normalize

from flowgrpo.rewards.clip import ClipCosine
from flowgrpo.rewards.images.colours import NAMES
from flowgrpo.rewards.images.detections import Detection

TEXTS = ("a photo of a {colour} {label}", "a photo of a {colour}-colored {label}", "a photo of a {colour} object")
GREY = 0x99  # of the background


class ColourClip(ClipCosine):
    """CLIP model of `ClipColours`; its errors name the reward."""

    reward = "geneval"


@dataclass(frozen=True)
class ClipColours:
    """Colours of detections in a picture, one of GenEval's ten each, by CLIP.

    model, pretrained, parts: as in `ClipScore`. dtype (fp32), device and batch_size (32 objects): as in `LocalModel`.
    Raises UserError if open_clip or the weights are missing.
    """

    model: str = "ViT-L-14-quickgelu"
    pretrained: str = "openai"
    dtype: str = "fp32"
    device: str | None = None
    batch_size: int = 32
    parts: Any = field(default=None, repr=False)
    clip: ColourClip = field(init=False, repr=False)
    _texts: dict[str, Tensor] = field(init=False, repr=False, default_factory=dict)  # by label: [10, D]

    def __post_init__(self) -> None:
        clip = ColourClip(self.model, self.pretrained, dtype=self.dtype, device=self.device,
                          batch_size=self.batch_size, parts=self.parts)
        object.__setattr__(self, "clip", clip)

    @torch.no_grad()
    def __call__(self, picture: np.ndarray, objects: Sequence[Detection], label: str) -> list[str | None]:
        if label not in self._texts:
            self._texts[label] = self._embedded(label)
        pictures = torch.cat([self.clip.prepare(cut(picture, one).to(self.clip.device)) for one in objects])
        shown = torch.cat([self.clip.encoded(some).float().cpu() for some in pictures.split(self.batch_size)])
        return [NAMES[best] for best in (shown @ self._texts[label].T).argmax(1).tolist()]

    def _embedded(self, label: str) -> Tensor:
        """Return the embeddings of the ten colours of an object [10, D], of unit length, on the CPU."""
        model, tokenizer = self.clip.models
        texts = [text.format(colour=colour, label=label) for colour in NAMES for text in TEXTS]
        embedded = model.encode_text(tokenizer(texts).to(self.clip.device), normalize=True).float().cpu()
        return normalize(embedded.unflatten(0, (len(NAMES), len(TEXTS))).mean(1), dim=-1)


def cut(picture: np.ndarray, one: Detection) -> Tensor:
    """Return an object's part of a picture, bytes [H, W, 3], as a tensor [1, 3, h, w] in [0, 1]; grey outside its
    mask."""
    if one.mask is not None:
        picture = np.where(one.mask[..., None], picture, np.uint8(GREY))
    left, top, right, bottom = (round(side) for side in one.box)
    left, top = (min(max(side, 0), size - 1) for side, size in ((left, picture.shape[1]), (top, picture.shape[0])))
    part = picture[top:max(bottom, top + 1), left:max(right, left + 1)]
    return torch.from_numpy(np.ascontiguousarray(part)).movedim(-1, 0)[None].float() / 255
