"""Flow-matching image pipelines of 16 x 16 to 64 x 64 pixels."""

from functools import partial
from typing import Any

import diffusers
import numpy as np
import torch
import transformers
from PIL import Image

from flowgrpo.tools.check.tiny import parts as tiny
from flowgrpo.tools.check.tiny.parts import READER, SIZE, TOKENS, Parts, factories, lively, network

SD3_CALL = {"max_sequence_length": 2}  # rows of zeros in place of the absent T5
FLUX_CALL = SIZE | {"max_sequence_length": 16}
# An image whose right half is drawn; from pure noise.
HALF = {"image": tiny.image(),
        "mask_image": Image.fromarray(np.repeat(np.array([[0] * 8 + [255] * 8], np.uint8), 16, 0))}
INPAINTING = HALF | {"strength": 1.0}


def sd3_parts() -> Parts:
    """Without a T5: two blocks of width 16, latents of 4 x 8 x 8."""
    denoiser = network("SD3Transformer2DModel", num_layers=2, attention_head_dim=8, joint_attention_dim=32,
                       pooled_projection_dim=32, pos_embed_max_size=4, qk_norm="rms_norm")
    return {"transformer": lively(denoiser), "scheduler": tiny.shifted_scheduler(), "vae": tiny.autoencoder(),
            **tiny.clip(projected=True), **tiny.clip("_2", projected=True), "text_encoder_3": None, "tokenizer_3": None}


def flux_parts(transformer: Any = None, **given: Any) -> Parts:
    """Embedded guidance, packed latents, rotary positions, a T5, text_ids without a batch."""
    return {"transformer": transformer or lively(tiny.flux_transformer()), "scheduler": tiny.dynamic_scheduler(),
            "vae": tiny.autoencoder(), **tiny.clip(), **tiny.t5("_2"), **given}


def flux2(guidance_embeds: bool = True) -> Parts:
    """With embedded guidance, or Klein with true guidance; both concatenate the language model's layers."""
    denoiser = network("Flux2Transformer2DModel", in_channels=16, mlp_ratio=3.0, axes_dims_rope=(4, 4, 4, 4),
                       guidance_embeds=guidance_embeds)
    return tiny.with_language_model(denoiser, tiny.flux2_vae(), transformers.Qwen3ForCausalLM)


def qwen_image() -> Parts:
    """Two calls per step, rescaled guidance, prompts padded to equal length."""
    return tiny.with_language_model(network("QwenImageTransformer2DModel", in_channels=16), tiny.qwen_vae())


def qwen_edit() -> Parts:
    """It takes one prompt per call: its prompt encoder also reads the image. It scales the image to a million pixels.

    So the autoencoder shrinks by 64, the 2**6 that pipelines read from the number of `temperal_downsample`: by 16
    before its first layer, by 4 in three stages.
    """
    tokens = tiny.chat_tokenizer(vision=True)
    return {
        "transformer": lively(network("QwenImageTransformer2DModel", in_channels=16)),
        "scheduler": tiny.dynamic_scheduler(), "tokenizer": tokens, "vae": diffusers.AutoencoderKLWan(
            base_dim=4, z_dim=4, dim_mult=[1, 1, 1], num_res_blocks=1, in_channels=768, temperal_downsample=[False] * 6,
            out_channels=768, patch_size=16, latents_mean=[0.0] * 4, latents_std=[1.0] * 4),
        "text_encoder": tiny.qwen_vl(tokens), "processor": tiny.qwen_processor(tokens)}


def hidream() -> Parts:
    """Its experts run without gradients outside training mode."""
    tokens = tiny.tokenizer()
    denoiser = network(
        "HiDreamImageTransformer2DModel", patch_size=2, out_channels=4, attention_head_dim=8, caption_channels=[16, 16],
        text_emb_dim=32, num_routed_experts=2, axes_dims_rope=(4, 2, 2), max_resolution=(16, 16), llama_layers=[0, 1])
    llama = transformers.LlamaForCausalLM(transformers.LlamaConfig(**READER, **tiny.of_tokens(tokens)))
    return {"transformer": lively(denoiser), "scheduler": tiny.shifted_scheduler(), "vae": tiny.autoencoder(),
            **tiny.clip(projected=True), **tiny.clip("_2", projected=True), **tiny.t5("_3"), "text_encoder_4": llama,
            "tokenizer_4": tokens, "default_sample_size": 8}  # it scales every image to that area


