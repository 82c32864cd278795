"""Families of video pipelines: HunyuanVideo and SkyReels V1, which has its architecture, HunyuanVideo 1.5; LTX-Video
and LTX-2; Wan, and SkyReels V2, which has its architecture.
"""

from __future__ import annotations

from typing import Any

import diffusers
import torch
import transformers

from flowgrpo.tools.check.tiny.parts import (
    SIZE,
    TOKENS,
    Factories,
    Made,
    Network,
    Pipeline,
    chat_tokenizer,
    clip,
    factory,
    image_encoder,
    lively,
    llama_config,
    shifted_scheduler,
    silent,
    t5,
    tokenizer,
    video_image,
    video_t5,
)

FACTORIES: Factories = {}


def _hunyuan_transformer(channels: int = 4, **options: Any) -> Network:
    return lively(diffusers.HunyuanVideoTransformer3DModel(**dict(
        in_channels=channels, out_channels=4, num_attention_heads=2, attention_head_dim=10, num_layers=1,
        num_single_layers=1, num_refiner_layers=1, patch_size=1, text_embed_dim=16, pooled_projection_dim=16,
        rope_axes_dim=(2, 4, 4)) | options))


def _hunyuan_parts() -> dict[str, Any]:
    tokens = tokenizer(77)  # the pipeline pads to this length
    blocks = 4
    vae = diffusers.AutoencoderKLHunyuanVideo(
        latent_channels=4, down_block_types=("HunyuanVideoDownBlock3D",) * blocks,
        up_block_types=("HunyuanVideoUpBlock3D",) * blocks, block_out_channels=(4,) * blocks, layers_per_block=1,
        norm_num_groups=2)
    return {"vae": vae, "scheduler": diffusers.FlowMatchEulerDiscreteScheduler(shift=7.0),
            "tokenizer": tokenizer(TOKENS), "text_encoder_2": clip(tokens), "tokenizer_2": tokens}


HUNYUAN_CALL = SIZE | {"max_sequence_length": TOKENS, "prompt_template": {"template": "{}", "crop_start": 0}}


@factory(FACTORIES, "HunyuanVideoPipeline")
def hunyuan() -> Made:
    """HunyuanVideo: guidance as an input of the transformer."""
    pipe = diffusers.HunyuanVideoPipeline(
        text_encoder=lively(transformers.LlamaModel(llama_config())), transformer=_hunyuan_transformer(),
        **_hunyuan_parts())
    return pipe, HUNYUAN_CALL


@factory(FACTORIES, "HunyuanSkyreelsImageToVideoPipeline")
def hunyuan_skyreels() -> Made:
    """SkyReels V1's image-to-video on HunyuanVideo's architecture."""
    pipe = diffusers.HunyuanSkyreelsImageToVideoPipeline(
        text_encoder=lively(transformers.LlamaModel(llama_config())), **_hunyuan_parts(),
        transformer=_hunyuan_transformer(8, guidance_embeds=False))
    return pipe, HUNYUAN_CALL | {"image": video_image()}


@factory(FACTORIES, "HunyuanVideo15Pipeline")
def hunyuan15() -> Made:
    """HunyuanVideo 1.5: two text encoders, and guidance in a part of its own, the guider."""
    tokens = chat_tokenizer()
    tokens.chat_template += "."  # the denoiser takes the mean of a prompt's tokens, also of an empty one's
    reader = transformers.Qwen2_5_VLTextModel(transformers.Qwen2_5_VLTextConfig(
        vocab_size=len(tokens), hidden_size=16, intermediate_size=16, num_hidden_layers=3, num_attention_heads=2,
        num_key_value_heads=2, pad_token_id=tokens.pad_token_id,
        rope_parameters={"mrope_section": [1, 1, 2], "rope_type": "default", "rope_theta": 1e4}))
    denoiser = diffusers.HunyuanVideo15Transformer3DModel(
        in_channels=9, out_channels=4, num_attention_heads=2, attention_head_dim=10, num_layers=1, num_refiner_layers=1,
        text_embed_dim=16, text_embed_2_dim=16, image_embed_dim=8, rope_axes_dim=(2, 4, 4), target_size=16)
    vae = diffusers.AutoencoderKLHunyuanVideo15(
        latent_channels=4, block_out_channels=(32, 32, 32), layers_per_block=1, spatial_compression_ratio=4,
        temporal_compression_ratio=4)
    pipe: Pipeline = diffusers.HunyuanVideo15Pipeline(
        text_encoder=lively(reader), tokenizer=tokens, transformer=lively(denoiser), vae=vae,
        scheduler=shifted_scheduler(), text_encoder_2=t5(tokens), tokenizer_2=tokenizer(),
        guider=diffusers.ClassifierFreeGuidance(guidance_scale=6.0))
    pipe.prompt_template_encode_start_idx, pipe.vision_num_semantic_tokens = 0, 2
    pipe.tokenizer_max_length = pipe.tokenizer_2_max_length = TOKENS
    return pipe, SIZE


