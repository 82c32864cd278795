"""Rows of derived.py whose denoiser is of a class of its own: its published configuration, shrunk.

The defaults of a class are the published configuration for most models. `shrunk` keeps them, and makes widths and
depths small by their names. A row names the class whose text encoder, autoencoder and scheduler it takes.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import diffusers
import transformers

from flowgrpo.tools.check.tiny import newest, unets, video_families
from flowgrpo.tools.check.tiny.parts import (
    TOKENS,
    Network,
    autoencoder,
    chat_tokenizer,
    language_model,
    lively,
    qwen3_vl,
    shifted_scheduler,
    tokenizer,
    video_image,
    video_t5,
)

Parts = dict[str, Any]
HEADS, WIDTH = 2, 16  # heads of an attention; channels of a head and of an embedding
ROPE = (4, 6, 6)  # channels of a head by axis
# Values by the names of configurations; a class takes those of its own arguments.
SIZES: dict[str, Any] = {
    **dict.fromkeys(("num_layers", "num_single_layers", "n_layers", "n_refiner_layers", "num_refiner_layers",
                     "mmdit_layers", "num_text_blocks", "num_visual_blocks", "depth", "layers_per_block",
                     "num_hidden_layers", "perceiver_num_layers"), 1),
    **dict.fromkeys(("num_attention_heads", "num_heads", "n_heads", "n_kv_heads", "num_kv_heads", "num_key_value_heads",
                     "num_cross_attention_heads", "mlp_ratio"), HEADS),
    **dict.fromkeys(("attention_head_dim", "text_dim", "freq_dim", "ffn_dim", "text_embed_dim", "caption_channels",
                     "joint_attention_dim", "pooled_projection_dim", "time_embed_dim", "in_text_dim", "in_text_dim2",
                     "time_dim", "ff_dim", "cap_feat_dim", "context_in_dim", "text_encoder_dim", "head_dim",
                     "cross_attention_head_dim", "condition_dim", "adaln_lora_dim", "intermediate_size"), WIDTH),
    **dict.fromkeys(("dim", "hidden_size", "model_dim", "cross_attention_dim", "dim_model"), HEADS * WIDTH),
    **dict.fromkeys(("axes_dims_rope", "rope_axes_dim", "axes_dims", "axes_dim", "rope_dim_list", "rope_dim"), ROPE),
    **dict.fromkeys(("in_channels", "out_channels", "in_visual_dim", "out_visual_dim", "latent_channels"), 4),
    "axes_lens": (256, 32, 32), "rope_max_seq_len": 32, "sample_size": 8, "sample_width": 2, "sample_height": 2,
}


def shrunk(kind: str, **options: Any) -> Network:
    """Build a network of a class of diffusers by the defaults of its configuration, shrunk. options: over both."""
    cls: Any = getattr(diffusers, kind)
    known = inspect.signature(cls.__init__).parameters
    return lively(cls(**{name: value for name, value in SIZES.items() if name in known
                         and known[name].default is not None} | options))


def denoiser(kind: str, further: Callable[[Parts], Parts] = lambda parts: {}, name: str = "transformer",
             **options: Any) -> Callable[[Parts], Parts]:
    """Return a function that builds the denoiser of a row, and its further parts."""
    return lambda parts: {name: shrunk(kind, **options)} | further(parts)


def _scheduler(kind: str, **options: Any) -> Callable[[Parts], Parts]:
    def build(parts: Parts) -> Parts:
        return {"scheduler": getattr(diffusers, kind)(**options)}
    return build


def _dream(parts: Parts) -> Parts:
    processor = newest.vision_processor()
    return {"processor": processor, "tokenizer": processor.tokenizer, "text_encoder": qwen3_vl(processor.tokenizer),
            "vae": autoencoder(), "scheduler": shifted_scheduler()}


def _deepfloyd(parts: Parts) -> Parts:
    """Pixels of a U-Net that gives a variance too."""
    return {"unet": unets.unet(in_channels=3, out_channels=6, sample_size=16, encoder_hid_dim=WIDTH,
                               encoder_hid_dim_type="text_proj"),
            "text_encoder": video_t5(), "tokenizer": tokenizer(77), "safety_checker": None, "feature_extractor": None,
            "watermarker": None, "requires_safety_checker": False,
            "scheduler": diffusers.DDPMScheduler(beta_schedule="squaredcos_cap_v2", variance_type="learned_range",
                                                 clip_sample=False)}


def _motion(parts: Parts) -> Parts:
    return {"unet": unets.unet(cross_attention_dim=2 * WIDTH, block_out_channels=(8, 8), norm_num_groups=2,
                               down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
                               up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"), **unets.sizes(WIDTH)),
            "motion_adapter": diffusers.MotionAdapter(
                block_out_channels=(8, 8), motion_layers_per_block=1, motion_norm_num_groups=2,
                motion_num_attention_heads=2),
            "scheduler": diffusers.DDIMScheduler(beta_schedule="linear", clip_sample=False)}


def _motif(parts: Parts) -> Parts:
    config = transformers.T5Gemma2EncoderConfig(text_config={
        "vocab_size": 600, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "dropout_rate": 0.0,
        "attention_dropout": 0.0}, vision_config={
        "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
        "image_size": 28, "patch_size": 14})
    return {"text_encoder": transformers.T5Gemma2Encoder(config),
            "guider": diffusers.ClassifierFreeGuidance(guidance_scale=6.0),
            "scheduler": shifted_scheduler(), "tokenizer": tokenizer(TOKENS)}


def _easy(parts: Parts) -> Parts:
    tokens = chat_tokenizer()
    return {"vae": diffusers.AutoencoderKLMagvit(
                latent_channels=4, block_out_channels=[4, 4, 4, 4], layers_per_block=1, norm_num_groups=2),
            "text_encoder": language_model(tokens), "tokenizer": tokens, "scheduler": shifted_scheduler()}


def _kandinsky3(parts: Parts) -> Parts:
    movq = diffusers.VQModel(latent_channels=4, block_out_channels=(8, 8), norm_num_groups=2, vq_embed_dim=4,
                             down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2)
    return {"unet": shrunk("Kandinsky3UNet", time_embedding_dim=16, groups=2, attention_head_dim=8, layers_per_block=3,
                           block_out_channels=(16, 32), cross_attention_dim=16, encoder_hid_dim=16),
            "movq": movq, "text_encoder": video_t5(), "tokenizer": tokenizer(128),
            "scheduler": diffusers.DDPMScheduler(clip_sample=False)}


SMALL = {"height": 16, "width": 16, "max_sequence_length": TOKENS}
CLIP = {"num_frames": 5}
ROWS: dict[str, tuple[Any, ...]] = {
    "Helios": ("Wan", denoiser("HeliosTransformer3DModel", _scheduler("HeliosScheduler", stages=1, stage_range=[0, 1])),
               {"num_latent_frames_per_chunk": 3, "history_sizes": [2, 1, 1]}),
    "Kandinsky5T2V": ("Kandinsky5T2I", lambda parts: {"vae": video_families.hunyuan()[0].vae},
                      CLIP | {"height": 32, "width": 32}),
    "LTX2InContext": ("LTX2",),
    "IF": ("StableDiffusion", _deepfloyd, {"clean_caption": False}),
    "AnimateDiffSDXL": ("StableDiffusionXL", _motion, {"num_frames": 4}),
    "HeliosModular": ("Helios", None, {"history_sizes": [2, 1, 1]}),
    "MotifVideo": ("Wan", denoiser("MotifVideoTransformer3DModel", _motif, in_channels=9)),
    "MotifVideoImage2Video": ("MotifVideo", lambda parts: {
        "transformer": shrunk("MotifVideoTransformer3DModel", in_channels=9, image_embed_dim=WIDTH),
        "feature_extractor": transformers.SiglipImageProcessor(size={"height": 28, "width": 28})},
        {"image": video_image()}),
    "EasyAnimate": ("Wan", denoiser("EasyAnimateTransformer3DModel", _easy, in_channels=4, out_channels=4,
                                    patch_size=2), CLIP),
    "DreamLite": ("", denoiser("DreamLiteUNetModel", _dream, "unet", block_out_channels=(8, 8), norm_num_groups=2,
                               attention_head_dim=4, num_attention_heads=None, cross_attention_dim=16, sample_size=8,
                               down_block_types=("DreamLiteCrossAttnDownBlock2D",) * 2,
                               up_block_types=("DreamLiteCrossAttnUpBlock2D",) * 2), SMALL),
    "PRXPixel": ("PRX", denoiser("PRXTransformer2DModel", in_channels=3, axes_dim=(4, 4), hidden_size=16,
                                 bottleneck_size=8)),
    "SanaImageToVideo": ("SanaVideo", None, {"image": video_image()}),
    "Lumina": ("Lumina2", denoiser("LuminaNextDiT2DModel", _scheduler("FlowMatchEulerDiscreteScheduler"), sample_size=4,
                                   multiple_of=2, num_kv_heads=1, cross_attention_dim=16)),
    "DreamLiteMobile": ("DreamLite",),
    "Kandinsky3": ("StableDiffusion", _kandinsky3, {"height": 16, "width": 16}),
    "ZImageOmni": ("ZImage", lambda parts: {"siglip": None, "siglip_processor": None}),
}
