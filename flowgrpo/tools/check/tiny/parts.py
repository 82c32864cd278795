"""Parts of tiny pipelines: tokenizers, text encoders, transformers, autoencoders, schedulers."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, Any, TypeAlias

import diffusers
import torch
import transformers

if TYPE_CHECKING:
    from PIL import Image
    from transformers import CLIPTokenizer, PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin

# Objects of diffusers, which type checkers see as placeholders.
Pipeline: TypeAlias = Any
Network: TypeAlias = Any
Scheduler: TypeAlias = Any

Made = tuple[Pipeline, dict[str, Any]]  # a pipeline, and the arguments of its call besides prompts
Factories = dict[str, Callable[..., Made]]  # by pipeline class, of a seed


def factory(factories: Factories, name: str) -> Callable[[Callable[[], Made]], Callable[..., Made]]:
    """Add the builder of the pipeline class `name` to a module's factories; torch is seeded before it, 0 by default."""
    def register(build: Callable[[], Made]) -> Callable[..., Made]:
        @wraps(build)
        def make(seed: int = 0) -> Made:
            torch.manual_seed(seed)
            pipe, call = build()
            return silent(pipe), dict(call)

        factories[name] = make
        return make
    return register


def tokenizer(length: int = 16) -> CLIPTokenizer:
    """Return a CLIPTokenizer whose tokens are single characters."""
    from tokenizers import pre_tokenizers

    characters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [*characters, *(c + "</w>" for c in characters), "<|startoftext|>", "<|endoftext|>"]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    return transformers.CLIPTokenizer(vocab=vocabulary, merges=[], model_max_length=length)


def clip(tokens: PreTrainedTokenizerBase, projected: bool = False) -> PreTrainedModel:
    """Return a CLIP text model of two layers of width 16 for a tokenizer; projected: with pooled embeddings."""
    kind: Any = transformers.CLIPTextModelWithProjection if projected else transformers.CLIPTextModel
    return kind(transformers.CLIPTextConfig(
        vocab_size=len(tokens), hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2,
        projection_dim=16, max_position_embeddings=tokens.model_max_length, bos_token_id=tokens.bos_token_id,
        eos_token_id=tokens.eos_token_id, pad_token_id=tokens.pad_token_id))


def autoencoder(channels: int = 4, stages: int = 2) -> Network:
    """Return an AutoencoderTiny that shrinks images by 2^(stages-1)."""
    widths, blocks = (8,) * stages, (0,) * (stages - 1)
    vae: Network = diffusers.AutoencoderTiny(
        latent_channels=channels, encoder_block_out_channels=widths, num_encoder_blocks=(*blocks, 1),
        decoder_block_out_channels=widths, num_decoder_blocks=(1, *blocks), upsample_fn="nearest")
    vae.register_to_config(scaling_factor=1.5, shift_factor=0.1)
    with torch.no_grad():
        vae.decoder.layers[-1].bias.fill_(0.5)  # images in the middle of [0, 1], where nothing is clipped
    return vae


def still_autoencoder() -> Network:
    """Return an AutoencoderKL with latents of 4 channels of half the side, whose draws have next to no deviation."""
    vae: Network = diffusers.AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2,
        block_out_channels=(4, 4), layers_per_block=1, latent_channels=4, norm_num_groups=1, sample_size=16,
        scaling_factor=1.5, shift_factor=0.1)
    vae.quant_conv.weight.data[4:] = 0
    vae.quant_conv.bias.data[4:] = -30
    return vae


def lively(module: Network) -> Network:
    """Enlarge matrices so that noise and prompt change the output; diffusers starts the last one at zero."""
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.ndim == 2:
                torch.nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5)
    return module


def language_model(tokens: PreTrainedTokenizerBase, kind: type | None = None) -> PreTrainedModel:
    """Return a two-layer decoder, the prompt encoder of most newer pipelines; kind: Qwen3Model or similar."""
    return (kind or transformers.Qwen3Model)(transformers.Qwen3Config(
        vocab_size=len(tokens), hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, max_position_embeddings=1024, pad_token_id=tokens.pad_token_id,
        bos_token_id=tokens.bos_token_id, eos_token_id=tokens.eos_token_id))


