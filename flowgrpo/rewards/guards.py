"""Guards against reward hacking: small rewards that fall when a model exploits the main one.

    reward: {pickscore: 1.0, diversity: 0.1, grid_artefacts: 0.2, over_saturation: 0.2}

The penalties are 0 for a sound picture and at least -1.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flowgrpo.data.client_files import require_open
from flowgrpo.errors import UserError
from flowgrpo.rewards.about import About
from flowgrpo.rewards.preprocessing import grey, read_tensor

LICENCE = "Apache-2.0"
SMALL = 16  # side of the miniatures of `pixels`


def pixels(images: Tensor) -> Tensor:
    """Return the 16 by 16 miniatures [B, 768] of pictures [B, 3, H, W], scaled so that black and white are 1 apart."""
    small = torch.nn.functional.interpolate(images.detach().cpu().double(), (SMALL, SMALL), mode="area")
    return small.flatten(1) / small[0].numel() ** 0.5


def extractor(features: str | dict[str, Any] | Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Return a feature function, pictures [B, 3, H, W] -> [B, D]: `pixels`, CLIP's of unit length for `clip` (the model
    of `clip_cosine`, or a dictionary of its arguments), a given function, or one in a file."""
    if features == "pixels":
        return pixels
    if features == "clip" or isinstance(features, dict):
        from flowgrpo.rewards.clip import ClipCosine

        return ClipCosine(**features if isinstance(features, dict) else {}).features
    if callable(features):
        return features
    from flowgrpo.user_code import load

    return load(features)


def distances(features: Tensor) -> Tensor:
    """Return the mean Euclidean distance of each sample to the others of its group. [P, G, D] -> [P, G]."""
    features = features.double()
    apart = (features[:, :, None] - features[:, None]).norm(dim=-1)
    return apart.sum(-1) / (features.shape[1] - 1)


