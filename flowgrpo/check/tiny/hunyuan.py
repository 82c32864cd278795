"""HunyuanVideo, SkyReels V1, which has its architecture, and HunyuanVideo 1.5."""

from __future__ import annotations

from typing import Any

import torch

from flowgrpo.check.tiny.parts import (
    SIZE,
    TOKENS,
    Network,
    Pipeline,
    chat_tokenizer,
    lively,
    llama_config,
    ready,
    shifted_scheduler,
    t5,
    text_encoder,
    tokenizer,
    video_picture,
)


def _hunyuan_vae() -> Network:
    from diffusers import AutoencoderKLHunyuanVideo

    blocks = 4
    return AutoencoderKLHunyuanVideo(
        latent_channels=4, down_block_types=("HunyuanVideoDownBlock3D",) * blocks,
        up_block_types=("HunyuanVideoUpBlock3D",) * blocks, block_out_channels=(4,) * blocks, layers_per_block=1,
        norm_num_groups=2)


def _hunyuan_transformer(channels: int = 4, **options: Any) -> Network:
    from diffusers import HunyuanVideoTransformer3DModel

    return lively(HunyuanVideoTransformer3DModel(**dict(
        in_channels=channels, out_channels=4, num_attention_heads=2, attention_head_dim=10, num_layers=1,
        num_single_layers=1, num_refiner_layers=1, patch_size=1, text_embed_dim=16, pooled_projection_dim=16,
        rope_axes_dim=(2, 4, 4)) | options))


def _hunyuan_parts() -> dict[str, Any]:
    from diffusers import FlowMatchEulerDiscreteScheduler
    from transformers import CLIPTextModel

    tokens = tokenizer(77)  # the pipeline pads to this length
    return {"vae": _hunyuan_vae(), "scheduler": FlowMatchEulerDiscreteScheduler(shift=7.0),
            "tokenizer": tokenizer(TOKENS), "text_encoder_2": text_encoder(CLIPTextModel, tokens),
            "tokenizer_2": tokens}


HUNYUAN_CALL = SIZE | {"max_sequence_length": TOKENS, "prompt_template": {"template": "{}", "crop_start": 0}}


def hunyuan(seed: int = 0) -> tuple[Pipeline, dict[str, Any]]:
    """HunyuanVideo: guidance as an input of the transformer."""
    from diffusers import HunyuanVideoPipeline
    from transformers import LlamaModel

    torch.manual_seed(seed)
    pipe = HunyuanVideoPipeline(text_encoder=lively(LlamaModel(llama_config())), transformer=_hunyuan_transformer(),
                                **_hunyuan_parts())
    return ready(pipe), dict(HUNYUAN_CALL)


def hunyuan_skyreels(seed: int = 0) -> tuple[Pipeline, dict[str, Any]]:
    """SkyReels V1's image-to-video on HunyuanVideo's architecture."""
    from diffusers import HunyuanSkyreelsImageToVideoPipeline
    from transformers import LlamaModel

    torch.manual_seed(seed)
    pipe = HunyuanSkyreelsImageToVideoPipeline(
        text_encoder=lively(LlamaModel(llama_config())), **_hunyuan_parts(),
        transformer=_hunyuan_transformer(8, guidance_embeds=False))
    return ready(pipe), HUNYUAN_CALL | {"image": video_picture()}


def hunyuan15(seed: int = 0) -> tuple[Pipeline, dict[str, Any]]:
    """HunyuanVideo 1.5: two text encoders, and guidance in a part of its own, the guider."""
    from diffusers import (
        AutoencoderKLHunyuanVideo15,
        ClassifierFreeGuidance,
        HunyuanVideo15Pipeline,
        HunyuanVideo15Transformer3DModel,
    )
    from transformers import Qwen2_5_VLTextConfig, Qwen2_5_VLTextModel

    torch.manual_seed(seed)
    tokens = chat_tokenizer()
    tokens.chat_template += "."  # the denoiser takes the mean of a prompt's tokens, also of an empty one's
    reader = Qwen2_5_VLTextModel(Qwen2_5_VLTextConfig(
        vocab_size=len(tokens), hidden_size=16, intermediate_size=16, num_hidden_layers=3, num_attention_heads=2,
        num_key_value_heads=2, pad_token_id=tokens.pad_token_id,
        rope_parameters={"mrope_section": [1, 1, 2], "rope_type": "default", "rope_theta": 1e4}))
    denoiser = HunyuanVideo15Transformer3DModel(
        in_channels=9, out_channels=4, num_attention_heads=2, attention_head_dim=10, num_layers=1, num_refiner_layers=1,
        text_embed_dim=16, text_embed_2_dim=16, image_embed_dim=8, rope_axes_dim=(2, 4, 4), target_size=16)
    vae = AutoencoderKLHunyuanVideo15(
        latent_channels=4, block_out_channels=(32, 32, 32), layers_per_block=1, spatial_compression_ratio=4,
        temporal_compression_ratio=4)
    pipe: Pipeline = HunyuanVideo15Pipeline(
        text_encoder=lively(reader), tokenizer=tokens, transformer=lively(denoiser), vae=vae,
        scheduler=shifted_scheduler(), text_encoder_2=t5(tokens), tokenizer_2=tokenizer(),
        guider=ClassifierFreeGuidance(guidance_scale=6.0))
    pipe.prompt_template_encode_start_idx, pipe.vision_num_semantic_tokens = 0, 2
    pipe.tokenizer_max_length = pipe.tokenizer_2_max_length = TOKENS
    return ready(pipe), dict(SIZE)


def hunyuan_image(kind: str, seed: int = 0) -> tuple[Pipeline, dict[str, Any]]:
    """HunyuanVideo's image-to-video. The picture is an extra condition or the state's first frame."""
    from diffusers import HunyuanVideoImageToVideoPipeline
    from transformers import CLIPImageProcessor, CLIPVisionConfig, LlavaConfig, LlavaForConditionalGeneration

    torch.manual_seed(seed)
    vision = CLIPVisionConfig(hidden_size=16, intermediate_size=16, projection_dim=16, num_hidden_layers=2,
                              num_attention_heads=2, image_size=16, patch_size=8)
    tokens: dict[str, Any] = {"pad_token_id": 0, "image_token_index": 1}
    reader = LlavaForConditionalGeneration(LlavaConfig(vision_config=vision, text_config=llama_config(), **tokens))
    beside = kind == "latent_concat"
    pipe = HunyuanVideoImageToVideoPipeline(
        text_encoder=lively(reader), **_hunyuan_parts(), image_processor=CLIPImageProcessor(
            size={"shortest_edge": 16}, crop_size={"height": 16, "width": 16}),
        transformer=_hunyuan_transformer(9 if beside else 4, guidance_embeds=not beside, image_condition_type=kind))
    # Four image tokens stand in the text; the template is not cropped.
    template = {"template": "{}", "crop_start": 0, "image_emb_len": 4, "image_emb_start": 2, "image_emb_end": 6}
    call = HUNYUAN_CALL | {"image": video_picture(), "prompt_template": template}
    return ready(pipe), call | {"num_frames": 9} if beside else call  # four are cropped
