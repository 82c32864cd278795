"""Flow-matching image pipelines of 16 x 16 or 32 x 32 pixels."""

from __future__ import annotations

from typing import Any

import diffusers
import numpy as np
import torch
import transformers
from PIL import Image

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
    flux2_transformer,
    flux2_vae,
    flux_transformer,
    image,
    language_model,
    lively,
    patch_vae,
    qwen3_vl,
    qwen_processor,
    qwen_transformer,
    qwen_vae,
    qwen_vl,
    shifted_scheduler,
    silent,
    t5,
    tokenizer,
    with_language_model,
)

FACTORIES: Factories = {}
SD3_CALL = {"max_sequence_length": 2}  # rows of zeros in place of the absent T5
FLUX2_CALL = {"max_sequence_length": 16, "height": 16, "width": 16, "text_encoder_out_layers": (1,)}
FLUX_CALL = {"max_sequence_length": 16, "height": 16, "width": 16}
KONTEXT_CALL = FLUX_CALL | {"image": image(), "max_area": 256, "_auto_resize": False}
# An image whose right half is drawn; from pure noise.
HALF = {"image": image(), "mask_image": Image.fromarray(np.repeat(np.array([[0] * 8 + [255] * 8], np.uint8), 16, 0))}
INPAINTING = HALF | {"strength": 1.0}


def sd3(seed: int = 0) -> Pipeline:
    """Return a StableDiffusion3Pipeline without a T5: two blocks of width 16, latents of 4 x 8 x 8."""
    torch.manual_seed(seed)
    tokens = tokenizer()
    denoiser = diffusers.SD3Transformer2DModel(
        sample_size=8, patch_size=2, in_channels=4, out_channels=4, num_layers=2, attention_head_dim=8,
        num_attention_heads=2, joint_attention_dim=32, caption_projection_dim=16, pooled_projection_dim=32,
        pos_embed_max_size=4, qk_norm="rms_norm")
    return silent(diffusers.StableDiffusion3Pipeline(
        transformer=lively(denoiser), scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0), vae=autoencoder(),
        text_encoder=clip(tokens, projected=True), tokenizer=tokens,
        text_encoder_2=clip(tokens, projected=True), tokenizer_2=tokenizer(),
        text_encoder_3=None, tokenizer_3=None))


def flux(seed: int = 0, kind: str = "FluxPipeline", **options: Any) -> Pipeline:
    """Return a FluxPipeline with embedded guidance: packed latents, rotary positions, a T5, text_ids without a batch.
    kind: another pipeline class of the same parts. options: its further arguments."""
    torch.manual_seed(seed)
    tokens = tokenizer()
    parts = {"transformer": lively(flux_transformer())} if "transformer" not in options else {}
    return silent(getattr(diffusers, kind)(
        scheduler=dynamic_scheduler(), vae=autoencoder(), text_encoder=clip(tokens), tokenizer=tokens,
        text_encoder_2=t5(tokens), tokenizer_2=tokenizer(), **parts, **options))


def flux_fill(seed: int = 0) -> Made:
    """Return a FluxFillPipeline, whose transformer reads 16 channels of the state, 16 of the masked image, and 16 of
    the mask: 2 x 2 pixels for each of the 2 x 2 packed places."""
    torch.manual_seed(seed)
    denoiser = lively(flux_transformer(in_channels=48, out_channels=16))
    return flux(seed, "FluxFillPipeline", transformer=denoiser), FLUX_CALL | HALF


def flux2(seed: int = 0, kind: str = "Flux2Pipeline", **call: Any) -> Made:
    """Return a Flux2Pipeline with embedded guidance, or a Flux2KleinPipeline with true guidance; both concatenate the
    language model's layers."""
    torch.manual_seed(seed)
    pipe = with_language_model(kind, flux2_transformer(kind == "Flux2Pipeline"), reader=transformers.Qwen3ForCausalLM,
                               vae=flux2_vae())
    return pipe, FLUX2_CALL | call


def qwen_image(seed: int = 0, kind: str = "QwenImagePipeline") -> Made:
    """Return a QwenImagePipeline: two calls per step, rescaled guidance, prompts padded to equal length."""
    torch.manual_seed(seed)
    pipe = with_language_model(kind, qwen_transformer(), vae=qwen_vae())
    return pipe, {"height": 16, "width": 16}


def qwen_edit(seed: int = 0, kind: str = "QwenImageEditPipeline") -> Made:
    """Return a QwenImageEditPipeline, which takes one prompt per call: its prompt encoder also reads the image. It
    scales the image to a million pixels, so the autoencoder shrinks by 64."""
    torch.manual_seed(seed)
    tokens = chat_tokenizer()
    tokens.add_special_tokens({"additional_special_tokens": list(VISION_TOKENS)})
    pipe = getattr(diffusers, kind)(
        transformer=lively(qwen_transformer()), scheduler=dynamic_scheduler(), vae=patch_vae(), tokenizer=tokens,
        text_encoder=qwen_vl(tokens), processor=qwen_processor(tokens))
    return silent(pipe), {"height": 256, "width": 256, "image": image()}


