"""Wan, and SkyReels V2, which has its architecture."""

from __future__ import annotations

from typing import Any

import torch

from flowgrpo.check.tiny.parts import (
    SIZE,
    TOKENS,
    Network,
    Pipeline,
    Scheduler,
    lively,
    ready,
    tokenizer,
    video_picture,
    video_t5,
)


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
    """Wan 2.2's dense model for texts and pictures (TI2V-5B): a time step for every token."""
    from diffusers import WanPipeline

    torch.manual_seed(seed)
    pipe = WanPipeline(transformer=_wan_transformer(), expand_timesteps=True, **_wan_parts(5.0))
    return ready(pipe), dict(WAN_CALL)


def wan_image(seed: int = 0) -> tuple[Pipeline, dict[str, Any]]:
    """Wan 2.2's image-to-video: the picture is eight extra channels, including a mask."""
    from diffusers import WanImageToVideoPipeline

    torch.manual_seed(seed)
    # 4 of the state, 2 of the mask (one per video frame of a latent frame), 4 of the picture.
    experts = {"transformer": _wan_transformer(10), "transformer_2": _wan_transformer(10)}
    pipe = WanImageToVideoPipeline(boundary_ratio=0.875, **experts, **_wan_parts())
    return ready(pipe), WAN_CALL | {"image": video_picture()}


def wan_frames(seed: int = 0) -> tuple[Pipeline, dict[str, Any]]:
    """Wan 2.1's model of first and last frames (FLF2V), which embeds both by CLIP."""
    from diffusers import WanImageToVideoPipeline

    torch.manual_seed(seed)
    encoder, processor = _clip()
    # Tokens of a picture: 2 x 2 patches and one of the whole.
    denoiser = _wan_transformer(10, image_dim=16, added_kv_proj_dim=24, pos_embed_seq_len=2 * 5)
    pipe = WanImageToVideoPipeline(transformer=denoiser, image_encoder=encoder, image_processor=processor,
                                   **_wan_parts(5.0))
    return ready(pipe), WAN_CALL | {"image": video_picture(), "last_image": video_picture(128)}


def wan_video(seed: int = 0) -> tuple[Pipeline, dict[str, Any]]:
    """WanVideoToVideo."""
    from diffusers import WanVideoToVideoPipeline

    torch.manual_seed(seed)
    pipe = WanVideoToVideoPipeline(transformer=_wan_transformer(), **_wan_parts())
    call = {key: value for key, value in WAN_CALL.items() if key != "num_frames"}
    return ready(pipe), call | {"video": [video_picture(16 * i) for i in range(5)]}


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
    """SkyReels V2's image-to-video, which also encodes its picture with CLIP."""
    from diffusers import SkyReelsV2ImageToVideoPipeline

    torch.manual_seed(seed)
    encoder, processor = _clip()
    denoiser = _wan_transformer(10, "SkyReelsV2Transformer3DModel", image_dim=16, added_kv_proj_dim=24)
    pipe = SkyReelsV2ImageToVideoPipeline(transformer=denoiser, image_encoder=encoder, image_processor=processor,
                                          **_wan_parts(5.0))
    return ready(pipe), WAN_CALL | {"image": video_picture()}


def _clip() -> tuple[Any, Any]:
    """Return a CLIP image encoder of pictures of 16 x 16 in patches of 8, and its processor."""
    from transformers import CLIPImageProcessor, CLIPVisionConfig, CLIPVisionModelWithProjection

    encoder = CLIPVisionModelWithProjection(CLIPVisionConfig(
        hidden_size=16, intermediate_size=16, projection_dim=16, num_hidden_layers=2, num_attention_heads=2,
        image_size=16, patch_size=8))
    return encoder, CLIPImageProcessor(size={"shortest_edge": 16}, crop_size={"height": 16, "width": 16})