def hunyuan_image(kind: str, seed: int = 0) -> Made:
    """HunyuanVideo's image-to-video. The image is an extra condition or the state's first frame."""
    torch.manual_seed(seed)
    vision = transformers.CLIPVisionConfig(hidden_size=16, intermediate_size=16, projection_dim=16, num_hidden_layers=2,
                                           num_attention_heads=2, image_size=16, patch_size=8)
    tokens: dict[str, Any] = {"pad_token_id": 0, "image_token_index": 1}
    reader = transformers.LlavaForConditionalGeneration(
        transformers.LlavaConfig(vision_config=vision, text_config=llama_config(), **tokens))
    beside = kind == "latent_concat"
    pipe = diffusers.HunyuanVideoImageToVideoPipeline(
        text_encoder=lively(reader), **_hunyuan_parts(), image_processor=transformers.CLIPImageProcessor(
            size={"shortest_edge": 16}, crop_size={"height": 16, "width": 16}),
        transformer=_hunyuan_transformer(9 if beside else 4, guidance_embeds=not beside, image_condition_type=kind))
    # Four image tokens stand in the text; the template is not cropped.
    template = {"template": "{}", "crop_start": 0, "image_emb_len": 4, "image_emb_start": 2, "image_emb_end": 6}
    call = HUNYUAN_CALL | {"image": video_image(), "prompt_template": template}
    return silent(pipe), call | {"num_frames": 9} if beside else call  # four are cropped


def _ltx_parts() -> dict[str, Any]:
    vae: Network = diffusers.AutoencoderKLLTXVideo(
        latent_channels=8, block_out_channels=(8, 8), down_block_types=("LTXVideoDownBlock3D",) * 2,
        decoder_block_out_channels=(8, 8), layers_per_block=(1, 1, 1), decoder_layers_per_block=(1, 1, 1),
        spatio_temporal_scaling=(True, False), decoder_spatio_temporal_scaling=(True, False), patch_size=1,
        decoder_inject_noise=(False,) * 3, upsample_residual=(False,) * 2, upsample_factor=(1, 1))
    vae.use_framewise_encoding = vae.use_framewise_decoding = False
    denoiser = diffusers.LTXVideoTransformer3DModel(
        in_channels=8, out_channels=8, num_attention_heads=2, attention_head_dim=8, cross_attention_dim=16,
        num_layers=2, caption_channels=16)
    return {"transformer": lively(denoiser), "vae": vae, "text_encoder": video_t5(), "tokenizer": tokenizer(TOKENS),
            "scheduler": diffusers.FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True, shift_terminal=0.1)}


LTX_CALL = {"height": 32, "width": 32, "num_frames": 5, "max_sequence_length": TOKENS}


def ltx(seed: int = 0, kind: str = "LTXPipeline", **call: Any) -> Made:
    """LTX-Video, and its image-to-video, whose scheduler sees all frames but the first."""
    torch.manual_seed(seed)
    return silent(getattr(diffusers, kind)(**_ltx_parts())), LTX_CALL | call


@factory(FACTORIES, "LTXConditionPipeline")
def ltx_condition() -> Made:
    """LTX-Video 0.9.5 and later: conditions at any frame."""
    parts = _ltx_parts() | {"scheduler": diffusers.FlowMatchEulerDiscreteScheduler()}
    # The noise added to its image at every step would differ between rollout and replay.
    call = LTX_CALL | {"image": video_image(), "image_cond_noise_scale": 0.0}
    return diffusers.LTXConditionPipeline(**parts), call


