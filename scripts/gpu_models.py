"""SD3.5-medium and FLUX.1-dev with random weights, of the published shapes or small: nothing is downloaded.

The text encoders have the published widths, but one layer each, since a prompt is encoded once in a run.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from flowgrpo.check.tiny.parts import t5, tokenizer

PROMPTS = ["a lighthouse at dusk", "two owls on a branch", "a red bicycle", "a sign that says open"]


def clip(kind: Any, width: int) -> tuple[Any, Any]:
    """Return a text encoder of one layer, and its tokenizer of single characters, for 77 tokens."""
    from transformers import CLIPTextConfig

    tokens = tokenizer(77)
    return kind(CLIPTextConfig(
        vocab_size=len(tokens), hidden_size=width, intermediate_size=width, num_hidden_layers=1,
        num_attention_heads=width // 64, projection_dim=width, max_position_embeddings=77,
        bos_token_id=tokens.bos_token_id, eos_token_id=tokens.eos_token_id, pad_token_id=tokens.pad_token_id)), tokens


def autoencoder(width: int) -> Any:
    """Return the autoencoder of both: 16 channels at an eighth of the side; published with a width of 128."""
    from diffusers import AutoencoderKL

    return AutoencoderKL(
        block_out_channels=(width, 2 * width, 4 * width, 4 * width), layers_per_block=2, latent_channels=16,
        down_block_types=("DownEncoderBlock2D",) * 4, up_block_types=("UpDecoderBlock2D",) * 4, scaling_factor=1.5305,
        shift_factor=0.0609, use_quant_conv=False, use_post_quant_conv=False)


def sd35_medium(layers: int = 24, heads: int = 24, width: int = 128) -> Any:
    """Return a StableDiffusion3Pipeline of 2.2 billion weights. Without a T5, whose rows are then zeros."""
    from diffusers import FlowMatchEulerDiscreteScheduler, SD3Transformer2DModel, StableDiffusion3Pipeline
    from transformers import CLIPTextModelWithProjection

    one, two = clip(CLIPTextModelWithProjection, 768), clip(CLIPTextModelWithProjection, 1280)
    denoiser = SD3Transformer2DModel(
        sample_size=128, patch_size=2, in_channels=16, out_channels=16, num_layers=layers, attention_head_dim=64,
        num_attention_heads=heads, joint_attention_dim=4096, caption_projection_dim=64 * heads,
        pooled_projection_dim=2048, pos_embed_max_size=384, dual_attention_layers=tuple(range(min(13, layers))),
        qk_norm="rms_norm")
    return StableDiffusion3Pipeline(
        transformer=denoiser, scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0), vae=autoencoder(width),
        text_encoder=one[0], tokenizer=one[1], text_encoder_2=two[0], tokenizer_2=two[1], text_encoder_3=None,
        tokenizer_3=None)


def flux_dev(layers: int = 19, heads: int = 24, width: int = 128) -> Any:
    """Return a FluxPipeline of 11.9 billion weights: `layers` double blocks and twice as many single ones."""
    from diffusers import FlowMatchEulerDiscreteScheduler, FluxPipeline, FluxTransformer2DModel
    from transformers import CLIPTextModel

    encoder, tokens = clip(CLIPTextModel, 768)
    denoiser = FluxTransformer2DModel(
        patch_size=1, in_channels=64, num_layers=layers, num_single_layers=2 * layers, attention_head_dim=128,
        num_attention_heads=heads, joint_attention_dim=4096, pooled_projection_dim=768, guidance_embeds=True)
    long = tokenizer(512)
    return FluxPipeline(
        transformer=denoiser, scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=True),
        vae=autoencoder(width), text_encoder=encoder, tokenizer=tokens, text_encoder_2=t5(long, 4096), tokenizer_2=long)


MODELS = {"sd35_medium": sd35_medium, "flux_dev": flux_dev}


@contextmanager
def made_on(device: torch.device, dtype: torch.dtype) -> Iterator[None]:
    """Context manager: modules are made on the device in that dtype: billions of weights need not pass the host."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            yield
    finally:
        torch.set_default_dtype(before)
