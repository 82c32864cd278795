"""HPSv2 (Wu et al. 2023, 2306.09341): human preference, by a CLIP ViT-H/14 that was tuned on rankings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import Tensor

from flowgrpo.packages import needed
from flowgrpo.rewards.about import About
from flowgrpo.rewards.clip import cosines, wanted
from flowgrpo.rewards.local_model import LocalModel, fill, tensors
from flowgrpo.rewards.preprocessing import Preparation


@dataclass(frozen=True)
class HpsV2(LocalModel):
    """HPSv2.1: the cosine of image and prompt, around 0.2 to 0.35; tables print it times 100.

    The whole picture is scaled to 224 pixels and padded with black; nothing is cropped. As in the release
    (ResizeMaxSize of its open_clip/transform.py) floats are scaled, neither rounded nor clamped: edges overshoot.

    antialias: false scales without a filter, as the release did with torchvision before 0.17, on which tables of 2023
    were made: up to 200 of 255 levels away at sharp edges.
    checkpoint: a file, or `owner/name/file` on the hub. revision: of the hub.
    model: the architecture's name in open_clip.
    parts: model and tokenizer, ready-made. dtype (fp32), device and batch_size (32): as in `LocalModel`.
    Raises UserError if open_clip or the checkpoint is missing.
    """

    checkpoint: str = "xswu/HPSv2/HPS_v2.1_compressed.pt"
    revision: str | None = None
    model: str = "ViT-H-14"
    antialias: bool = True
    reward, parameters = "hpsv2.1", 986e6
    differentiable = True
    about = About(modality="image", range=(-1, 1), needs="clip", licence="Apache-2.0")

    def _require(self, parts: tuple[Any, ...]) -> None:
        wanted(parts[0], self.reward)

    @cached_property
    def prepare(self) -> Preparation:
        """Preprocessing of the model's pictures."""
        return Preparation(wanted(self.models[0], self.reward).size, "longest",
                           scaling="floats" if self.antialias else "unfiltered")

    def _loaded(self) -> tuple[Any, Any]:
        open_clip = needed("open_clip", "clip", f"reward {self.reward!r}")
        state = tensors(self.reward, self.checkpoint, self.revision, "checkpoint")
        model = open_clip.create_model(self.model, pretrained=None)
        fill(self.reward, model, state, self.checkpoint)
        return model, open_clip.get_tokenizer(self.model)

    def __call__(self, images: Tensor, prompts: Sequence[str]) -> Tensor:
        return self.batched(self._cosines, images, prompts)

    def _cosines(self, images: Tensor, prompts: list[str]) -> Tensor:
        model, tokenizer = self.models
        return cosines(model, tokenizer, self.prepare(images.to(self.device)).to(self.float_type), prompts)


@dataclass(frozen=True)
class HpsV20(HpsV2):
    """HPSv2.0: as HPSv2.1, by the weights of the paper (2306.09341).

    Arguments: as in `HpsV2`.
    """

    checkpoint: str = "xswu/HPSv2/HPS_v2_compressed.pt"
    reward = "hpsv2.0"