def _ltx2_parts() -> dict[str, Any]:
    from diffusers.pipelines.ltx2 import LTX2TextConnectors
    from diffusers.pipelines.ltx2.vocoder import LTX2Vocoder

    denoiser = diffusers.LTX2VideoTransformer3DModel(
        in_channels=4, out_channels=4, num_attention_heads=2, attention_head_dim=8, cross_attention_dim=16,
        audio_in_channels=4, audio_out_channels=4, audio_num_attention_heads=2, audio_attention_head_dim=4,
        audio_cross_attention_dim=8, num_layers=1, caption_channels=16, rope_double_precision=False, rope_type="split")
    registers = {f"{kind}_connector_{key}": value for kind in ("video", "audio") for key, value in {
        "num_attention_heads": 2, "attention_head_dim": 8, "num_layers": 1, "num_learnable_registers": None}.items()}
    connectors = LTX2TextConnectors(
        caption_channels=16, text_proj_in_factor=4, connector_rope_base_seq_len=32, rope_theta=10000.0,
        rope_double_precision=False, causal_temporal_positioning=False, rope_type="split", **registers)
    vae: Network = diffusers.AutoencoderKLLTX2Video(
        latent_channels=4, block_out_channels=(8,), decoder_block_out_channels=(8,), layers_per_block=(1,),
        decoder_layers_per_block=(1, 1), spatio_temporal_scaling=(True,), decoder_spatio_temporal_scaling=(True,),
        decoder_inject_noise=(False, False), downsample_type=("spatial",), upsample_residual=(False,),
        upsample_factor=(1,), timestep_conditioning=False, patch_size=1, patch_size_t=1, encoder_causal=True,
        decoder_causal=False)
    vae.use_framewise_encoding = vae.use_framewise_decoding = False
    sound = diffusers.AutoencoderKLLTX2Audio(
        base_channels=4, output_channels=2, ch_mult=(1,), num_res_blocks=1, attn_resolutions=None, in_channels=2,
        resolution=32, latent_channels=2, norm_type="pixel", causality_axis="height", dropout=0.0,
        mid_block_add_attention=False, sample_rate=16000, mel_hop_length=160, is_causal=True, mel_bins=8)
    vocoder = LTX2Vocoder(
        in_channels=16, hidden_channels=8, out_channels=2, upsample_kernel_sizes=[4, 4], upsample_factors=[2, 2],
        resnet_kernel_sizes=[3], resnet_dilations=[[1, 3, 5]], output_sampling_rate=16000)
    return {"transformer": lively(denoiser), "connectors": connectors, "vae": vae, "audio_vae": sound,
            "vocoder": vocoder, "text_encoder": lively(transformers.LlamaModel(llama_config())),
            "tokenizer": tokenizer(TOKENS),
            "scheduler": diffusers.FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True, shift_terminal=0.1)}


LTX2_CALL = {
    "height": 32, "width": 32, "num_frames": 5, "frame_rate": 25.0, "max_sequence_length": TOKENS, "stg_scale": 0.0,
    "modality_scale": 1.0, "audio_guidance_scale": 1.0, "audio_stg_scale": 0.0, "audio_modality_scale": 1.0}


def ltx2(seed: int = 0, kind: str = "LTX2Pipeline", **call: Any) -> Made:
    """LTX-2: an additional state for sound."""
    torch.manual_seed(seed)
    return silent(getattr(diffusers, kind)(**_ltx2_parts())), LTX2_CALL | call


def autoencoder() -> Network:
    """Latents of 4 x 3 x 8 x 8 for 5 frames of 16 x 16."""
    return diffusers.AutoencoderKLWan(
        base_dim=4, z_dim=4, dim_mult=[1, 1], num_res_blocks=1, temperal_downsample=[True], latents_mean=[0.1] * 4,
        latents_std=[1.5] * 4, scale_factor_temporal=2, scale_factor_spatial=2)


def _wan_transformer(channels: int = 4, kind: str = "WanTransformer3DModel", **options: Any) -> Network:
    return lively(getattr(diffusers, kind)(
        patch_size=(1, 2, 2), num_attention_heads=2, attention_head_dim=12, in_channels=channels, out_channels=4,
        text_dim=16, freq_dim=16, ffn_dim=16, num_layers=2, rope_max_seq_len=32, **options))


def _wan_parts(shift: float = 3.0) -> dict[str, Any]:
    scheduler = diffusers.UniPCMultistepScheduler(  # that of the published checkpoints
        prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=shift)
    return {"tokenizer": tokenizer(TOKENS), "text_encoder": video_t5("UMT5"), "vae": autoencoder(),
            "scheduler": scheduler}


WAN_CALL = SIZE | {"max_sequence_length": TOKENS}


@factory(FACTORIES, "WanPipeline")
def wan() -> Made:
    """Wan 2.1: one transformer."""
    return diffusers.WanPipeline(transformer=_wan_transformer(), **_wan_parts()), WAN_CALL