def chat_tokenizer() -> CLIPTokenizer:
    """Return a tokenizer whose chat template is only the last message, so that short sequences hold the prompt."""
    tokens = tokenizer()
    tokens.chat_template = ("{% set content = messages[-1]['content'] %}{% if content is string %}{{ content }}"
                            "{% else %}{% for part in content %}{{ part['text'] }}{% endfor %}{% endif %}")
    return tokens


def image(size: int = 16) -> Image.Image:
    """Return a colourful PIL image."""
    import numpy as np
    from PIL import Image

    return Image.fromarray(np.random.default_rng(3).integers(0, 256, (size, size, 3), dtype=np.uint8))


def flux_transformer(kind: Any = None, **options: Any) -> Network:
    """Return a double and a single block of width 16, for packed latents of 16 channels. kind: a ControlNet's class."""
    return (kind or diffusers.FluxTransformer2DModel)(**dict(
        patch_size=1, in_channels=16, num_layers=1, num_single_layers=1, attention_head_dim=16, num_attention_heads=1,
        joint_attention_dim=16, pooled_projection_dim=16, guidance_embeds=True, axes_dims_rope=(4, 6, 6)) | options)


def flux2_transformer(guidance_embeds: bool) -> Network:
    """Return a double and a single block of width 32, for packed latents of 16 channels."""
    return diffusers.Flux2Transformer2DModel(
        in_channels=16, num_layers=1, num_single_layers=1, attention_head_dim=16, num_attention_heads=2,
        joint_attention_dim=16, timestep_guidance_channels=16, axes_dims_rope=(4, 4, 4, 4),
        guidance_embeds=guidance_embeds)


def flux2_vae() -> Network:
    """Return an AutoencoderKLFlux2 that halves the side: latents of 4 channels."""
    return diffusers.AutoencoderKLFlux2(
        down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2,
        block_out_channels=(4, 4), layers_per_block=1, latent_channels=4, norm_num_groups=1, sample_size=16)


def qwen_transformer() -> Network:
    """One block of width 32, for packed latents of 16 channels."""
    return diffusers.QwenImageTransformer2DModel(
        in_channels=16, out_channels=4, num_layers=1, attention_head_dim=16, num_attention_heads=2,
        joint_attention_dim=16, axes_dims_rope=(4, 6, 6))


def qwen_vae() -> Network:
    """Return an AutoencoderKLQwenImage that halves the side: latents of 4 channels."""
    return diffusers.AutoencoderKLQwenImage(
        base_dim=4, z_dim=4, dim_mult=[1, 1], num_res_blocks=1, temperal_downsample=[False], latents_mean=[0.0] * 4,
        latents_std=[1.0] * 4)


def patch_vae() -> Network:
    """Return an AutoencoderKLWan that shrinks by 64, the 2**6 that pipelines read from the number of
    `temperal_downsample`: by 16 before its first layer, by 4 in three stages."""
    return diffusers.AutoencoderKLWan(
        base_dim=4, z_dim=4, dim_mult=[1, 1, 1], num_res_blocks=1, in_channels=768, temperal_downsample=[False] * 6,
        out_channels=768, patch_size=16, latents_mean=[0.0] * 4, latents_std=[1.0] * 4)


VISION_TOKENS = ("<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>")


def qwen_vl(tokens: PreTrainedTokenizerBase) -> PreTrainedModel:
    """Return a Qwen2.5-VL of two layers of width 16; its tokenizer has VISION_TOKENS."""
    names = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
    ids: dict[str, Any] = {name: tokens.convert_tokens_to_ids(token) for name, token in zip(names, VISION_TOKENS)}
    text = {"vocab_size": len(tokens), "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2,
            "num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 1024,
            "bos_token_id": tokens.bos_token_id, "eos_token_id": tokens.eos_token_id,
            "rope_parameters": {"mrope_section": [1, 1, 2], "rope_type": "default", "rope_theta": 1e4}}
    vision = {"depth": 2, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 16,
              "fullatt_block_indexes": [1]}
    return transformers.Qwen2_5_VLForConditionalGeneration(transformers.Qwen2_5_VLConfig(
        text_config=text, vision_config=vision, **ids))