def krea2() -> Parts:
    """Its denoiser reads several layers of a vision-language model."""
    tokens = tiny.chat_tokenizer()
    denoiser = network("Krea2Transformer2DModel", in_channels=16, attention_head_dim=8, num_key_value_heads=1,
                       timestep_embed_dim=8, num_text_layers=2, text_num_key_value_heads=1, axes_dims_rope=(4, 2, 2))
    reader = lively(tiny.qwen3_vl(tokens, "Qwen3VLModel"))
    return {"scheduler": tiny.dynamic_scheduler(), "vae": tiny.qwen_vae(), "text_encoder": reader, "tokenizer": tokens,
            "transformer": lively(denoiser), "text_encoder_select_layers": (1, 2),
            "prompt_template_encode_prefix": "", "prompt_template_encode_suffix": "",
            "prompt_template_encode_start_idx": 0, "prompt_template_encode_num_suffix_tokens": 0}


def longcat() -> Parts:
    """A Flux whose prompt is encoded by a vision-language model."""
    tokens, denoiser = tiny.chat_tokenizer(vision=True), network("LongCatImageTransformer2DModel", in_channels=64)
    return {"scheduler": tiny.dynamic_scheduler(), "vae": tiny.autoencoder(16), "text_encoder": tiny.qwen_vl(tokens),
            "tokenizer": tokens, "text_processor": tiny.qwen_processor(tokens), "transformer": lively(denoiser),
            "tokenizer_max_length": TOKENS}


def hunyuan_image() -> Parts:
    """HunyuanImage 2.1: a guider is a component, a second encoder reads the bytes of quoted words."""
    tokens = tiny.chat_tokenizer(vision=True)
    denoiser = network("HunyuanImageTransformer2DModel", attention_head_dim=8, mlp_ratio=4.0, text_embed_2_dim=16,
                       rope_axes_dim=(4, 4))
    vae = diffusers.AutoencoderKLHunyuanImage(
        in_channels=3, out_channels=3, latent_channels=4, block_out_channels=(32, 32), layers_per_block=1,
        spatial_compression_ratio=2, sample_size=16, scaling_factor=0.5)
    return {"scheduler": tiny.shifted_scheduler(), "vae": vae, "text_encoder": tiny.qwen_vl(tokens),
            "tokenizer": tokens, **tiny.t5("_2", vocabulary=400), "tokenizer_2": transformers.ByT5Tokenizer(),
            "transformer": lively(denoiser), "guider": diffusers.AdaptiveProjectedMixGuidance(),
            "tokenizer_max_length": TOKENS, "tokenizer_2_max_length": TOKENS, "prompt_template_encode": "{}",
            "prompt_template_encode_start_idx": 0}


def qwen_image_21() -> Parts:
    """Qwen-Image 2.1: images of four channels, the fourth their opacity."""
    processor = tiny.vision_processor()
    vae = diffusers.AutoencoderKLQwenImage21(
        base_dim=4, decoder_base_dim=4, z_dim=4, dim_mult=[1] * 5, num_res_blocks=1, temperal_downsample=[False] * 4,
        latents_mean=[0.0] * 4, latents_std=[1.0] * 4)
    denoiser = network("QwenImage21Transformer2DModel", mlp_ratio=3)
    return {"scheduler": tiny.dynamic_scheduler(), "vae": vae, "text_encoder": tiny.qwen3_vl(processor.tokenizer),
            "processor": processor, "transformer": lively(denoiser)}


