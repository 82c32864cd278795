"""PickScore (Kirstain et al. 2023, 2305.01569): human preference, by a CLIP ViT-H/14 that was tuned on choices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from flowgrpo.errors import UserError
from flowgrpo.rewards.about import About
from flowgrpo.rewards.vision import Preparation, batched, placed, pretrained


@dataclass(frozen=True)
class PickScore:
    """PickScore: the model's logit scale (100) times the cosine of picture and prompt, around 15 to 25.

    That is the score of the paper and of its tables. Flow-GRPO trains with a 26th of it, so that it is near 1 beside
    other rewards: `args: {divide: 26}`.

    model, revision: a CLIP model of transformers, a folder or hub id; tokenizer: the same; device: None for a GPU where
    there is one; batch: pictures at a time; parts: model and tokenizer, ready-made. UserError where the weights cannot
    be had.
    """

    model: str = "yuvalkirstain/PickScore_v1"
    revision: str | None = None
    tokenizer: str = "laion/CLIP-ViT-H-14-laion2B-s32B-b79K"
    divide: float = 1.0
    device: str | None = None
    batch: int = 32
    parts: Any = field(default=None, repr=False)
    about = About(modality="image", range=(None, None), needs="", licence="Apache-2.0, MIT weights")

    def __post_init__(self) -> None:
        if not self.divide > 0:
            raise UserError(f"reward 'pick_score': divide is {self.divide}, expected a number above 0")
        device = placed(self.device)
        model, tokenizer = self.parts or self._loaded()
        object.__setattr__(self, "device", device)
        object.__setattr__(self, "parts", (model.eval().to(device), tokenizer))

    def _loaded(self) -> tuple[Any, Any]:
        from transformers import AutoTokenizer, CLIPModel

        return (pretrained("pick_score", CLIPModel, self.model, self.revision, "model"),
                pretrained("pick_score", AutoTokenizer, self.tokenizer, None, "tokenizer"))

    def __call__(self, images: Any, prompts: Sequence[str]) -> Tensor:
        return batched(self._scores, images, prompts, self.batch) / self.divide

    def _scores(self, images: Tensor, prompts: list[str]) -> Tensor:
        model, tokenizer = self.parts
        longest, size = model.config.text_config.max_position_embeddings, model.config.vision_config.image_size
        texts = tokenizer(prompts, padding=True, truncation=True, max_length=longest, return_tensors="pt")
        texts, pictures = texts.to(self.device), Preparation(size)(images.to(self.device))
        found = model(input_ids=texts.input_ids, attention_mask=texts.attention_mask, pixel_values=pictures)
        return model.logit_scale.exp() * (found.image_embeds * found.text_embeds).sum(-1)