def qwen3_vl(tokens: PreTrainedTokenizerBase, kind: str = "Qwen3VLForConditionalGeneration", layers: int = 2
             ) -> PreTrainedModel:
    """Return a Qwen3-VL of width 16; kind: its class."""
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2}
    return getattr(transformers, kind)(transformers.Qwen3VLConfig(
        text_config=sizes | {"num_hidden_layers": layers, "num_key_value_heads": 2, "head_dim": 8,
                             "vocab_size": len(tokens), "pad_token_id": tokens.pad_token_id,
                             "rope_parameters": {"mrope_section": [1, 1, 2], "rope_type": "default",
                                                 "rope_theta": 1e4, "mrope_interleaved": True}},
        vision_config={"hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "depth": 1, "out_hidden_size": 16,
                       "deepstack_visual_indexes": [0]}))


def qwen_processor(tokens: PreTrainedTokenizerBase) -> ProcessorMixin:
    """Return the processor for `qwen_vl`, for images with an area of up to 56 by 56 pixels."""
    small: dict[str, Any] = {"min_pixels": 28 * 28, "max_pixels": 56 * 56}
    return transformers.Qwen2VLProcessor(
        transformers.Qwen2VLImageProcessor(**small), tokens, transformers.Qwen2VLVideoProcessor(**small))


def with_language_model(kind: str, denoiser: Network, **options: Any) -> Pipeline:
    """Return a pipeline of a class of diffusers with a language model as its prompt encoder."""
    tokens = chat_tokenizer()
    parts = {"transformer": lively(denoiser), "scheduler": dynamic_scheduler(), "tokenizer": tokens,
             "text_encoder": language_model(tokens, options.pop("reader", None)),
             "vae": options.pop("vae", None) or autoencoder()}
    return silent(getattr(diffusers, kind)(**parts | options))


def shifted_scheduler() -> Scheduler:
    """Flow matching with a shift of 3."""
    return diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0)


def dynamic_scheduler() -> Scheduler:
    """Flow matching whose shift depends on the image's size."""
    return diffusers.FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True)


def image_encoder() -> tuple[Any, Any]:
    """Return a CLIP image encoder of images of 16 x 16 in patches of 8, and its processor."""
    encoder = transformers.CLIPVisionModelWithProjection(transformers.CLIPVisionConfig(
        hidden_size=16, intermediate_size=16, projection_dim=16, num_hidden_layers=2, num_attention_heads=2,
        image_size=16, patch_size=8))
    return encoder, transformers.CLIPImageProcessor(
        size={"shortest_edge": 16}, crop_size={"height": 16, "width": 16})


def silent(pipe: Pipeline) -> Pipeline:
    """Return the pipeline without its progress bar."""
    pipe.set_progress_bar_config(disable=True)
    return pipe


SIZE = {"height": 16, "width": 16, "num_frames": 5}
TOKENS = 16


def t5(tokens: PreTrainedTokenizerBase) -> PreTrainedModel:
    """Return a one-layer T5 encoder of width 16 for a tokenizer."""
    return video_t5(vocabulary=len(tokens))


def video_t5(kind: str = "T5", vocabulary: int = 514) -> PreTrainedModel:
    """Return a T5 or UMT5 encoder of width 16."""
    config = getattr(transformers, f"{kind}Config")
    return getattr(transformers, f"{kind}EncoderModel")(config(
        vocab_size=vocabulary, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2, dropout_rate=0.0))


def video_image(shade: int = 64) -> Image.Image:
    """Return a PIL image of 16 x 16, the input of an image-to-video call."""
    from PIL import Image

    return Image.linear_gradient("L").resize((16, 16)).point(lambda value: (value + shade) % 256).convert("RGB")


def llama_config() -> transformers.LlamaConfig:
    """Configuration of a Llama whose third last hidden states, read by HunyuanVideo, follow its first layer."""
    return transformers.LlamaConfig(
        vocab_size=514, hidden_size=16, intermediate_size=16, num_hidden_layers=3, num_attention_heads=2,
        pad_token_id=0)