def ideogram4() -> Parts:
    """Ideogram 4: guidance by a second transformer, which reads no prompt; its blocks read thirteen of 36 layers."""
    tokens = tiny.chat_tokenizer(vision=True)
    made = {"scheduler": tiny.shifted_scheduler(), "vae": tiny.flux2_vae(), "tokenizer": tokens,
            "text_encoder": tiny.qwen3_vl(tokens, "Qwen3VLModel", 36)}
    return made | {name: lively(network(
        "Ideogram4Transformer2DModel", in_channels=16, attention_head_dim=8, llm_features_dim=13 * 16,
        mrope_section=(2, 1, 1))) for name in ("transformer", "unconditional_transformer")}


def nucleus() -> Parts:
    """Nucleus-Image: experts choose their tokens, in all blocks but the first; encoded by the eighth last layer."""
    processor = tiny.vision_processor()
    denoiser = network(
        "NucleusMoEImageTransformer2DModel", in_channels=16, out_channels=4, num_layers=2, num_key_value_heads=1,
        mlp_ratio=6.0, dense_moe_strategy="leave_first_block_dense", num_experts=2, moe_intermediate_dim=16,
        capacity_factors=1.0)
    # diffusers leaves experts as memory had them.
    for parameter in denoiser.transformer_blocks[1].img_mlp.experts.parameters():
        torch.nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5)
    return {"transformer": lively(denoiser), "scheduler": tiny.dynamic_scheduler(), "vae": tiny.qwen_vae(),
            "text_encoder": tiny.qwen3_vl(processor.tokenizer, layers=9), "processor": processor}


def prx() -> Parts:
    """PRX, which is guided with one prompt per call alone."""
    from transformers.models.t5gemma.modeling_t5gemma import T5GemmaEncoder

    tokens = tiny.tokenizer()
    config: Any = transformers.T5GemmaModuleConfig(
        **READER | {"num_hidden_layers": 1, "dropout_rate": 0.0}, head_dim=8, num_key_value_heads=1,
        layer_types=["full_attention"], attention_dropout=0.0, vocab_size=len(tokens), pad_token_id=tokens.pad_token_id)
    reader = T5GemmaEncoder(config)
    denoiser = network("PRXTransformer2DModel", hidden_size=16, axes_dim=[4, 4])
    return {"transformer": lively(denoiser), "scheduler": tiny.shifted_scheduler(), "text_encoder": reader,
            "tokenizer": tokens, "vae": tiny.autoencoder(), "default_sample_size": 16}