@dataclass(frozen=True)
class Diversity:
    """Diversity: mean feature distance of a sample to the others of its group.

    features: "pixels" (miniatures of 16 by 16; a distance of 1 is black to white), "clip" (embeddings of unit length),
    arguments of `clip_cosine` such as {device: "cuda:1"}, a function of pictures [B, 3, H, W] to [B, D], or
    `file.py:function`.
    """

    features: str | dict[str, Any] | Callable[[Tensor], Tensor] = "pixels"
    group = True
    about = About(modality="image", range=(0, None), needs="", licence=LICENCE)

    def __post_init__(self) -> None:
        object.__setattr__(self, "features", extractor(self.features))

    def __call__(self, images: Tensor, prompts: Sequence[str], metadata: Sequence[dict[str, Any]],
                 group: int) -> Tensor:
        assert callable(self.features)  # `extractor` made it so
        features = torch.as_tensor(self.features(images))
        return distances(features.reshape(len(features) // group, group, -1)).flatten()


@dataclass(frozen=True)
class BaseSimilarity:
    """Similarity to the base model's image of the prompt: 1 minus the distance of features, 1 for equal features.

    key: metadata key of that picture's path (`flowgrpo sample --prompts` writes such a file). The file is read again
    each time and resized to the sample's size. A prompt without one is compared with the base's picture from the same
    initial noise, which a run draws for each sample; None if there is none either.
    features: as in `Diversity`.
    Raises UserError for an unreadable file.
    """

    key: str = "base_image"
    features: str | dict[str, Any] | Callable[[Tensor], Tensor] = "pixels"
    base = True
    privileged = True  # reads files that metadata name
    about = About(modality="image", range=(None, 1), needs="", licence=LICENCE)

    def __post_init__(self) -> None:
        object.__setattr__(self, "features", extractor(self.features))

    @property
    def made_of(self) -> list[Any]:
        return [self.features]

    def __call__(self, images: Tensor, prompts: Sequence[str], metadata: Sequence[dict[str, Any]],
                 base: Tensor | None = None) -> list[float | None]:
        rows = [i for i, entry in enumerate(metadata) if self.key in entry or base is not None]
        scores: list[float | None] = [None] * len(prompts)
        if rows:
            assert callable(self.features)  # `extractor` made it so
            bases = torch.stack([self._base(metadata[i], images, base, i) for i in rows])
            apart = (torch.as_tensor(self.features(images[rows])) - torch.as_tensor(self.features(bases))).norm(dim=-1)
            for i, distance in zip(rows, apart.tolist()):
                scores[i] = 1 - distance
        return scores

    def _base(self, entry: dict[str, Any], images: Tensor, base: Tensor | None, row: int) -> Tensor:
        """Return the base model's picture of a row: the one in its prompt's file, or else the drawn one."""
        if self.key in entry:
            return _read(entry[self.key], images.shape[-2:])
        assert base is not None  # rows without either are left out
        return base[row]


def _read(path: str, size: Sequence[int]) -> Tensor:
    from torchvision.transforms.functional import resize

    require_open()
    try:
        picture = read_tensor(path)
    except UserError as error:
        raise UserError(f"reward 'base_similarity': the base model's image {error}") from None
    return picture if picture.shape[-2:] == tuple(size) else resize(picture, list(size), antialias=True)


@dataclass(frozen=True)
class GridArtefacts:
    """Minus the share of an image's edges that repeat with the latent grid: 0 none, -1 all.

    period: pixels of one patch: those of a latent pixel (8 in most autoencoders) times the transformer's patch size (2
    in most).
    The profile is the mean absolute step between neighbouring columns, over the columns. Its power at the multiples of
    1 / period counts, less the part expected by chance (as in the adjusted R^2 of the profile's means by phase, which
    it equals). Rows likewise; the larger of both counts. A legitimate grid of this very period, such as tiles, is
    penalised too.
    """

    period: int = 16
    about = About(modality="image", range=(-1, 0), needs="", licence=LICENCE)

    def __post_init__(self) -> None:
        if self.period < 2:
            raise UserError(f"reward 'grid_artefacts': period is {self.period}, expected 2 pixels or more")

    def __call__(self, images: Tensor, prompts: Sequence[str]) -> Tensor:
        light = grey(images)
        if min(light.shape[-2:]) < 3 * self.period + 1:
            raise UserError(f"reward 'grid_artefacts' got images of {list(light.shape[-2:])} pixels, expected at "
                            f"least {3 * self.period + 1}, three periods")
        profiles = light.diff(dim=-1).abs().mean(-2), light.diff(dim=-2).abs().mean(-1)
        return -torch.maximum(*(periodic(profile, self.period) for profile in profiles))


def periodic(profile: Tensor, period: int) -> Tensor:
    """Return the share of the variance of a profile [..., N] that has that period, in [0, 1], less the mean share of
    white noise. As many whole periods as fit are used; 0 for a flat profile."""
    count = profile.shape[-1] // period
    power = torch.fft.rfft(profile[..., :count * period]).abs().square()
    length = count * period
    power[..., 1:(length + 1) // 2] *= 2  # all but 0 and the highest stand for two frequencies
    total = power[..., 1:].sum(-1)
    rest = total - power[..., count::count].sum(-1)
    unexplained = (rest / (length - period)) / (total / (length - 1)).clamp(min=1e-300)
    return torch.where(total > 1e-12 * power[..., 0], (1 - unexplained).clamp(0, 1), 0)


@dataclass(frozen=True)
class OverSaturation:
    """Minus the excess of an image's colourfulness, 0 to -1.

    0 if no pixel's largest and smallest channel differ by more than `limit`, -1 if all differ by 1.
    """

    limit: float = 0.7
    differentiable = True
    about = About(modality="image", range=(-1, 0), needs="", licence=LICENCE)

    def __post_init__(self) -> None:
        if not 0 <= self.limit < 1:
            raise UserError(f"reward 'over_saturation': limit is {self.limit}, expected from 0 to below 1")

    def __call__(self, images: Tensor, prompts: Sequence[str]) -> Tensor:
        chroma = images.amax(-3) - images.amin(-3)
        return -(chroma - self.limit).clamp(min=0).mean((-2, -1)) / (1 - self.limit)
