"""Pipelines that came last to diffusers: Krea 2, ERNIE-Image."""

from __future__ import annotations

from typing import Any

import torch

from flowgrpo.check.tiny.parts import (
    TOKENS,
    Pipeline,
    chat_tokenizer,
    dynamic_scheduler,
    flux2_vae,
    language_model,
    lively,
    qwen_vae,
    shifted_scheduler,
    silent,
)


def krea2(seed: int = 0) -> tuple[Pipeline, dict[str, Any]]:
    """Return a Krea2Pipeline, whose denoiser reads several layers of a vision-language model."""
    from diffusers import Krea2Pipeline, Krea2Transformer2DModel
    from transformers import Qwen3VLConfig, Qwen3VLModel

    torch.manual_seed(seed)
    tokens = chat_tokenizer()
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2}
    reader = Qwen3VLModel(Qwen3VLConfig(
        text_config=sizes | {"num_hidden_layers": 2, "num_key_value_heads": 2, "head_dim": 8,
                             "vocab_size": len(tokens), "pad_token_id": tokens.pad_token_id,
                             "rope_parameters": {"mrope_section": [1, 1, 2], "rope_type": "default",
                                                 "rope_theta": 1e4, "mrope_interleaved": True}},
        vision_config={"hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "depth": 1, "out_hidden_size": 16,
                       "deepstack_visual_indexes": [0]}))
    denoiser = Krea2Transformer2DModel(
        in_channels=16, num_layers=1, attention_head_dim=8, num_attention_heads=2, num_key_value_heads=1,
        intermediate_size=16, timestep_embed_dim=8, text_hidden_dim=16, num_text_layers=2, text_num_attention_heads=2,
        text_num_key_value_heads=1, text_intermediate_size=16, num_layerwise_text_blocks=1, num_refiner_text_blocks=1,
        axes_dims_rope=(4, 2, 2))
    pipe: Pipeline = Krea2Pipeline(scheduler=dynamic_scheduler(), vae=qwen_vae(), text_encoder=lively(reader),
                                   tokenizer=tokens, transformer=lively(denoiser), text_encoder_select_layers=(1, 2))
    pipe.prompt_template_encode_prefix = pipe.prompt_template_encode_suffix = ""
    pipe.prompt_template_encode_start_idx = pipe.prompt_template_encode_num_suffix_tokens = 0
    return silent(pipe), {"height": 16, "width": 16, "max_sequence_length": TOKENS}


def ernie_image(seed: int = 0) -> tuple[Pipeline, dict[str, Any]]:
    """Return an ErnieImagePipeline: a list of embeddings of different lengths."""
    from diffusers import ErnieImagePipeline, ErnieImageTransformer2DModel

    torch.manual_seed(seed)
    tokens = chat_tokenizer()
    denoiser = ErnieImageTransformer2DModel(
        hidden_size=16, num_attention_heads=1, num_layers=1, ffn_hidden_size=16, in_channels=16, out_channels=16,
        text_in_dim=16, rope_axes_dim=(4, 6, 6))
    return silent(ErnieImagePipeline(
        transformer=lively(denoiser), vae=flux2_vae(), text_encoder=language_model(tokens), tokenizer=tokens,
        scheduler=shifted_scheduler())), {"height": 16, "width": 16, "use_pe": False}


FACTORIES = {"Krea2Pipeline": krea2, "ErnieImagePipeline": ernie_image}
