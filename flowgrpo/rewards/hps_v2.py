"""HPSv2.1 (Wu et al. 2023, 2306.09341): human preference, by a CLIP ViT-H/14 that was tuned on rankings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from flowgrpo.rewards.about import About
from flowgrpo.rewards.clip_score import cosines, wanted
from flowgrpo.rewards.needs import needed
from flowgrpo.rewards.vision import Preparation, batched, fill, placed, tensors


@dataclass(frozen=True)
class HpsV2:
    """HPSv2.1: the cosine of picture and prompt, around 0.2 to 0.35; tables print it times 100.

    The whole picture is scaled to 224 pixels and padded with black, as in the release, which does not cut it.

    checkpoint: a file, or `owner/name/file` on the hub (HPS_v2_compressed.pt there is version 2.0); revision: of the
    hub; model: the architecture's name in open_clip; device: None for a GPU where there is one; batch: pictures at a
    time; parts: model and tokenizer, ready-made. UserError where open_clip or the checkpoint is missing.
    """

    checkpoint: str = "xswu/HPSv2/HPS_v2.1_compressed.pt"
    revision: str | None = None
    model: str = "ViT-H-14"
    device: str | None = None
    batch: int = 32
    parts: Any = field(default=None, repr=False)
    prepare: Preparation = field(init=False, repr=False)
    about = About(modality="image", range=(-1, 1), needs="clip", licence="Apache-2.0")

    def __post_init__(self) -> None:
        device = placed(self.device)
        model, tokenizer = self.parts or self._loaded()
        object.__setattr__(self, "device", device)
        object.__setattr__(self, "parts", (model.eval().to(device), tokenizer))
        object.__setattr__(self, "prepare", Preparation(wanted(model, "hps_v2").size, "longest"))

    def _loaded(self) -> tuple[Any, Any]:
        open_clip = needed("open_clip", "clip", "reward 'hps_v2'")
        state = tensors("hps_v2", self.checkpoint, self.revision, "checkpoint")
        model = open_clip.create_model(self.model, pretrained=None)
        fill("hps_v2", model, state, self.checkpoint)
        return model, open_clip.get_tokenizer(self.model)

    def __call__(self, images: Any, prompts: Sequence[str]) -> Tensor:
        return batched(self._cosines, images, prompts, self.batch)

    def _cosines(self, images: Tensor, prompts: list[str]) -> Tensor:
        model, tokenizer = self.parts
        return cosines(model, tokenizer, self.prepare(images.to(self.device)), prompts)