@factory(FACTORIES, "HiDreamImagePipeline")
def hidream() -> Made:
    """Return a HiDreamImagePipeline, whose experts run without gradients outside training mode."""
    tokens = tokenizer()
    denoiser = diffusers.HiDreamImageTransformer2DModel(
        patch_size=2, in_channels=4, out_channels=4, num_layers=1, num_single_layers=1, attention_head_dim=8,
        num_attention_heads=2, caption_channels=[16, 16], text_emb_dim=32, num_routed_experts=2,
        num_activated_experts=2, axes_dims_rope=(4, 2, 2), max_resolution=(16, 16), llama_layers=[0, 1])
    llama = transformers.LlamaForCausalLM(transformers.LlamaConfig(
        vocab_size=len(tokens), hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2,
        pad_token_id=tokens.pad_token_id, bos_token_id=tokens.bos_token_id, eos_token_id=tokens.eos_token_id))
    pipe: Pipeline = diffusers.HiDreamImagePipeline(
        transformer=lively(denoiser), scheduler=shifted_scheduler(), vae=autoencoder(),
        text_encoder=clip(tokens, projected=True), tokenizer=tokens,
        text_encoder_2=clip(tokens, projected=True), tokenizer_2=tokenizer(),
        text_encoder_3=t5(tokens), tokenizer_3=tokenizer(), text_encoder_4=llama, tokenizer_4=tokenizer())
    pipe.default_sample_size = 8  # it scales every image to that area
    return pipe, FLUX_CALL


@factory(FACTORIES, "ZImagePipeline")
def z_image() -> Made:
    """Return a ZImagePipeline: a list of embeddings of different lengths; velocities point to the data."""
    denoiser = diffusers.ZImageTransformer2DModel(
        in_channels=4, dim=16, n_layers=1, n_refiner_layers=1, n_heads=2, n_kv_heads=2, cap_feat_dim=16,
        axes_dims=[4, 2, 2], axes_lens=[256, 32, 32])
    return with_language_model("ZImagePipeline", denoiser), FLUX_CALL


@factory(FACTORIES, "SanaPipeline")
def sana() -> Made:
    """Return a SanaPipeline, with linear attention."""
    denoiser = diffusers.SanaTransformer2DModel(
        in_channels=4, out_channels=4, num_attention_heads=2, attention_head_dim=4, num_layers=1,
        num_cross_attention_heads=2, cross_attention_head_dim=4, cross_attention_dim=8, caption_channels=16,
        sample_size=8)
    return with_language_model("SanaPipeline", denoiser, scheduler=shifted_scheduler()), {
        "height": 32, "width": 32, "max_sequence_length": 16, "use_resolution_binning": False,
        "complex_human_instruction": None}


@factory(FACTORIES, "Lumina2Pipeline")
def lumina2() -> Made:
    """Return a Lumina2Pipeline, whose time runs from noise to data."""
    denoiser = diffusers.Lumina2Transformer2DModel(
        sample_size=4, in_channels=4, hidden_size=16, num_layers=1, num_refiner_layers=1, num_attention_heads=2,
        num_kv_heads=1, multiple_of=2, axes_dim_rope=(4, 2, 2), axes_lens=(64, 32, 32), cap_feat_dim=16)
    return with_language_model("Lumina2Pipeline", denoiser, vae=autoencoder(stages=4)), {
        "height": 32, "width": 32, "system_prompt": "", "max_sequence_length": 32}


@factory(FACTORIES, "ChromaPipeline")
def chroma() -> Made:
    """Return a ChromaPipeline: a Flux without pooled embeddings and with true guidance."""
    tokens = tokenizer()
    denoiser = diffusers.ChromaTransformer2DModel(
        in_channels=16, num_layers=1, num_single_layers=1, attention_head_dim=16, num_attention_heads=2,
        joint_attention_dim=16, axes_dims_rope=(4, 6, 6), approximator_num_channels=8, approximator_hidden_dim=16,
        approximator_layers=1)
    return diffusers.ChromaPipeline(
        transformer=lively(denoiser), scheduler=shifted_scheduler(), vae=autoencoder(), text_encoder=t5(tokens),
        tokenizer=tokens), FLUX_CALL


@factory(FACTORIES, "AuraFlowPipeline")
def aura_flow() -> Made:
    tokens = tokenizer()
    denoiser = diffusers.AuraFlowTransformer2DModel(
        sample_size=8, in_channels=4, num_mmdit_layers=1, num_single_dit_layers=1, attention_head_dim=8,
        num_attention_heads=2, joint_attention_dim=16, caption_projection_dim=16, out_channels=4, pos_embed_max_size=16)
    return diffusers.AuraFlowPipeline(
        transformer=lively(denoiser), scheduler=shifted_scheduler(), vae=autoencoder(), text_encoder=t5(tokens),
        tokenizer=tokens), FLUX_CALL


