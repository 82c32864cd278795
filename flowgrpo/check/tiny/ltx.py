"""LTX-Video and LTX-2."""

from __future__ import annotations

from typing import Any

import torch

from flowgrpo.check.tiny.parts import (
    TOKENS,
    Network,
    Pipeline,
    lively,
    llama_config,
    ready,
    tokenizer,
    video_picture,
    video_t5,
)


def _ltx_parts() -> dict[str, Any]:
    from diffusers import AutoencoderKLLTXVideo, FlowMatchEulerDiscreteScheduler, LTXVideoTransformer3DModel

    vae: Network = AutoencoderKLLTXVideo(
        latent_channels=8, block_out_channels=(8, 8), down_block_types=("LTXVideoDownBlock3D",) * 2,
        decoder_block_out_channels=(8, 8), layers_per_block=(1, 1, 1), decoder_layers_per_block=(1, 1, 1),
        spatio_temporal_scaling=(True, False), decoder_spatio_temporal_scaling=(True, False), patch_size=1,
        decoder_inject_noise=(False,) * 3, upsample_residual=(False,) * 2, upsample_factor=(1, 1))
    vae.use_framewise_encoding = vae.use_framewise_decoding = False
    denoiser = LTXVideoTransformer3DModel(
        in_channels=8, out_channels=8, num_attention_heads=2, attention_head_dim=8, cross_attention_dim=16,
        num_layers=2, caption_channels=16)
    return {"transformer": lively(denoiser), "vae": vae, "text_encoder": video_t5(), "tokenizer": tokenizer(TOKENS),
            "scheduler": FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True, shift_terminal=0.1)}


LTX_CALL = {"height": 32, "width": 32, "num_frames": 5, "max_sequence_length": TOKENS}


def ltx(seed: int = 0) -> tuple[Pipeline, dict[str, Any]]:
    """LTX-Video."""
    from diffusers import LTXPipeline

    torch.manual_seed(seed)
    return ready(LTXPipeline(**_ltx_parts())), dict(LTX_CALL)


def ltx_image(seed: int = 0) -> tuple[Pipeline, dict[str, Any]]:
    """LTX-Video's image-to-video: its scheduler sees all frames but the first."""
    from diffusers import LTXImageToVideoPipeline

    torch.manual_seed(seed)
    return ready(LTXImageToVideoPipeline(**_ltx_parts())), LTX_CALL | {"image": video_picture()}


def ltx_condition(seed: int = 0) -> tuple[Pipeline, dict[str, Any]]:
    """LTX-Video 0.9.5 and later: conditions at any frame."""
    from diffusers import FlowMatchEulerDiscreteScheduler, LTXConditionPipeline

    torch.manual_seed(seed)
    parts = _ltx_parts() | {"scheduler": FlowMatchEulerDiscreteScheduler()}
    # The noise added to its picture at every step would differ between rollout and replay.
    call = LTX_CALL | {"image": video_picture(), "image_cond_noise_scale": 0.0}
    return ready(LTXConditionPipeline(**parts)), call


def _ltx2_parts() -> dict[str, Any]:
    from diffusers import (
        AutoencoderKLLTX2Audio,
        AutoencoderKLLTX2Video,
        FlowMatchEulerDiscreteScheduler,
        LTX2VideoTransformer3DModel,
    )
    from diffusers.pipelines.ltx2 import LTX2TextConnectors
    from diffusers.pipelines.ltx2.vocoder import LTX2Vocoder
    from transformers import LlamaModel

    denoiser = LTX2VideoTransformer3DModel(
        in_channels=4, out_channels=4, num_attention_heads=2, attention_head_dim=8, cross_attention_dim=16,
        audio_in_channels=4, audio_out_channels=4, audio_num_attention_heads=2, audio_attention_head_dim=4,
        audio_cross_attention_dim=8, num_layers=1, caption_channels=16, rope_double_precision=False, rope_type="split")
    registers = {f"{kind}_connector_{key}": value for kind in ("video", "audio") for key, value in {
        "num_attention_heads": 2, "attention_head_dim": 8, "num_layers": 1, "num_learnable_registers": None}.items()}
    connectors = LTX2TextConnectors(
        caption_channels=16, text_proj_in_factor=4, connector_rope_base_seq_len=32, rope_theta=10000.0,
        rope_double_precision=False, causal_temporal_positioning=False, rope_type="split", **registers)
    vae: Network = AutoencoderKLLTX2Video(
        latent_channels=4, block_out_channels=(8,), decoder_block_out_channels=(8,), layers_per_block=(1,),
        decoder_layers_per_block=(1, 1), spatio_temporal_scaling=(True,), decoder_spatio_temporal_scaling=(True,),
        decoder_inject_noise=(False, False), downsample_type=("spatial",), upsample_residual=(False,),
        upsample_factor=(1,), timestep_conditioning=False, patch_size=1, patch_size_t=1, encoder_causal=True,
        decoder_causal=False)
    vae.use_framewise_encoding = vae.use_framewise_decoding = False
    sound = AutoencoderKLLTX2Audio(
        base_channels=4, output_channels=2, ch_mult=(1,), num_res_blocks=1, attn_resolutions=None, in_channels=2,
        resolution=32, latent_channels=2, norm_type="pixel", causality_axis="height", dropout=0.0,
        mid_block_add_attention=False, sample_rate=16000, mel_hop_length=160, is_causal=True, mel_bins=8)
    vocoder = LTX2Vocoder(
        in_channels=16, hidden_channels=8, out_channels=2, upsample_kernel_sizes=[4, 4], upsample_factors=[2, 2],
        resnet_kernel_sizes=[3], resnet_dilations=[[1, 3, 5]], output_sampling_rate=16000)
    return {"transformer": lively(denoiser), "connectors": connectors, "vae": vae, "audio_vae": sound,
            "vocoder": vocoder, "text_encoder": lively(LlamaModel(llama_config())), "tokenizer": tokenizer(TOKENS),
            "scheduler": FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True, shift_terminal=0.1)}


LTX2_CALL = {
    "height": 32, "width": 32, "num_frames": 5, "frame_rate": 25.0, "max_sequence_length": TOKENS, "stg_scale": 0.0,
    "modality_scale": 1.0, "audio_guidance_scale": 1.0, "audio_stg_scale": 0.0, "audio_modality_scale": 1.0}


def ltx2(seed: int = 0) -> tuple[Pipeline, dict[str, Any]]:
    """LTX-2: an additional state for sound."""
    from diffusers import LTX2Pipeline

    torch.manual_seed(seed)
    return ready(LTX2Pipeline(**_ltx2_parts())), dict(LTX2_CALL)


def ltx2_image(seed: int = 0) -> tuple[Pipeline, dict[str, Any]]:
    """LTX-2's image-to-video."""
    from diffusers import LTX2ImageToVideoPipeline

    torch.manual_seed(seed)
    return ready(LTX2ImageToVideoPipeline(**_ltx2_parts())), LTX2_CALL | {"image": video_picture(), "image_crf": 0}
