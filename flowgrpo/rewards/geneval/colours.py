"""Colour of an object as one of GenEval's ten names, by its pixels or by CLIP.

By pixels, without a model: hue, saturation and value in the middle of its box. Every pixel has one of the ten colours
or none (grey, cyan); the object gets the most common one. Background visible in the middle of the box counts too: a
thin object on a wall of one colour gets the wall's colour.

By CLIP ViT-L/14, as in the published evaluation: zero-shot classification. The image is cut to the object's box.
Where the detector gives a mask, all outside it is painted grey, #999. Each of the ten colours is the normalised mean of
the embeddings of three texts; the one nearest to the image's counts.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import normalize

from flowgrpo.rewards.clip import ClipCosine
from flowgrpo.rewards.geneval.detectors import Detection

NAMES = ("red", "orange", "yellow", "green", "blue", "purple", "pink", "brown", "black", "white")
MIDDLE = 0.5  # of each side of the box
DARK, DULL_DARK, BRIGHT = 0.2, 0.35, 0.8  # value of any black, of a black without a hue; of white
PALE, DULL = 0.17, 0.12  # saturation, or difference of channels, below which there is no hue
HUES = (10, 40, 70, 165, 190, 258, 305, 336)  # degrees at which red, orange, ... end; the fifth is cyan, no name
BY_HUE = np.array(["red", "orange", "yellow", "green", "", "blue", "purple", "pink", "red"])
DIM = 0.68  # value below which orange, and a weak red, is brown
TENDER, STRONG = 0.55, 0.5  # saturation below which a bright red is pink; below which a dim one is brown
GREY = 0x99  # of the background


def colour(image: np.ndarray, box: Sequence[float]) -> str | None:
    """Colour inside a box (left, top, right, bottom) of an image, bytes [H, W, 3]; None for none of the ten, and for a
    box outside the image."""
    middle = []  # of the box; no pixels if it lies outside the image
    for low, high, size in ((box[1], box[3], image.shape[0]), (box[0], box[2], image.shape[1])):
        centre, half = (low + high) / 2, MIDDLE * (high - low) / 2
        middle.append(slice(max(math.floor(centre - half), 0), min(max(math.ceil(centre + half), 0), size)))
    names, counts = np.unique(pixel_colours(image[tuple(middle)].reshape(-1, 3)), return_counts=True)
    return str(names[counts.argmax()]) or None if len(names) else None


def pixel_colours(pixels: np.ndarray) -> np.ndarray:
    """Colour names of bytes [..., 3], "" for none."""
    channels = np.asarray(pixels, dtype=np.float64) / 255
    high, spread = channels.max(-1), np.ptp(channels, -1)
    saturation, hue = spread / np.maximum(high, 1e-9), _hue(channels, high, spread)
    names = BY_HUE[np.searchsorted(HUES, hue, side="right")]
    brown = (high < DIM) & ((names == "orange") | (names == "red") & (saturation < STRONG))
    pink = (high > BRIGHT) & (names == "red") & (saturation < TENDER)
    names = np.select([brown, pink], ["brown", "pink"], names)
    grey = np.select([high < DULL_DARK, high > BRIGHT], ["black", "white"], "")
    names = np.where((saturation < PALE) | (spread < DULL), grey, names)
    return np.where(high < DARK, "black", names)


def _hue(channels: np.ndarray, high: np.ndarray, spread: np.ndarray) -> np.ndarray:
    """Hue in degrees in [0, 360), 0 for a grey."""
    red, green, blue = np.moveaxis(channels, -1, 0)
    with np.errstate(invalid="ignore", divide="ignore"):
        sixth = np.select([high == red, high == green], [(green - blue) / spread % 6, (blue - red) / spread + 2],
                          (red - green) / spread + 4)
    return np.where(spread > 0, 60 * sixth, 0)


TEXTS = ("a photo of a {colour} {label}", "a photo of a {colour}-colored {label}", "a photo of a {colour} object")


@dataclass(frozen=True)
class ClipColours(ClipCosine):
    """Colours of detections in an image, one of GenEval's ten each, by CLIP.

    model, pretrained, parts: as in `ClipScore`. dtype (fp32), device and batch_size (32 objects): as in `LocalModel`.
    Raises UserError if open_clip or the weights are missing.
    """

    _texts: dict[str, Tensor] = field(init=False, repr=False, default_factory=dict)  # by label: [10, D]
    reward = "geneval"

    @torch.no_grad()
    def __call__(self, image: np.ndarray, objects: Sequence[Detection],  # type: ignore[override]  # not of a batch
                 label: str) -> list[str | None]:
        if label not in self._texts:
            model, tokenizer = self.models
            texts = [text.format(colour=colour, label=label) for colour in NAMES for text in TEXTS]
            embedded = model.encode_text(tokenizer(texts).to(self.device), normalize=True).float().cpu()
            means = embedded.unflatten(0, (len(NAMES), len(TEXTS))).mean(1)
            self._texts[label] = normalize(means, dim=-1)
        images = torch.cat([self.prepare(cut(image, one).to(self.device)) for one in objects])
        shown = torch.cat([self.encode_images(some).float().cpu() for some in images.split(self.batch_size)])
        return [NAMES[best] for best in (shown @ self._texts[label].T).argmax(1).tolist()]


def cut(image: np.ndarray, one: Detection) -> Tensor:
    """An object's part of an image, bytes [H, W, 3], as a tensor [1, 3, h, w] in [0, 1]; grey outside its mask."""
    if one.mask is not None:
        image = np.where(one.mask[..., None], image, np.uint8(GREY))
    left, top, right, bottom = (round(side) for side in one.box)
    left, top = (min(max(side, 0), size - 1) for side, size in ((left, image.shape[1]), (top, image.shape[0])))
    part = image[top:max(bottom, top + 1), left:max(right, left + 1)]
    return torch.from_numpy(np.ascontiguousarray(part)).movedim(-1, 0)[None].float() / 255
