"""Tiny random pipelines, built in code: real diffusers classes with a few thousand weights and 16 x 16 pictures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator

from flowgrpo.config import Adapter, Config, load
from flowgrpo.data import Prompt
from flowgrpo.policies.pipeline import PipelinePolicy
from flowgrpo.train import Trainer

LATENTS = (4, 8, 8)
CALL = {"max_sequence_length": 2}  # of the SD3: rows of zeros that stand for the absent T5
FLUX_CALL = {"max_sequence_length": 16, "height": 16, "width": 16}
PROMPTS = ["red", "blue", "green", "a cat", "two dogs", "old"]


def tokenizer(length: int = 16):
    """A CLIPTokenizer whose tokens are single characters."""
    from tokenizers import pre_tokenizers
    from transformers import CLIPTokenizer

    characters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [*characters, *(c + "</w>" for c in characters), "<|startoftext|>", "<|endoftext|>"]
    return CLIPTokenizer(vocab={token: i for i, token in enumerate(tokens)}, merges=[], model_max_length=length)


def text_encoder(kind, tokens):
    from transformers import CLIPTextConfig

    return kind(CLIPTextConfig(
        vocab_size=len(tokens), hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2,
        projection_dim=16, max_position_embeddings=tokens.model_max_length, bos_token_id=tokens.bos_token_id,
        eos_token_id=tokens.eos_token_id, pad_token_id=tokens.pad_token_id))


def autoencoder(channels: int = 4):
    from diffusers import AutoencoderTiny

    vae = AutoencoderTiny(latent_channels=channels, encoder_block_out_channels=(8, 8), num_encoder_blocks=(0, 1),
                          decoder_block_out_channels=(8, 8), num_decoder_blocks=(1, 0), upsample_fn="nearest")
    vae.register_to_config(scaling_factor=1.5, shift_factor=0.1)
    with torch.no_grad():
        vae.decoder.layers[-1].bias.fill_(0.5)  # pictures in the middle of [0, 1], where no value is cut off
    return vae


def lively(module: torch.nn.Module) -> torch.nn.Module:
    """Matrices so large that noise and prompt change the output; diffusers starts the last one at zero."""
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.ndim == 2:
                torch.nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5)
    return module


def sd3(seed: int = 0):
    """A StableDiffusion3Pipeline without a T5: two blocks of width 16, latents of 4 x 8 x 8."""
    from diffusers import FlowMatchEulerDiscreteScheduler, SD3Transformer2DModel, StableDiffusion3Pipeline
    from transformers import CLIPTextModelWithProjection

    torch.manual_seed(seed)
    tokens = tokenizer()
    denoiser = SD3Transformer2DModel(
        sample_size=8, patch_size=2, in_channels=4, out_channels=4, num_layers=2, attention_head_dim=8,
        num_attention_heads=2, joint_attention_dim=32, caption_projection_dim=16, pooled_projection_dim=32,
        pos_embed_max_size=4, qk_norm="rms_norm")
    pipe = StableDiffusion3Pipeline(
        transformer=lively(denoiser), scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0), vae=autoencoder(),
        text_encoder=text_encoder(CLIPTextModelWithProjection, tokens), tokenizer=tokens,
        text_encoder_2=text_encoder(CLIPTextModelWithProjection, tokens), tokenizer_2=tokenizer(),
        text_encoder_3=None, tokenizer_3=None)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def flux(seed: int = 0):
    """A FluxPipeline with embedded guidance: packed latents, rotary positions, a T5, text_ids without a batch."""
    from diffusers import FlowMatchEulerDiscreteScheduler, FluxPipeline, FluxTransformer2DModel
    from transformers import CLIPTextModel, T5Config, T5EncoderModel

    torch.manual_seed(seed)
    tokens = tokenizer()
    denoiser = FluxTransformer2DModel(
        patch_size=1, in_channels=16, num_layers=1, num_single_layers=1, attention_head_dim=16, num_attention_heads=1,
        joint_attention_dim=16, pooled_projection_dim=16, guidance_embeds=True, axes_dims_rope=(4, 6, 6))
    pipe = FluxPipeline(
        transformer=lively(denoiser), scheduler=FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True),
        vae=autoencoder(), text_encoder=text_encoder(CLIPTextModel, tokens), tokenizer=tokens,
        text_encoder_2=T5EncoderModel(T5Config(vocab_size=len(tokens), d_model=16, d_kv=8, d_ff=16, num_layers=1,
                                               num_heads=2, dropout_rate=0.0)), tokenizer_2=tokenizer())
    pipe.set_progress_bar_config(disable=True)
    return pipe


# As the SD 1.5 checkpoint has it.
SD15_NOISE = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear", "steps_offset": 1,
              "timestep_spacing": "leading"}


def pndm():
    """The stock scheduler of SD 1.5."""
    from diffusers import PNDMScheduler

    return PNDMScheduler(skip_prk_steps=True, set_alpha_to_one=False, **SD15_NOISE)


def sd15(scheduler=None, seed: int = 0):
    """A StableDiffusionPipeline that predicts noise: a U-Net of one block, no safety checker."""
    from diffusers import StableDiffusionPipeline, UNet2DConditionModel
    from transformers import CLIPTextModel

    torch.manual_seed(seed)
    tokens = tokenizer()
    denoiser = UNet2DConditionModel(
        sample_size=8, block_out_channels=(8,), layers_per_block=1, down_block_types=("CrossAttnDownBlock2D",),
        up_block_types=("CrossAttnUpBlock2D",), cross_attention_dim=16, attention_head_dim=2, norm_num_groups=4)
    pipe = StableDiffusionPipeline(
        unet=lively(denoiser), scheduler=scheduler or pndm(), vae=autoencoder(),
        text_encoder=text_encoder(CLIPTextModel, tokens), tokenizer=tokens, safety_checker=None, feature_extractor=None,
        requires_safety_checker=False)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def save(pipe, folder: Path) -> Path:
    """The pipeline as a directory that `DiffusionPipeline.from_pretrained` reads, its absent parts named as such."""
    pipe.save_pretrained(folder)
    index = json.loads((folder / "model_index.json").read_text())
    index |= {name: [None, None] for name, part in pipe.components.items() if part is None}
    (folder / "model_index.json").write_text(json.dumps(index))
    vae = json.loads((folder / "vae" / "config.json").read_text())
    vae.pop("block_out_channels", None)  # AutoencoderTiny writes it and does not take it
    (folder / "vae" / "config.json").write_text(json.dumps(vae))
    return folder


def call_of(pipe) -> dict[str, Any]:
    return {"StableDiffusion3Pipeline": CALL, "FluxPipeline": FLUX_CALL}.get(type(pipe).__name__, {})


def policy(pipe=None, rank: int = 2, alpha: float | None = None, **options: Any) -> PipelinePolicy:
    pipe = pipe or sd3()
    return PipelinePolicy(pipe, Adapter(rank=rank, alpha=alpha), **{"call": call_of(pipe)} | options)


def stir(policy: PipelinePolicy, scale: float = 0.1) -> PipelinePolicy:
    """Move the trained weights off their start, where a LoRA is the base."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in policy.weights.parameters():
            parameter += scale * torch.randn(parameter.shape, generator=generator)
    return policy


def red(images, prompts):
    """The mean of a picture's red channel."""
    return images[:, 0].mean((1, 2))


def config(output: Path | str = "nowhere", **options: Any) -> Config:
    """A run of seconds: 2 prompts x 4 samples, 6 steps. An option train__lr is the configuration's train.lr."""
    small = dict(output=str(output), name="run", device="cpu", tracker="none", reward="red", held_out=0.3,
                 picture__call=CALL, adapter__rank=2, train__epochs=2, train__prompts=2, train__group=4,
                 train__micro_batch=4, train__steps=6, eval__steps=3, eval__guidance=1.0, eval__prompts=2)
    return load(None, {key.replace("__", "."): value for key, value in (small | options).items()})


def trainer(policy: PipelinePolicy | None = None, rewards=None, **options: Any) -> Trainer:
    """A Trainer as `train.run` makes it, on the tiny SD3."""
    settings = config(**options)
    torch.manual_seed(settings.seed)
    policy = policy or PipelinePolicy(sd3(), settings.adapter, precision=settings.precision,
                                      guidance=settings.train.guidance, call=CALL)
    return Trainer(settings, Accelerator(cpu=True), policy, rewards or {"red": red},
                   ([Prompt(text) for text in PROMPTS], []))
