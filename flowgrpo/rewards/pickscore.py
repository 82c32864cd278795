"""PickScore (Kirstain et al. 2023, 2305.01569): human preference, by a CLIP ViT-H/14 that was tuned on choices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from flowgrpo.errors import UserError
from flowgrpo.rewards.about import About
from flowgrpo.rewards.local_model import LocalModel, pretrained
from flowgrpo.rewards.preprocessing import Preparation


@dataclass(frozen=True)
class PickScore(LocalModel):
    """PickScore: the model's logit scale (100) times the cosine of image and prompt, around 15 to 25.

    This is the score of the paper and of its tables. Flow-GRPO trains with a 26th of it, so that it is near 1 like
    other rewards: `args: {divide: 26}`.

    model, revision: a CLIP model of transformers, a folder or hub id. tokenizer: the same.
    parts: model and tokenizer, ready-made. dtype (fp32), device and batch_size (32): as in `LocalModel`.
    Raises UserError if the weights are unavailable.
    """

    model: str = "yuvalkirstain/PickScore_v1"
    revision: str | None = None
    tokenizer: str = "laion/CLIP-ViT-H-14-laion2B-s32B-b79K"
    divide: float = 1.0
    reward, parameters = "pickscore", 986e6
    differentiable = True
    about = About(modality="image", range=(None, None), needs="", licence="Apache-2.0, MIT weights")

    def __post_init__(self) -> None:
        if not self.divide > 0:
            raise UserError(f"reward 'pickscore': divide is {self.divide}, expected a number above 0")
        super().__post_init__()

    def _loaded(self) -> tuple[Any, Any]:
        from transformers import AutoTokenizer, CLIPModel

        return (pretrained("pickscore", CLIPModel, self.model, self.revision, "model"),
                pretrained("pickscore", AutoTokenizer, self.tokenizer, None, "tokenizer"))

    def __call__(self, images: Tensor, prompts: Sequence[str]) -> Tensor:
        return self.batched(self._scores, images, prompts) / self.divide

    def _scores(self, images: Tensor, prompts: list[str]) -> Tensor:
        model, tokenizer = self.models
        longest, size = model.config.text_config.max_position_embeddings, model.config.vision_config.image_size
        texts = tokenizer(prompts, padding=True, truncation=True, max_length=longest, return_tensors="pt")
        texts, prepare = texts.to(self.device), Preparation(size, crop="transformers")
        outputs = model(input_ids=texts.input_ids, attention_mask=texts.attention_mask,
                        pixel_values=prepare(images.to(self.device)).to(self.float_type))
        return model.logit_scale.float().exp() * (outputs.image_embeds.float() * outputs.text_embeds.float()).sum(-1)
