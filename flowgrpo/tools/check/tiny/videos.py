"""Video pipelines: five to nine frames of 16 x 16, autoencoders with one layer per stage.

Schedulers are those of the published checkpoints, with their conventions: inverted sigmas, v-prediction with zero
terminal signal, multistep flow schedulers.
"""

from __future__ import annotations

from typing import Any

import diffusers
import torch
import transformers

from flowgrpo.tools.check.tiny import video_families
from flowgrpo.tools.check.tiny.parts import (
    TOKENS,
    Factories,
    Made,
    Network,
    Scheduler,
    clip,
    factory,
    lively,
    llama_config,
    silent,
    tokenizer,
    video_image,
    video_t5,
)

FACTORIES: Factories = {**video_families.FACTORIES}
COGVIDEOX_CALL = {"height": 16, "width": 16, "num_frames": 9, "max_sequence_length": TOKENS}


def _cogvideox_parts(channels: int = 4) -> dict[str, Any]:
    vae = diffusers.AutoencoderKLCogVideoX(
        latent_channels=4, down_block_types=("CogVideoXDownBlock3D",) * 4, up_block_types=("CogVideoXUpBlock3D",) * 4,
        block_out_channels=(4,) * 4, layers_per_block=1, norm_num_groups=2, sample_height=16, sample_width=16)
    denoiser = diffusers.CogVideoXTransformer3DModel(
        num_attention_heads=2, attention_head_dim=16, in_channels=channels, out_channels=4, time_embed_dim=8,
        text_embed_dim=16, num_layers=2, sample_width=2, sample_height=2, sample_frames=9, patch_size=1,
        max_text_seq_length=TOKENS, use_rotary_positional_embeddings=True)
    return {"transformer": lively(denoiser), "vae": vae, "text_encoder": video_t5(), "tokenizer": tokenizer(TOKENS)}


def _cogvideox_scheduler(kind: str) -> Scheduler:
    return getattr(diffusers, kind)(
        prediction_type="v_prediction", rescale_betas_zero_snr=True, clip_sample=False, timestep_spacing="trailing",
        snr_shift_scale=3.0 if kind == "CogVideoXDDIMScheduler" else 1.0)


def cogvideox(scheduler: str = "CogVideoXDPMScheduler", seed: int = 0) -> Made:
    """CogVideoX: v-prediction, with the scheduler of the 2B (DDIM) or of the 5B checkpoint (DPM)."""
    torch.manual_seed(seed)
    pipe = diffusers.CogVideoXPipeline(scheduler=_cogvideox_scheduler(scheduler), **_cogvideox_parts())
    return silent(pipe), dict(COGVIDEOX_CALL)


@factory(FACTORIES, "CogVideoXImageToVideoPipeline")
def cogvideox_image() -> Made:
    """CogVideoX's image-to-video: the image is extra channels of the first frame."""
    pipe = diffusers.CogVideoXImageToVideoPipeline(
        scheduler=_cogvideox_scheduler("CogVideoXDPMScheduler"), **_cogvideox_parts(8))
    return pipe, COGVIDEOX_CALL | {"image": video_image()}


@factory(FACTORIES, "CogVideoXVideoToVideoPipeline")
def cogvideox_video() -> Made:
    pipe = diffusers.CogVideoXVideoToVideoPipeline(
        scheduler=_cogvideox_scheduler("CogVideoXDDIMScheduler"), **_cogvideox_parts())
    call = {key: value for key, value in COGVIDEOX_CALL.items() if key != "num_frames"}
    return pipe, call | {"video": [video_image(16 * i) for i in range(9)]}


@factory(FACTORIES, "MochiPipeline")
def mochi() -> Made:
    """Mochi, whose time runs from 0 (noise) to 1 and whose velocity points to the data."""
    denoiser = diffusers.MochiTransformer3DModel(
        patch_size=2, num_attention_heads=2, attention_head_dim=8, num_layers=2, pooled_projection_dim=16,
        in_channels=12, text_embed_dim=16, time_embed_dim=4, max_sequence_length=TOKENS)
    vae = diffusers.AutoencoderKLMochi(encoder_block_out_channels=(32,) * 4, decoder_block_out_channels=(32,) * 4,
                                       layers_per_block=(1,) * 5)
    pipe = diffusers.MochiPipeline(
        transformer=lively(denoiser), vae=vae, text_encoder=video_t5(), tokenizer=tokenizer(TOKENS),
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(invert_sigmas=True))
    return pipe, {"height": 32, "width": 32, "num_frames": 7, "max_sequence_length": TOKENS}


