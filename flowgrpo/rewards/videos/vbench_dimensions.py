"""Three dimensions of VBench (Huang et al. 2023, 2311.17982) without its package: they need a formula and one network.

Flickering: 1 minus the mean absolute difference of neighbouring frames. Consistency: the mean cosine of a frame's
features with those of the frame before it and of the first one. Negative cosines count as 0. The features are those
of DINO ViT-B/16 for the subject, of CLIP ViT-B/32 for the background. All three reward clips that stand still: train
them beside a reward of motion.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import interpolate, normalize

from flowgrpo.errors import UserError
from flowgrpo.rewards.about import About, described
from flowgrpo.rewards.images.vision import DEVIATION, MEAN, placed, pretrained

SIZE = 224  # pixels of the shorter side
IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))


def eight_bit_levels(videos: Tensor, reward: str) -> Tensor:
    """Return videos [B, F, 3, H, W] in [0, 1] as float32 levels 0 to 255.
    Raises UserError for clips of one frame."""
    if videos.ndim != 5 or videos.shape[1] < 2:
        raise UserError(f"reward {reward!r}: got videos of shape {list(videos.shape)}, expected [B, F, 3, H, W] with "
                        "at least two frames")
    return (videos.float() * 255).round().clamp(0, 255)


@described(About(modality="video", range=(0, 1), needs="", licence="Apache-2.0"))
def temporal_flickering(videos: Tensor, prompts: Sequence[str]) -> Tensor:
    """VBench's temporal flickering: 1 minus the mean absolute difference of neighbouring frames, 1 for a still clip."""
    levels = eight_bit_levels(videos, "temporal_flickering")
    return 1 - levels.diff(dim=1).abs().flatten(1).mean(1) / 255


def consistency(features: Tensor) -> Tensor:
    """Return the consistency [B] of frames with features [B, F, D], F of 2 or more."""
    features = normalize(features.float(), dim=-1)
    rest = features[:, 1:]
    before, first = ((rest * other).sum(-1).clamp(min=0) for other in (features[:, :-1], features[:, :1]))
    return ((before + first) / 2).mean(1)


@dataclass(frozen=True)
class _Consistency:
    """Consistency of a clip's frames by the features of one network.

    model, revision: of transformers, a folder or hub id. device: None for a GPU if present. batch: frames at a time.
    parts: the network, ready-made.
    """

    model: str = ""
    revision: str | None = None
    device: str | None = None
    batch: int = 32
    parts: Any = field(default=None, repr=False)
    reward = ""  # name in error messages
    about = About(modality="video", range=(0, 1), needs="", licence="Apache-2.0, the model's")

    def __post_init__(self) -> None:
        device = placed(self.device)
        network = self.parts or pretrained(self.reward, self._kind(), self.model, self.revision, "model")
        object.__setattr__(self, "device", device)
        object.__setattr__(self, "parts", network.eval().to(device))

    def _kind(self) -> Any:
        raise NotImplementedError

    def _features(self, frames: Tensor) -> Tensor:
        """Return the features [N, D] of frames [N, 3, H, W], levels 0 to 255 on the model's device."""
        raise NotImplementedError

    @torch.no_grad()
    def __call__(self, videos: Tensor, prompts: Sequence[str]) -> Tensor:
        frames = eight_bit_levels(videos, self.reward).flatten(0, 1)
        features = torch.cat([self._features(some.to(self.device)).float().cpu() for some in frames.split(self.batch)])
        return consistency(features.unflatten(0, videos.shape[:2]))


@dataclass(frozen=True)
class SubjectConsistency(_Consistency):
    """VBench's subject consistency: cosines of DINO ViT-B/16 features of a clip's frames, 1 for a still clip.

    Frames are scaled to 224 pixels on the shorter side and not cropped.
    Fields: as in `BackgroundConsistency`; the model is a ViT.
    Raises UserError for clips of one frame, and if the weights are unavailable.
    """

    model: str = "facebook/dino-vitb16"
    reward = "subject_consistency"

    def _kind(self) -> Any:
        from transformers import ViTModel

        return ViTModel

    def _features(self, frames: Tensor) -> Tensor:
        frames = _normalised(interpolate(frames, _sides(frames), mode="bilinear"), *IMAGENET)
        return self.parts(pixel_values=frames, interpolate_pos_encoding=True).last_hidden_state[:, 0]


@dataclass(frozen=True)
class BackgroundConsistency(_Consistency):
    """VBench's background consistency: cosines of CLIP ViT-B/32 embeddings of a clip's frames, 1 for a still clip.

    model, revision: a CLIP of transformers, a folder or hub id. device: None for a GPU if present. batch: frames at a
    time. parts: the network, ready-made.
    Raises UserError for clips of one frame, and if the weights are unavailable.
    """

    model: str = "openai/clip-vit-base-patch32"
    reward = "background_consistency"

    def _kind(self) -> Any:
        from transformers import CLIPVisionModelWithProjection

        return CLIPVisionModelWithProjection

    def _features(self, frames: Tensor) -> Tensor:
        frames = interpolate(frames, _sides(frames), mode="bicubic")
        top, left = (round((side - SIZE) / 2) for side in frames.shape[-2:])
        frames = frames[..., top:top + SIZE, left:left + SIZE]
        return self.parts(pixel_values=_normalised(frames, MEAN, DEVIATION)).image_embeds


def _sides(frames: Tensor) -> tuple[int, int]:
    """Return the height and width whose shorter one is SIZE, as torchvision's resizing does."""
    height, width = frames.shape[-2:]
    short = min(height, width)
    return int(SIZE * height / short), int(SIZE * width / short)


def _normalised(frames: Tensor, mean: Sequence[float], deviation: Sequence[float]) -> Tensor:
    low, spread = (torch.tensor(values, device=frames.device)[:, None, None] for values in (mean, deviation))
    return (frames / 255 - low) / spread