FLUX2_CALL = FLUX_CALL | {"text_encoder_out_layers": (1,)}
EDIT_CALL = {"height": 256, "width": 256, "image": tiny.image()}
FACTORIES = factories({
    "HiDreamImagePipeline": (hidream, FLUX_CALL),
    "Krea2Pipeline": (krea2, FLUX_CALL),
    # A list of embeddings of different lengths.
    "ErnieImagePipeline": (lambda: {
        "transformer": lively(network("ErnieImageTransformer2DModel", hidden_size=16, num_attention_heads=1,
                                      in_channels=16, out_channels=16)),
        "vae": tiny.flux2_vae(), **tiny.prompt_reader(), "scheduler": tiny.shifted_scheduler()},
        SIZE | {"use_pe": False}),
    "LongCatImagePipeline": (longcat, SIZE | {"enable_prompt_rewrite": False}),
    "HunyuanImagePipeline": (hunyuan_image, SIZE),
    "QwenImage21Pipeline": (qwen_image_21, {"height": 64, "width": 64}),
    "Ideogram4Pipeline": (ideogram4, {
        "height": 64, "width": 64, "max_sequence_length": TOKENS, "guidance_schedule": (3.0, 3.0)}),
    "NucleusMoEImagePipeline": (nucleus, SIZE),
    "PRXPipeline": (prx, SIZE | {"use_resolution_binning": False}),
    # Its attention calls its layers to_query, to_key and to_value.
    "Kandinsky5T2IPipeline": (lambda: {
        "transformer": lively(network("Kandinsky5Transformer3DModel", model_dim=16, axes_dims=(4, 2, 2))),
        "vae": tiny.autoencoder(stages=4), "text_encoder": tiny.qwen_vl(tokens := tiny.chat_tokenizer(vision=True)),
        "tokenizer": tiny.qwen_processor(tokens), **tiny.clip("_2", 77), "scheduler": tiny.shifted_scheduler(),
        "prompt_template": "{}", "prompt_template_encode_start_idx": 0, "resolutions": [(64, 64)]},
        {"height": 64, "width": 64, "max_sequence_length": TOKENS}),
    "StableDiffusion3Pipeline": (sd3_parts, SD3_CALL),
    "FluxPipeline": (flux_parts, FLUX_CALL),
    # Tokens of a reference image follow those of the noise.
    "FluxKontextPipeline": (flux_parts, FLUX_CALL | {"image": tiny.image(), "max_area": 256, "_auto_resize": False}),
    # It restores the image after every step where the mask is black, as that of Qwen-Image does.
    "FluxInpaintPipeline": (flux_parts, FLUX_CALL | INPAINTING),
    # It reads 16 channels of the state, 16 of the masked image, and 16 of the mask: 2 x 2 pixels for each of the 2 x 2
    # packed places.
    "FluxFillPipeline": (flux_parts, FLUX_CALL | HALF, {
        "transformer": lambda: lively(tiny.flux_transformer(in_channels=48, out_channels=16))}),
    "Flux2Pipeline": (flux2, FLUX2_CALL),
    "Flux2KleinPipeline": (partial(flux2, False), FLUX2_CALL | {"image": tiny.image(64)}),
    "QwenImagePipeline": (qwen_image, SIZE),
    "QwenImageInpaintPipeline": (qwen_image, SIZE | INPAINTING),
    "QwenImageEditPipeline": (qwen_edit, EDIT_CALL),
    "QwenImageEditPlusPipeline": (qwen_edit, EDIT_CALL),  # several images
    # A list of embeddings of different lengths; velocities point to the data.
    "ZImagePipeline": (lambda: tiny.with_language_model(network(
        "ZImageTransformer2DModel", dim=16, axes_dims=[4, 2, 2])), FLUX_CALL),
    # Linear attention.
    "SanaPipeline": (lambda: tiny.with_language_model(network(
        "SanaTransformer2DModel", attention_head_dim=4, cross_attention_head_dim=4, cross_attention_dim=8,
        mlp_ratio=2.5), scheduler=tiny.shifted_scheduler()), {
        "height": 32, "width": 32, "max_sequence_length": 16, "use_resolution_binning": False,
        "complex_human_instruction": None}),
    # Its time runs from noise to data.
    "Lumina2Pipeline": (lambda: tiny.with_language_model(network(
        "Lumina2Transformer2DModel", sample_size=4, hidden_size=16, num_kv_heads=1, multiple_of=2,
        axes_dim_rope=(4, 2, 2), axes_lens=(64, 32, 32)), tiny.autoencoder(stages=4)), {
        "height": 32, "width": 32, "system_prompt": "", "max_sequence_length": 32}),
    # A Flux without pooled embeddings and with true guidance.
    "ChromaPipeline": (lambda: tiny.with_t5(network(
        "ChromaTransformer2DModel", in_channels=16, approximator_num_channels=8, approximator_hidden_dim=16,
        approximator_layers=1)), FLUX_CALL),
    "AuraFlowPipeline": (lambda: tiny.with_t5(network(
        "AuraFlowTransformer2DModel", attention_head_dim=8, pos_embed_max_size=16)), FLUX_CALL),
    "CogView4Pipeline": (lambda: tiny.with_language_model(network(
        "CogView4Transformer2DModel", attention_head_dim=4, num_attention_heads=4, time_embed_dim=8, condition_dim=4,
        pos_embed_max_size=16, rope_axes_dim=(256, 256))), FLUX_CALL),
    # Their LoRA has no loader.
    "BriaPipeline": (lambda: tiny.with_t5(network(
        "BriaTransformer2DModel", in_channels=16, attention_head_dim=8, axes_dims_rope=[0, 4, 4])), FLUX_CALL),
    "OvisImagePipeline": (lambda: tiny.with_language_model(network(
        "OvisImageTransformer2DModel", in_channels=16, out_channels=16)), SIZE),
})