@factory(FACTORIES, "AllegroPipeline")
def allegro() -> Made:
    """Allegro, which predicts noise; its autoencoder decodes only in tiles."""
    denoiser = diffusers.AllegroTransformer3DModel(
        num_attention_heads=2, attention_head_dim=12, num_layers=2, cross_attention_dim=24, sample_width=8,
        sample_height=8, sample_frames=8, caption_channels=16)
    vae: Network = diffusers.AutoencoderKLAllegro(
        down_block_types=("AllegroDownBlock3D",) * 4, up_block_types=("AllegroUpBlock3D",) * 4,
        block_out_channels=(8,) * 4, layers_per_block=1, norm_num_groups=2, sample_size=16)
    vae.kernel = vae.stride = (8, 16, 16)  # one tile
    vae.enable_tiling()
    vae.enable_slicing()  # a tile of several videos does not decode
    pipe = diffusers.AllegroPipeline(
        transformer=lively(denoiser), vae=vae, text_encoder=video_t5(), tokenizer=tokenizer(TOKENS),
        scheduler=diffusers.EulerAncestralDiscreteScheduler(timestep_spacing="leading", steps_offset=1))
    return pipe, {"height": 16, "width": 16, "num_frames": 8, "max_sequence_length": TOKENS,
                  "clean_caption": False}


@factory(FACTORIES, "LattePipeline")
def latte() -> Made:
    """Latte, which predicts noise and its variance; the pipeline drops the variance."""
    denoiser = diffusers.LatteTransformer3DModel(
        sample_size=8, num_layers=1, patch_size=2, attention_head_dim=8, num_attention_heads=2, caption_channels=16,
        in_channels=4, cross_attention_dim=16, out_channels=8, attention_bias=True, activation_fn="gelu-approximate",
        num_embeds_ada_norm=1000, norm_type="ada_norm_single", norm_elementwise_affine=False, norm_eps=1e-6,
        video_length=5)
    vae = diffusers.AutoencoderKL(
        block_out_channels=(4, 4), norm_num_groups=2, down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2)
    pipe = diffusers.LattePipeline(
        transformer=lively(denoiser), vae=vae, text_encoder=video_t5(), tokenizer=tokenizer(TOKENS),
        scheduler=diffusers.DDIMScheduler(clip_sample=False))
    return pipe, {"height": 16, "width": 16, "video_length": 5, "clean_caption": False}


@factory(FACTORIES, "AnimateDiffPipeline")
def animatediff() -> Made:
    """AnimateDiff: a U-Net of SD 1.5 with motion modules."""
    tokens = tokenizer()
    denoiser = diffusers.UNet2DConditionModel(
        sample_size=8, block_out_channels=(8, 8), layers_per_block=1, cross_attention_dim=16, attention_head_dim=2,
        norm_num_groups=2, down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"))
    motion = diffusers.MotionAdapter(block_out_channels=(8, 8), motion_layers_per_block=1, motion_norm_num_groups=2,
                                     motion_num_attention_heads=2)
    vae = diffusers.AutoencoderKL(
        block_out_channels=(4, 4), norm_num_groups=2, down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2)
    pipe = diffusers.AnimateDiffPipeline(
        vae=vae, text_encoder=clip(tokens), tokenizer=tokens, unet=lively(denoiser),
        motion_adapter=motion, scheduler=diffusers.DDIMScheduler(beta_schedule="linear", clip_sample=False))
    return pipe, {"height": 16, "width": 16, "num_frames": 4}


@factory(FACTORIES, "SanaVideoPipeline")
def sana() -> Made:
    """Sana-Video: linear attention over the latents of Wan's autoencoder."""
    denoiser = diffusers.SanaVideoTransformer3DModel(
        in_channels=4, out_channels=4, num_attention_heads=2, attention_head_dim=12, num_layers=1,
        num_cross_attention_heads=2, cross_attention_head_dim=12, cross_attention_dim=24, caption_channels=16,
        sample_size=16, rope_max_seq_len=32)
    pipe = diffusers.SanaVideoPipeline(
        transformer=lively(denoiser), vae=video_families.autoencoder(),
        text_encoder=transformers.LlamaModel(llama_config()), tokenizer=tokenizer(TOKENS),
        scheduler=diffusers.DPMSolverMultistepScheduler(
            prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=8.0))
    return pipe, {"height": 32, "width": 32, "frames": 5, "max_sequence_length": TOKENS,
                  "complex_human_instruction": None, "use_resolution_binning": False}


FACTORIES |= {
    "CogVideoXPipeline": lambda seed=0: cogvideox("CogVideoXDPMScheduler", seed),
    "CogVideoXPipeline (DDIM)": lambda seed=0: cogvideox("CogVideoXDDIMScheduler", seed),
}
