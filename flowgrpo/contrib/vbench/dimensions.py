"""Three dimensions of VBench (Huang et al. 2023, 2311.17982) without its package: they need a formula and one network.

Flickering: 1 minus the mean absolute difference of neighbouring frames. Consistency: the mean cosine of a frame's
features with those of the frame before it and of the first one. Negative cosines count as 0. The features are those
of DINO ViT-B/16 for the subject, of CLIP ViT-B/32 for the background. All three reward clips that stand still: train
them beside a reward of motion.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import interpolate, normalize

from flowgrpo.errors import UserError
from flowgrpo.rewards.about import About, described
from flowgrpo.rewards.local_model import LocalModel, pretrained
from flowgrpo.rewards.preprocessing import DEVIATION, MEAN

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
class _Consistency(LocalModel):
    """Consistency of a clip's frames by the features of one network.

    model, revision: of transformers, a folder or hub id.
    """

    model: str = ""
    revision: str | None = None
    about = About(modality="video", range=(0, 1), needs="", licence="Apache-2.0, the model's")

    def _loaded(self) -> tuple[Any]:
        return (pretrained(self.reward, self._kind(), self.model, self.revision, "model", dtype=self.float_type),)

    def _kind(self) -> Any:
        raise NotImplementedError

    def _features(self, frames: Tensor) -> Tensor:
        """Return the features [N, D] of frames [N, 3, H, W], float32 levels 0 to 255 on the model's device."""
        raise NotImplementedError

    @torch.no_grad()
    def __call__(self, videos: Tensor, prompts: Sequence[str]) -> Tensor:
        frames = eight_bit_levels(videos, self.reward).flatten(0, 1)
        features = torch.cat([self._features(some.to(self.device)).float().cpu()
                              for some in frames.split(self.batch_size)])
        return consistency(features.unflatten(0, videos.shape[:2]))


@dataclass(frozen=True)
class SubjectConsistency(_Consistency):
    """VBench's subject consistency: cosines of DINO ViT-B/16 features of a clip's frames, 1 for a still clip.

    Frames are scaled to 224 pixels on the shorter side and not cropped.
    Fields: as in `BackgroundConsistency`; the model is a ViT.
    Raises UserError for clips of one frame, and if the weights are unavailable.
    """

    model: str = "facebook/dino-vitb16"
    reward, parameters = "subject_consistency", 86.4e6

    def _kind(self) -> Any:
        from transformers import ViTModel

        return ViTModel

    def _features(self, frames: Tensor) -> Tensor:
        frames = _normalised(interpolate(frames, _sides(frames), mode="bilinear"), *IMAGENET)
        states = self.models[0](pixel_values=frames.to(self.float_type), interpolate_pos_encoding=True)
        return states.last_hidden_state[:, 0]


@dataclass(frozen=True)
class BackgroundConsistency(_Consistency):
    """VBench's background consistency: cosines of CLIP ViT-B/32 embeddings of a clip's frames, 1 for a still clip.

    model, revision: a CLIP of transformers, a folder or hub id.
    parts: the network alone, ready-made. dtype (fp32), device and batch_size (32 frames): as in `LocalModel`.
    Raises UserError for clips of one frame, and if the weights are unavailable.
    """

    model: str = "openai/clip-vit-base-patch32"
    reward, parameters = "background_consistency", 87.8e6

    def _kind(self) -> Any:
        from transformers import CLIPVisionModelWithProjection

        return CLIPVisionModelWithProjection

    def _features(self, frames: Tensor) -> Tensor:
        frames = interpolate(frames, _sides(frames), mode="bicubic")
        top, left = (round((side - SIZE) / 2) for side in frames.shape[-2:])
        frames = frames[..., top:top + SIZE, left:left + SIZE]
        frames = _normalised(frames, MEAN, DEVIATION).to(self.float_type)
        return self.models[0](pixel_values=frames).image_embeds


def _sides(frames: Tensor) -> tuple[int, int]:
    """Return the height and width whose shorter one is SIZE, as torchvision's resizing does."""
    height, width = frames.shape[-2:]
    short = min(height, width)
    return int(SIZE * height / short), int(SIZE * width / short)


def _normalised(frames: Tensor, mean: Sequence[float], deviation: Sequence[float]) -> Tensor:
    low, spread = (torch.tensor(values, device=frames.device)[:, None, None] for values in (mean, deviation))
    return (frames / 255 - low) / spread
