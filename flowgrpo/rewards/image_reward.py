"""ImageReward (Xu et al. 2023, 2304.05977): human preference, by BLIP with a head that was trained on rankings.

The network is built from transformers' BLIP; the released checkpoint is renamed to fit it.
"""

import re
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from flowgrpo.rewards.about import About, built_in
from flowgrpo.rewards.clip import perceptron
from flowgrpo.rewards.local_model import ImageModel, fill, load_pretrained, tensors
from flowgrpo.rewards.preprocessing import Preparation

AVERAGE, SPREAD = 0.16717362830052426, 1.0333394966054072  # of the head on the release's training pairs
LONGEST = 35  # tokens of a prompt
# BLIP's ViT-L/16 and BERT with cross-attention. Norm eps and number of heads differ from transformers' defaults.
VISION = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16,
          "image_size": 224, "patch_size": 16, "layer_norm_eps": 1e-6}
TEXT = {"vocab_size": 30524, "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12,
        "num_attention_heads": 12, "max_position_embeddings": 512, "layer_norm_eps": 1e-12, "is_decoder": True}
NAMES = (  # release's name of a tensor, this network's name; those used only in training have none
    (r"^blip\.visual_encoder\.cls_token$", "vision.embeddings.class_embedding"),
    (r"^blip\.visual_encoder\.pos_embed$", "vision.embeddings.position_embedding"),
    (r"^blip\.visual_encoder\.patch_embed\.proj\.", "vision.embeddings.patch_embedding."),
    (r"^blip\.visual_encoder\.norm\.", "vision.post_layernorm."),
    (r"^blip\.visual_encoder\.blocks\.(\d+)\.norm(\d)\.", r"vision.encoder.layers.\1.layer_norm\2."),
    (r"^blip\.visual_encoder\.blocks\.(\d+)\.attn\.qkv\.", r"vision.encoder.layers.\1.self_attn.qkv."),
    (r"^blip\.visual_encoder\.blocks\.(\d+)\.attn\.proj\.", r"vision.encoder.layers.\1.self_attn.projection."),
    (r"^blip\.visual_encoder\.blocks\.(\d+)\.mlp\.", r"vision.encoder.layers.\1.mlp."),
    (r"^blip\.text_encoder\.(?!embeddings\.position_ids$)", "text."),
    (r"^mlp\.layers\.", "head."),
)


@built_in("imagereward", "human preference aesthetic general quality")
class ImageReward(ImageModel):
    """ImageReward: the head's value of an image with its prompt, minus 0.167, divided by 1.033; around -2 to 2.

    checkpoint: a file, or `owner/name/file` on the hub. revision: of the hub. tokenizer: BERT's, a folder or hub id.
    parts: network and tokenizer, ready-made. dtype (fp32; the head's is always), device and batch_size (32): as in
    `LocalModel`.
    Raises UserError if the weights are unavailable.
    """

    checkpoint: str = "THUDM/ImageReward/ImageReward.pt"
    revision: str | None = None
    tokenizer: str = "google-bert/bert-base-uncased"
    reward, parameters = "imagereward", 447e6
    differentiable = True
    about = About(modality="image", range=(None, None), needs="", licence="Apache-2.0")

    def _prepare(self, part: Any) -> Any:
        if not isinstance(part, nn.ModuleDict):
            return part
        for name, module in part.items():
            part[name] = super()._prepare(module)
        return part

    def _load(self) -> tuple[Any, Any]:
        from transformers import AutoTokenizer

        state = tensors("imagereward", self.checkpoint, self.revision, "checkpoint")
        parts = network()
        fill("imagereward", parts, rename_tensors(state), self.checkpoint)
        return parts, load_pretrained("imagereward", AutoTokenizer, self.tokenizer, None, "tokenizer")

    def _scores(self, images: Tensor, prompts: list[str]) -> Tensor:
        parts, tokenizer = self.models
        texts = tokenizer(prompts, padding="max_length", truncation=True, max_length=LONGEST, return_tensors="pt")
        texts = texts.to(self.device)
        pictures = Preparation(parts["vision"].config.image_size)(images.to(self.device))
        seen = parts["vision"](pixel_values=pictures.to(self.float_type)).last_hidden_state
        read = parts["text"](input_ids=texts.input_ids, attention_mask=texts.attention_mask, encoder_hidden_states=seen)
        return (parts["head"](read.last_hidden_state[:, 0].float())[:, 0] - AVERAGE) / SPREAD


def network(vision: dict[str, Any] | None = None, text: dict[str, Any] | None = None) -> nn.ModuleDict:
    """Build ImageReward's parts with random weights: "vision", "text" and "head".
    vision, text: values that differ from the release, by their names in BlipVisionConfig and BlipTextConfig."""
    from transformers import BlipTextConfig, BlipVisionConfig
    from transformers.models.blip.modeling_blip import BlipVisionModel
    from transformers.models.blip.modeling_blip_text import BlipTextModel

    seeing = BlipVisionConfig(**VISION | (vision or {}))
    reading = BlipTextConfig(**TEXT | {"encoder_hidden_size": seeing.hidden_size} | (text or {}))
    return nn.ModuleDict({"vision": BlipVisionModel(seeing), "text": BlipTextModel(reading, add_pooling_layer=False),
                          "head": perceptron(reading.hidden_size)})


def rename_tensors(state: dict[str, Tensor], names: Sequence[tuple[str, str]] = NAMES) -> dict[str, Tensor]:
    """Tensors of a released checkpoint under a network's names, without those that have none."""
    result = {}
    for key, value in state.items():
        for pattern, name in names:
            here, count = re.subn(pattern, name, key)
            if count:
                result[here] = value
                break
    return result
