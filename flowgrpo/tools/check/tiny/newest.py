"""Image pipelines of diffusers 0.41 and 0.42, of 16 x 16 or 64 x 64 pixels, whose encoders read images too."""

from __future__ import annotations

from typing import Any

import diffusers
import torch
import transformers

from flowgrpo.tools.check.tiny.parts import (
    TOKENS,
    VISION_TOKENS,
    Factories,
    Made,
    Pipeline,
    autoencoder,
    chat_tokenizer,
    clip,
    dynamic_scheduler,
    factory,
    flux2_vae,
    lively,
    qwen3_vl,
    qwen_processor,
    qwen_vae,
    qwen_vl,
    shifted_scheduler,
    tokenizer,
    video_t5,
)

FACTORIES: Factories = {}


def _vision_tokens() -> Any:
    tokens = chat_tokenizer()
    tokens.add_special_tokens({"additional_special_tokens": list(VISION_TOKENS)})
    return tokens


def vision_processor() -> Any:
    """Return the processor of a Qwen3-VL, for images with an area of up to 56 by 56 pixels."""
    tokens, small = _vision_tokens(), dict[str, Any](min_pixels=28 * 28, max_pixels=56 * 56)
    return transformers.Qwen3VLProcessor(
        transformers.Qwen2VLImageProcessor(**small), tokens, transformers.Qwen3VLVideoProcessor(),
        chat_template=tokens.chat_template)


@factory(FACTORIES, "LongCatImagePipeline")
def longcat() -> Made:
    """A Flux whose prompt is encoded by a vision-language model."""
    tokens = _vision_tokens()
    denoiser = diffusers.LongCatImageTransformer2DModel(
        in_channels=64, num_layers=1, num_single_layers=1, attention_head_dim=16, num_attention_heads=2,
        joint_attention_dim=16, pooled_projection_dim=16, axes_dims_rope=[4, 6, 6])
    pipe: Pipeline = diffusers.LongCatImagePipeline(
        scheduler=dynamic_scheduler(), vae=autoencoder(16), text_encoder=qwen_vl(tokens), tokenizer=tokens,
        text_processor=qwen_processor(tokens), transformer=lively(denoiser))
    pipe.tokenizer_max_length = TOKENS
    return pipe, {"height": 16, "width": 16, "enable_prompt_rewrite": False}


@factory(FACTORIES, "HunyuanImagePipeline")
def hunyuan_image() -> Made:
    """HunyuanImage 2.1: a guider is a component, a second encoder reads the bytes of quoted words."""
    tokens = _vision_tokens()
    denoiser = diffusers.HunyuanImageTransformer2DModel(
        in_channels=4, out_channels=4, num_attention_heads=2, attention_head_dim=8, num_layers=1, num_single_layers=1,
        num_refiner_layers=1, patch_size=(1, 1), text_embed_dim=16, text_embed_2_dim=16, rope_axes_dim=(4, 4))
    vae = diffusers.AutoencoderKLHunyuanImage(
        in_channels=3, out_channels=3, latent_channels=4, block_out_channels=(32, 32), layers_per_block=1,
        spatial_compression_ratio=2, sample_size=16, scaling_factor=0.5)
    pipe: Pipeline = diffusers.HunyuanImagePipeline(
        scheduler=shifted_scheduler(), vae=vae, text_encoder=qwen_vl(tokens), tokenizer=tokens,
        text_encoder_2=video_t5(vocabulary=400), tokenizer_2=transformers.ByT5Tokenizer(), transformer=lively(denoiser),
        guider=diffusers.AdaptiveProjectedMixGuidance(enabled=True))
    pipe.tokenizer_max_length = pipe.tokenizer_2_max_length = TOKENS
    pipe.prompt_template_encode, pipe.prompt_template_encode_start_idx = "{}", 0
    return pipe, {"height": 16, "width": 16}


@factory(FACTORIES, "QwenImage21Pipeline")
def qwen_image_21() -> Made:
    """Qwen-Image 2.1: images of four channels, the fourth their opacity."""
    processor = vision_processor()
    vae = diffusers.AutoencoderKLQwenImage21(
        base_dim=4, decoder_base_dim=4, z_dim=4, dim_mult=[1] * 5, num_res_blocks=1, temperal_downsample=[False] * 4,
        latents_mean=[0.0] * 4, latents_std=[1.0] * 4)
    denoiser = diffusers.QwenImage21Transformer2DModel(
        in_channels=4, out_channels=4, num_layers=1, attention_head_dim=16, num_attention_heads=2, context_in_dim=16,
        axes_dims_rope=(4, 6, 6))
    pipe: Pipeline = diffusers.QwenImage21Pipeline(scheduler=dynamic_scheduler(), vae=vae, text_encoder=qwen3_vl(
        processor.tokenizer), processor=processor, transformer=lively(denoiser))
    return pipe, {"height": 64, "width": 64}