@factory(FACTORIES, "WanPipeline (2.2)")
def wan22() -> Made:
    """Wan 2.2: `transformer` above, `transformer_2` below 0.875 of the noise."""
    experts = {"transformer": _wan_transformer(), "transformer_2": _wan_transformer()}
    return diffusers.WanPipeline(boundary_ratio=0.875, **experts, **_wan_parts()), WAN_CALL


@factory(FACTORIES, "WanPipeline (2.2, dense)")
def wan22_dense() -> Made:
    """Wan 2.2's dense model for texts and images (TI2V-5B): a time step for every token."""
    pipe = diffusers.WanPipeline(transformer=_wan_transformer(), expand_timesteps=True, **_wan_parts(5.0))
    return pipe, WAN_CALL


@factory(FACTORIES, "WanImageToVideoPipeline")
def wan_image() -> Made:
    """Wan 2.2's image-to-video: the image is eight extra channels, including a mask."""
    # 4 of the state, 2 of the mask (one per video frame of a latent frame), 4 of the image.
    experts = {"transformer": _wan_transformer(10), "transformer_2": _wan_transformer(10)}
    pipe = diffusers.WanImageToVideoPipeline(boundary_ratio=0.875, **experts, **_wan_parts())
    return pipe, WAN_CALL | {"image": video_image()}


@factory(FACTORIES, "WanImageToVideoPipeline (first and last frame)")
def wan_frames() -> Made:
    """Wan 2.1's model of first and last frames (FLF2V), which embeds both by CLIP."""
    encoder, processor = image_encoder()
    # Tokens of an image: 2 x 2 patches and one of the whole.
    denoiser = _wan_transformer(10, image_dim=16, added_kv_proj_dim=24, pos_embed_seq_len=2 * 5)
    pipe = diffusers.WanImageToVideoPipeline(
        transformer=denoiser, image_encoder=encoder, image_processor=processor, **_wan_parts(5.0))
    return pipe, WAN_CALL | {"image": video_image(), "last_image": video_image(128)}


@factory(FACTORIES, "WanVideoToVideoPipeline")
def wan_video() -> Made:
    pipe = diffusers.WanVideoToVideoPipeline(transformer=_wan_transformer(), **_wan_parts())
    call = {key: value for key, value in WAN_CALL.items() if key != "num_frames"}
    return pipe, call | {"video": [video_image(16 * i) for i in range(5)]}


@factory(FACTORIES, "WanVACEPipeline")
def wan_vace() -> Made:
    """Wan VACE: extra blocks read a video to change and steer the denoiser."""
    # 4 channels of the unchanged part, 4 of the changed part, and 2 x 2 of the mask.
    denoiser = _wan_transformer(kind="WanVACETransformer3DModel", vace_layers=[0], vace_in_channels=12)
    return diffusers.WanVACEPipeline(transformer=denoiser, **_wan_parts()), WAN_CALL


@factory(FACTORIES, "SkyReelsV2Pipeline")
def skyreels() -> Made:
    """SkyReels V2's text-to-video."""
    denoiser = _wan_transformer(kind="SkyReelsV2Transformer3DModel")
    return diffusers.SkyReelsV2Pipeline(transformer=denoiser, **_wan_parts(8.0)), WAN_CALL


@factory(FACTORIES, "SkyReelsV2ImageToVideoPipeline")
def skyreels_image() -> Made:
    """SkyReels V2's image-to-video, which also encodes its image with CLIP."""
    encoder, processor = image_encoder()
    denoiser = _wan_transformer(10, "SkyReelsV2Transformer3DModel", image_dim=16, added_kv_proj_dim=24)
    pipe = diffusers.SkyReelsV2ImageToVideoPipeline(
        transformer=denoiser, image_encoder=encoder, image_processor=processor, **_wan_parts(5.0))
    return pipe, WAN_CALL | {"image": video_image()}


# One builder each, in several forms.
FACTORIES |= {
    "HunyuanVideoImageToVideoPipeline": lambda seed=0: hunyuan_image("latent_concat", seed),
    "HunyuanVideoImageToVideoPipeline (token_replace)": lambda seed=0: hunyuan_image("token_replace", seed),
    "LTXPipeline": ltx,
    "LTXImageToVideoPipeline": lambda seed=0: ltx(seed, "LTXImageToVideoPipeline", image=video_image()),
    "LTX2Pipeline": ltx2,
    "LTX2ImageToVideoPipeline": lambda seed=0: ltx2(seed, "LTX2ImageToVideoPipeline", image=video_image(), image_crf=0),
}
