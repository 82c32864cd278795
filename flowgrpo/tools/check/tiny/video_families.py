"""Families of video pipelines: HunyuanVideo and SkyReels V1, which has its architecture, HunyuanVideo 1.5; LTX-Video
and LTX-2; Wan, and SkyReels V2, which has its architecture.
"""

from __future__ import annotations

from typing import Any

import torch

from flowgrpo.tools.check.tiny.parts import (
    SIZE,
    TOKENS,
    Network,
    Pipeline,
    Scheduler,
    chat_tokenizer,
    lively,
    llama_config,
    ready,
    shifted_scheduler,
    t5,
    text_encoder,
    tokenizer,
    video_image,
    video_t5,
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
    return ready(pipe), HUNYUAN_CALL | {"image": video_image()}


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
    """HunyuanVideo's image-to-video. The image is an extra condition or the state's first frame."""
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
    call = HUNYUAN_CALL | {"image": video_image(), "prompt_template": template}
    return ready(pipe), call | {"num_frames": 9} if beside else call  # four are cropped


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
    return ready(LTXImageToVideoPipeline(**_ltx_parts())), LTX_CALL | {"image": video_image()}


def ltx_condition(seed: int = 0) -> tuple[Pipeline, dict[str, Any]]:
    """LTX-Video 0.9.5 and later: conditions at any frame."""
    from diffusers import FlowMatchEulerDiscreteScheduler, LTXConditionPipeline

    torch.manual_seed(seed)
    parts = _ltx_parts() | {"scheduler": FlowMatchEulerDiscreteScheduler()}
    # The noise added to its image at every step would differ between rollout and replay.
    call = LTX_CALL | {"image": video_image(), "image_cond_noise_scale": 0.0}
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
    return ready(LTX2ImageToVideoPipeline(**_ltx2_parts())), LTX2_CALL | {"image": video_image(), "image_crf": 0}


def autoencoder() -> Network:
    """Latents of 4 x 3 x 8 x 8 for 5 frames of 16 x 16."""
    from diffusers import AutoencoderKLWan

    return AutoencoderKLWan(
        base_dim=4, z_dim=4, dim_mult=[1, 1], num_res_blocks=1, temperal_downsample=[True], latents_mean=[0.1] * 4,
        latents_std=[1.5] * 4, scale_factor_temporal=2, scale_factor_spatial=2)


def _wan_transformer(channels: int = 4, kind: str = "WanTransformer3DModel", **options: Any) -> Network:
    import diffusers

    return lively(getattr(diffusers, kind)(
        patch_size=(1, 2, 2), num_attention_heads=2, attention_head_dim=12, in_channels=channels, out_channels=4,
        text_dim=16, freq_dim=16, ffn_dim=16, num_layers=2, rope_max_seq_len=32, **options))


def _unipc(shift: float) -> Scheduler:
    """Return the multistep flow scheduler of the published Wan checkpoints."""
    from diffusers import UniPCMultistepScheduler

    return UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=shift)


def _wan_parts(shift: float = 3.0) -> dict[str, Any]:
    return {"tokenizer": tokenizer(TOKENS), "text_encoder": video_t5("UMT5"), "vae": autoencoder(),
            "scheduler": _unipc(shift)}


WAN_CALL = SIZE | {"max_sequence_length": TOKENS}


def wan(seed: int = 0) -> tuple[Pipeline, dict[str, Any]]:
    """Wan 2.1: one transformer."""
    from diffusers import WanPipeline

    torch.manual_seed(seed)
    return ready(WanPipeline(transformer=_wan_transformer(), **_wan_parts())), dict(WAN_CALL)


def wan22(seed: int = 0) -> tuple[Pipeline, dict[str, Any]]:
    """Wan 2.2: `transformer` above, `transformer_2` below 0.875 of the noise."""
    from diffusers import WanPipeline

    torch.manual_seed(seed)
    experts = {"transformer": _wan_transformer(), "transformer_2": _wan_transformer()}
    return ready(WanPipeline(boundary_ratio=0.875, **experts, **_wan_parts())), dict(WAN_CALL)


def wan22_dense(seed: int = 0) -> tuple[Pipeline, dict[str, Any]]:
    """Wan 2.2's dense model for texts and images (TI2V-5B): a time step for every token."""
    from diffusers import WanPipeline

    torch.manual_seed(seed)
    pipe = WanPipeline(transformer=_wan_transformer(), expand_timesteps=True, **_wan_parts(5.0))
    return ready(pipe), dict(WAN_CALL)