@factory(FACTORIES, "Ideogram4Pipeline")
def ideogram4() -> Made:
    """Ideogram 4: guidance by a second transformer, which reads no prompt; its blocks read thirteen of 36 layers."""
    tokens = _vision_tokens()
    sizes: dict[str, Any] = {
        "in_channels": 16, "num_layers": 1, "attention_head_dim": 8, "num_attention_heads": 2, "intermediate_size": 16,
        "adaln_dim": 16, "llm_features_dim": 13 * 16, "mrope_section": (2, 1, 1)}
    pipe: Pipeline = diffusers.Ideogram4Pipeline(
        scheduler=shifted_scheduler(), vae=flux2_vae(), text_encoder=qwen3_vl(tokens, "Qwen3VLModel", 36),
        tokenizer=tokens, transformer=lively(diffusers.Ideogram4Transformer2DModel(**sizes)),
        unconditional_transformer=lively(diffusers.Ideogram4Transformer2DModel(**sizes)))
    return pipe, {"height": 64, "width": 64, "max_sequence_length": TOKENS, "guidance_schedule": (3.0, 3.0)}


@factory(FACTORIES, "NucleusMoEImagePipeline")
def nucleus() -> Made:
    """Nucleus-Image: experts choose their tokens, in all blocks but the first; encoded by the eighth last layer."""
    processor = vision_processor()
    denoiser: Any = diffusers.NucleusMoEImageTransformer2DModel(
        in_channels=16, out_channels=4, num_layers=2, attention_head_dim=16, num_attention_heads=2,
        num_key_value_heads=1, joint_attention_dim=16, axes_dims_rope=(4, 6, 6), mlp_ratio=6.0,
        dense_moe_strategy="leave_first_block_dense", num_experts=2, moe_intermediate_dim=16, capacity_factors=1.0)
    # diffusers leaves experts as memory had them.
    for parameter in denoiser.transformer_blocks[1].img_mlp.experts.parameters():
        torch.nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5)
    pipe: Pipeline = diffusers.NucleusMoEImagePipeline(
        transformer=lively(denoiser), scheduler=dynamic_scheduler(), vae=qwen_vae(),
        text_encoder=qwen3_vl(processor.tokenizer, layers=9), processor=processor)
    return pipe, {"height": 16, "width": 16}


@factory(FACTORIES, "PRXPipeline")
def prx() -> Made:
    """PRX, which is guided with one prompt per call alone."""
    from transformers.models.t5gemma.modeling_t5gemma import T5GemmaEncoder

    tokens = tokenizer()
    sizes: dict[str, Any] = {
        "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "head_dim": 8,
        "num_key_value_heads": 1, "layer_types": ["full_attention"], "dropout_rate": 0.0, "attention_dropout": 0.0}
    config: Any = transformers.T5GemmaModuleConfig(vocab_size=len(tokens), pad_token_id=tokens.pad_token_id, **sizes)
    reader = T5GemmaEncoder(config)
    denoiser = diffusers.PRXTransformer2DModel(
        in_channels=4, patch_size=2, context_in_dim=16, hidden_size=16, mlp_ratio=2.0, num_heads=2, depth=1,
        axes_dim=[4, 4])
    pipe: Pipeline = diffusers.PRXPipeline(
        transformer=lively(denoiser), scheduler=shifted_scheduler(), text_encoder=reader, tokenizer=tokens,
        vae=autoencoder(), default_sample_size=16)
    return pipe, {"height": 16, "width": 16, "use_resolution_binning": False}


@factory(FACTORIES, "Kandinsky5T2IPipeline")
def kandinsky5() -> Made:
    """Kandinsky 5, whose attention calls its layers to_query, to_key and to_value."""
    tokens, short = _vision_tokens(), tokenizer(77)
    denoiser = diffusers.Kandinsky5Transformer3DModel(
        in_visual_dim=4, in_text_dim=16, in_text_dim2=16, time_dim=16, out_visual_dim=4, patch_size=(1, 2, 2),
        model_dim=16, ff_dim=16, num_text_blocks=1, num_visual_blocks=1, axes_dims=(4, 2, 2))
    pipe: Pipeline = diffusers.Kandinsky5T2IPipeline(
        transformer=lively(denoiser), vae=autoencoder(stages=4), text_encoder=qwen_vl(tokens),
        tokenizer=qwen_processor(tokens), text_encoder_2=clip(short), tokenizer_2=short,
        scheduler=shifted_scheduler())
    pipe.prompt_template, pipe.prompt_template_encode_start_idx, pipe.resolutions = "{}", 0, [(64, 64)]
    return pipe, {"height": 64, "width": 64, "max_sequence_length": TOKENS}