@factory(FACTORIES, "CogView4Pipeline")
def cogview4() -> Made:
    denoiser = diffusers.CogView4Transformer2DModel(
        in_channels=4, out_channels=4, num_layers=1, attention_head_dim=4, num_attention_heads=4, text_embed_dim=16,
        time_embed_dim=8, condition_dim=4, pos_embed_max_size=16, sample_size=8)
    return with_language_model("CogView4Pipeline", denoiser), FLUX_CALL


@factory(FACTORIES, "BriaPipeline")
def bria() -> Made:
    """Return a BriaPipeline, whose LoRA has no loader."""
    tokens = tokenizer()
    denoiser = diffusers.BriaTransformer2DModel(
        in_channels=16, num_layers=1, num_single_layers=1, attention_head_dim=8, num_attention_heads=2,
        joint_attention_dim=16, axes_dims_rope=[0, 4, 4])
    return diffusers.BriaPipeline(
        transformer=lively(denoiser), scheduler=shifted_scheduler(), vae=autoencoder(), text_encoder=t5(tokens),
        tokenizer=tokens), FLUX_CALL


@factory(FACTORIES, "OvisImagePipeline")
def ovis_image() -> Made:
    """Return an OvisImagePipeline, whose LoRA has no loader."""
    denoiser = diffusers.OvisImageTransformer2DModel(
        in_channels=16, out_channels=16, num_layers=1, num_single_layers=1, attention_head_dim=16,
        num_attention_heads=2, joint_attention_dim=16, axes_dims_rope=(4, 6, 6))
    return with_language_model("OvisImagePipeline", denoiser), {"height": 16, "width": 16}


@factory(FACTORIES, "Krea2Pipeline")
def krea2() -> Made:
    """Return a Krea2Pipeline, whose denoiser reads several layers of a vision-language model."""
    tokens = chat_tokenizer()
    denoiser = diffusers.Krea2Transformer2DModel(
        in_channels=16, num_layers=1, attention_head_dim=8, num_attention_heads=2, num_key_value_heads=1,
        intermediate_size=16, timestep_embed_dim=8, text_hidden_dim=16, num_text_layers=2, text_num_attention_heads=2,
        text_num_key_value_heads=1, text_intermediate_size=16, num_layerwise_text_blocks=1, num_refiner_text_blocks=1,
        axes_dims_rope=(4, 2, 2))
    reader = lively(qwen3_vl(tokens, "Qwen3VLModel"))
    pipe: Pipeline = diffusers.Krea2Pipeline(
        scheduler=dynamic_scheduler(), vae=qwen_vae(), text_encoder=reader, tokenizer=tokens,
        transformer=lively(denoiser), text_encoder_select_layers=(1, 2))
    pipe.prompt_template_encode_prefix = pipe.prompt_template_encode_suffix = ""
    pipe.prompt_template_encode_start_idx = pipe.prompt_template_encode_num_suffix_tokens = 0
    return pipe, {"height": 16, "width": 16, "max_sequence_length": TOKENS}


@factory(FACTORIES, "ErnieImagePipeline")
def ernie_image() -> Made:
    """Return an ErnieImagePipeline: a list of embeddings of different lengths."""
    tokens = chat_tokenizer()
    denoiser = diffusers.ErnieImageTransformer2DModel(
        hidden_size=16, num_attention_heads=1, num_layers=1, ffn_hidden_size=16, in_channels=16, out_channels=16,
        text_in_dim=16, rope_axes_dim=(4, 6, 6))
    return diffusers.ErnieImagePipeline(
        transformer=lively(denoiser), vae=flux2_vae(), text_encoder=language_model(tokens), tokenizer=tokens,
        scheduler=shifted_scheduler()), {"height": 16, "width": 16, "use_pe": False}


# One builder each, in several forms.
FACTORIES |= {
    "StableDiffusion3Pipeline": lambda seed=0: (sd3(seed), SD3_CALL),
    "FluxPipeline": lambda seed=0: (flux(seed), FLUX_CALL),
    # Tokens of a reference image follow those of the noise.
    "FluxKontextPipeline": lambda seed=0: (flux(seed, "FluxKontextPipeline"), KONTEXT_CALL),
    # It restores the image after every step where the mask is black, as that of Qwen-Image does.
    "FluxInpaintPipeline": lambda seed=0: (flux(seed, "FluxInpaintPipeline"), FLUX_CALL | INPAINTING),
    "FluxFillPipeline": flux_fill,
    "Flux2Pipeline": flux2,
    "Flux2KleinPipeline": lambda seed=0: flux2(seed, "Flux2KleinPipeline", image=image(64)),
    "QwenImagePipeline": qwen_image,
    "QwenImageInpaintPipeline": lambda seed=0: (
        qwen_image(seed, "QwenImageInpaintPipeline")[0], {"height": 16, "width": 16} | INPAINTING),
    "QwenImageEditPipeline": qwen_edit,
    "QwenImageEditPlusPipeline": lambda seed=0: qwen_edit(seed, "QwenImageEditPlusPipeline"),  # several images
}