def wan_image(seed: int = 0) -> tuple[Pipeline, dict[str, Any]]:
    """Wan 2.2's image-to-video: the image is eight extra channels, including a mask."""
    from diffusers import WanImageToVideoPipeline

    torch.manual_seed(seed)
    # 4 of the state, 2 of the mask (one per video frame of a latent frame), 4 of the image.
    experts = {"transformer": _wan_transformer(10), "transformer_2": _wan_transformer(10)}
    pipe = WanImageToVideoPipeline(boundary_ratio=0.875, **experts, **_wan_parts())
    return ready(pipe), WAN_CALL | {"image": video_image()}


def wan_frames(seed: int = 0) -> tuple[Pipeline, dict[str, Any]]:
    """Wan 2.1's model of first and last frames (FLF2V), which embeds both by CLIP."""
    from diffusers import WanImageToVideoPipeline

    torch.manual_seed(seed)
    encoder, processor = _clip()
    # Tokens of an image: 2 x 2 patches and one of the whole.
    denoiser = _wan_transformer(10, image_dim=16, added_kv_proj_dim=24, pos_embed_seq_len=2 * 5)
    pipe = WanImageToVideoPipeline(transformer=denoiser, image_encoder=encoder, image_processor=processor,
                                   **_wan_parts(5.0))
    return ready(pipe), WAN_CALL | {"image": video_image(), "last_image": video_image(128)}


def wan_video(seed: int = 0) -> tuple[Pipeline, dict[str, Any]]:
    """WanVideoToVideo."""
    from diffusers import WanVideoToVideoPipeline

    torch.manual_seed(seed)
    pipe = WanVideoToVideoPipeline(transformer=_wan_transformer(), **_wan_parts())
    call = {key: value for key, value in WAN_CALL.items() if key != "num_frames"}
    return ready(pipe), call | {"video": [video_image(16 * i) for i in range(5)]}


def wan_vace(seed: int = 0) -> tuple[Pipeline, dict[str, Any]]:
    """Wan VACE: extra blocks read a video to change and steer the denoiser."""
    from diffusers import WanVACEPipeline

    torch.manual_seed(seed)
    # 4 channels of the unchanged part, 4 of the changed part, and 2 x 2 of the mask.
    denoiser = _wan_transformer(kind="WanVACETransformer3DModel", vace_layers=[0], vace_in_channels=12)
    return ready(WanVACEPipeline(transformer=denoiser, **_wan_parts())), dict(WAN_CALL)


def skyreels(seed: int = 0) -> tuple[Pipeline, dict[str, Any]]:
    """SkyReels V2's text-to-video."""
    from diffusers import SkyReelsV2Pipeline

    torch.manual_seed(seed)
    pipe = SkyReelsV2Pipeline(transformer=_wan_transformer(kind="SkyReelsV2Transformer3DModel"), **_wan_parts(8.0))
    return ready(pipe), dict(WAN_CALL)


def skyreels_image(seed: int = 0) -> tuple[Pipeline, dict[str, Any]]:
    """SkyReels V2's image-to-video, which also encodes its image with CLIP."""
    from diffusers import SkyReelsV2ImageToVideoPipeline

    torch.manual_seed(seed)
    encoder, processor = _clip()
    denoiser = _wan_transformer(10, "SkyReelsV2Transformer3DModel", image_dim=16, added_kv_proj_dim=24)
    pipe = SkyReelsV2ImageToVideoPipeline(transformer=denoiser, image_encoder=encoder, image_processor=processor,
                                          **_wan_parts(5.0))
    return ready(pipe), WAN_CALL | {"image": video_image()}


def _clip() -> tuple[Any, Any]:
    """Return a CLIP image encoder of images of 16 x 16 in patches of 8, and its processor."""
    from transformers import CLIPImageProcessor, CLIPVisionConfig, CLIPVisionModelWithProjection

    encoder = CLIPVisionModelWithProjection(CLIPVisionConfig(
        hidden_size=16, intermediate_size=16, projection_dim=16, num_hidden_layers=2, num_attention_heads=2,
        image_size=16, patch_size=8))
    return encoder, CLIPImageProcessor(size={"shortest_edge": 16}, crop_size={"height": 16, "width": 16})
