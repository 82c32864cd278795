"""Parts of tiny pipelines: tokenizers, text encoders, denoisers, autoencoders, schedulers; and pipelines of them."""

import inspect
from collections.abc import Callable
from typing import Any, TypeAlias

import diffusers
import numpy as np
import torch
import transformers
from PIL import Image
from tokenizers import pre_tokenizers
from transformers import CLIPTokenizer, PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin

from flowgrpo.tools.dry_run.from_configs import TEMPLATE, VISION_TOKENS

# Objects of diffusers, which type checkers see as placeholders.
Pipeline: TypeAlias = Any
Network: TypeAlias = Any
Scheduler: TypeAlias = Any

Parts = dict[str, Any]
Made = tuple[Pipeline, dict[str, Any]]  # a pipeline, and the arguments of its call besides prompts
Factories = dict[str, Callable[..., Made]]  # by pipeline class, of a seed
SIZE = {"height": 16, "width": 16}
VIDEO = SIZE | {"num_frames": 5}
TOKENS = 16
HEADS, WIDTH = 2, 16  # heads of an attention; channels of a head and of an embedding
ROPE = (4, 6, 6)  # channels of a head by axis
# Values by the names of configurations; a class takes those of its own arguments.
SIZES: dict[str, Any] = {
    **dict.fromkeys(("num_layers", "num_single_layers", "n_layers", "n_refiner_layers", "num_refiner_layers",
                     "mmdit_layers", "num_text_blocks", "num_visual_blocks", "depth", "layers_per_block",
                     "num_hidden_layers", "perceiver_num_layers", "num_mmdit_layers", "num_single_dit_layers",
                     "num_layerwise_text_blocks", "num_refiner_text_blocks", "audio_layers"), 1),
    **dict.fromkeys(("num_attention_heads", "num_heads", "n_heads", "n_kv_heads", "num_kv_heads", "num_key_value_heads",
                     "num_cross_attention_heads", "mlp_ratio", "text_num_attention_heads"), HEADS),
    **dict.fromkeys(("attention_head_dim", "text_dim", "freq_dim", "ffn_dim", "text_embed_dim", "caption_channels",
                     "joint_attention_dim", "pooled_projection_dim", "time_embed_dim", "in_text_dim", "in_text_dim2",
                     "time_dim", "ff_dim", "cap_feat_dim", "context_in_dim", "text_encoder_dim", "head_dim",
                     "cross_attention_head_dim", "condition_dim", "adaln_lora_dim", "intermediate_size", "adaln_dim",
                     "text_hidden_dim", "text_intermediate_size", "text_embed_2_dim", "ffn_hidden_size", "text_in_dim",
                     "timestep_guidance_channels", "cross_attention_dim_t5", "caption_projection_dim"), WIDTH),
    **dict.fromkeys(("dim", "hidden_size", "model_dim", "cross_attention_dim", "dim_model"), HEADS * WIDTH),
    **dict.fromkeys(("axes_dims_rope", "rope_axes_dim", "axes_dims", "axes_dim", "rope_dim_list", "rope_dim"), ROPE),
    **dict.fromkeys(("in_channels", "out_channels", "in_visual_dim", "out_visual_dim", "latent_channels"), 4),
    "axes_lens": (256, 32, 32), "rope_max_seq_len": 32, "sample_size": 8, "sample_width": 2, "sample_height": 2,
}


def assemble(name: str, parts: Callable[..., Parts], call: dict[str, Any],
             own: dict[str, Callable[[], Any]] | None = None, *, seed: int = 0) -> Made:
    """Build the pipeline class `name`, which a variant may follow, and the arguments of its call.

    parts: returns its parts, and values of attributes. own: builders of parts that `parts` is given.
    """
    torch.manual_seed(seed)
    given = {key: build() for key, build in (own or {}).items()}
    torch.manual_seed(seed)
    made = parts(**given)
    cls: Any = getattr(diffusers, name.partition(" ")[0])
    pipe = construct(cls, made)
    for key in made.keys() - inspect.signature(cls).parameters.keys():
        setattr(pipe, key, made[key])
    return pipe, dict(call)


def construct(cls: Any, parts: Parts) -> Pipeline:
    """Build a pipeline of those of the parts that its class takes, without its progress bar."""
    taken = inspect.signature(cls).parameters
    pipe = cls(**{key: part for key, part in parts.items() if key in taken})
    pipe.set_progress_bar_config(disable=True)
    return pipe


def factories(rows: dict[str, tuple[Any, ...]]) -> Factories:
    """Factories by pipeline class, of rows with the arguments of `assemble` behind the name."""
    return {name: lambda seed=0, name=name, row=row: assemble(name, *row, seed=seed) for name, row in rows.items()}


# --- text encoders ---------------------------------------------------------------------------------------------------

# Of configurations of transformers.
READER: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
MROPE: dict[str, Any] = {"mrope_section": [1, 1, 2], "rope_type": "default", "rope_theta": 1e4}


def of_tokens(tokens: PreTrainedTokenizerBase) -> dict[str, Any]:
    return {"vocab_size": len(tokens), "pad_token_id": tokens.pad_token_id, "bos_token_id": tokens.bos_token_id,
            "eos_token_id": tokens.eos_token_id}


def tokenizer(length: int = TOKENS) -> CLIPTokenizer:
    """Return a CLIPTokenizer whose 514 tokens are single characters."""
    characters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [*characters, *(c + "</w>" for c in characters), "<|startoftext|>", "<|endoftext|>"]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    return transformers.CLIPTokenizer(vocab=vocabulary, merges=[], model_max_length=length)


def chat_tokenizer(vision: bool = False) -> CLIPTokenizer:
    """Return a tokenizer whose chat template is only the last message, so that short sequences hold the prompt.
    vision: with VISION_TOKENS."""
    tokens = tokenizer()
    tokens.chat_template = TEMPLATE
    if vision:
        tokens.add_special_tokens({"additional_special_tokens": list(VISION_TOKENS.values())})
    return tokens


def clip(place: str = "", length: int = TOKENS, projected: bool = False) -> Parts:
    """A CLIP text model of two layers of width 16, with its tokenizer, at a place such as "_2"; projected: with pooled
    embeddings."""
    kind: Any = transformers.CLIPTextModelWithProjection if projected else transformers.CLIPTextModel
    tokens = tokenizer(length)
    return {f"tokenizer{place}": tokens, f"text_encoder{place}": kind(transformers.CLIPTextConfig(
        **READER, **of_tokens(tokens), projection_dim=16, max_position_embeddings=length))}


def t5(place: str = "", length: int = TOKENS, kind: str = "T5", vocabulary: int = 514) -> Parts:
    """A one-layer T5 or UMT5 encoder of width 16, with its tokenizer, at a place such as "_2"."""
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=vocabulary, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2, dropout_rate=0.0)
    return {f"tokenizer{place}": tokenizer(length),
            f"text_encoder{place}": getattr(transformers, f"{kind}EncoderModel")(config)}


def prompt_reader(kind: type | None = None) -> Parts:
    """A two-layer decoder, the prompt encoder of most newer pipelines, with its tokenizer; kind: Qwen3Model or similar.
    """
    tokens = chat_tokenizer()
    return {"tokenizer": tokens, "text_encoder": (kind or transformers.Qwen3Model)(transformers.Qwen3Config(
        **READER, **of_tokens(tokens), num_key_value_heads=1, head_dim=8, max_position_embeddings=1024))}


def llama() -> PreTrainedModel:
    """A Llama whose third last hidden states, read by HunyuanVideo, follow its first layer."""
    return transformers.LlamaModel(llama_config())


def llama_config() -> transformers.LlamaConfig:
    return transformers.LlamaConfig(**READER | {"num_hidden_layers": 3}, vocab_size=514, pad_token_id=0)


SMALL: dict[str, Any] = {"min_pixels": 28 * 28, "max_pixels": 56 * 56}  # pixels of an image, as processors scale it


def qwen_vl(tokens: PreTrainedTokenizerBase) -> PreTrainedModel:
    """Return a Qwen2.5-VL of two layers of width 16; its tokenizer has VISION_TOKENS."""
    ids: dict[str, Any] = {f"{name}_token_id": tokens.convert_tokens_to_ids(token)
                           for name, token in VISION_TOKENS.items()}
    text = READER | {
        "vocab_size": len(tokens), "num_key_value_heads": 2, "max_position_embeddings": 1024,
        "bos_token_id": tokens.bos_token_id, "eos_token_id": tokens.eos_token_id, "rope_parameters": dict(MROPE)}
    vision = {"depth": 2, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 16,
              "fullatt_block_indexes": [1]}
    return transformers.Qwen2_5_VLForConditionalGeneration(transformers.Qwen2_5_VLConfig(
        text_config=text, vision_config=vision, **ids))


def qwen_processor(tokens: PreTrainedTokenizerBase) -> ProcessorMixin:
    return transformers.Qwen2VLProcessor(
        transformers.Qwen2VLImageProcessor(**SMALL), tokens, transformers.Qwen2VLVideoProcessor(**SMALL))


def qwen3_vl(tokens: PreTrainedTokenizerBase, kind: str = "Qwen3VLForConditionalGeneration", layers: int = 2
             ) -> PreTrainedModel:
    """Return a Qwen3-VL of width 16; kind: its class."""
    return getattr(transformers, kind)(transformers.Qwen3VLConfig(
        text_config=READER | {"num_hidden_layers": layers, "num_key_value_heads": 2, "head_dim": 8,
                              "vocab_size": len(tokens), "pad_token_id": tokens.pad_token_id,
                              "rope_parameters": MROPE | {"mrope_interleaved": True}},
        vision_config={"hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "depth": 1, "out_hidden_size": 16,
                       "deepstack_visual_indexes": [0]}))


def vision_processor() -> Any:
    tokens = chat_tokenizer(vision=True)
    return transformers.Qwen3VLProcessor(
        transformers.Qwen2VLImageProcessor(**SMALL), tokens, transformers.Qwen3VLVideoProcessor(),
        chat_template=tokens.chat_template)


# --- denoisers -------------------------------------------------------------------------------------------------------


def network(kind: str, **options: Any) -> Network:
    """Build a network of a class of diffusers: its published configuration, which is its defaults in most models, with
    the widths and depths of SIZES. options: over both."""
    cls: Any = getattr(diffusers, kind)
    known = inspect.signature(cls.__init__).parameters
    return cls(**{name: value for name, value in SIZES.items() if name in known
                  and known[name].default is not None} | options)


def lively(module: Network) -> Network:
    """Enlarge matrices so that noise and prompt change the output; diffusers starts the last one at zero."""
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.ndim == 2:
                torch.nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5)
    return module


def awake(control: Network) -> Network:
    """Fill the matrices of a ControlNet that start at zero, so that the control image has an effect."""
    for parameter in control.parameters():
        if parameter.ndim > 1 and not parameter.any():
            parameter.data.normal_(std=0.3)
    return control


def flux_transformer(kind: str = "FluxTransformer2DModel", **options: Any) -> Network:
    """Return a double and a single block of width 16, for packed latents of 16 channels. kind: a ControlNet's class."""
    return network(kind, **{"in_channels": 16, "num_attention_heads": 1, "guidance_embeds": True} | options)


def with_language_model(denoiser: Network, vae: Network = None, reader: type | None = None, **parts: Any) -> Parts:
    """Parts of a pipeline with a language model as its prompt encoder. reader: its class."""
    return {"transformer": lively(denoiser), "scheduler": dynamic_scheduler(), **prompt_reader(reader),
            "vae": vae or autoencoder(), **parts}


def with_t5(denoiser: Network, vae: Network = None, **parts: Any) -> Parts:
    return {"transformer": lively(denoiser), "scheduler": shifted_scheduler(), "vae": vae or autoencoder(), **t5(),
            **parts}


# --- autoencoders, schedulers, images --------------------------------------------------------------------------------


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


# Half the side: latents of 4 channels.
HALF_SIDE: dict[str, Any] = {
    "down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2,
    "block_out_channels": (4, 4), "layers_per_block": 1, "latent_channels": 4, "norm_num_groups": 1, "sample_size": 16}


def still_autoencoder() -> Network:
    """Return an AutoencoderKL that halves the side, whose draws have next to no deviation."""
    vae: Network = diffusers.AutoencoderKL(**HALF_SIDE, scaling_factor=1.5, shift_factor=0.1)
    vae.quant_conv.weight.data[4:] = 0
    vae.quant_conv.bias.data[4:] = -30
    return vae


def flux2_vae() -> Network:
    return diffusers.AutoencoderKLFlux2(**HALF_SIDE)


def qwen_vae() -> Network:
    """Return an AutoencoderKLQwenImage that halves the side: latents of 4 channels."""
    return diffusers.AutoencoderKLQwenImage(
        base_dim=4, z_dim=4, dim_mult=[1, 1], num_res_blocks=1, temperal_downsample=[False], latents_mean=[0.0] * 4,
        latents_std=[1.0] * 4)


def shifted_scheduler() -> Scheduler:
    """Flow matching with a shift of 3."""
    return diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0)


def dynamic_scheduler() -> Scheduler:
    """Flow matching whose shift depends on the image's size."""
    return diffusers.FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True)


def image_processor() -> Any:
    return transformers.CLIPImageProcessor(size={"shortest_edge": 16}, crop_size=SIZE)


def vision_config() -> transformers.CLIPVisionConfig:
    return transformers.CLIPVisionConfig(**READER, projection_dim=16, image_size=16, patch_size=8)


def image_encoder() -> PreTrainedModel:
    """Return a CLIP image encoder of images of 16 x 16 in patches of 8."""
    return transformers.CLIPVisionModelWithProjection(vision_config())


def image(size: int = 16) -> Image.Image:
    return Image.fromarray(np.random.default_rng(3).integers(0, 256, (size, size, 3), dtype=np.uint8))


def video_image(shade: int = 64) -> Image.Image:
    return Image.linear_gradient("L").resize((16, 16)).point(lambda value: (value + shade) % 256).convert("RGB")


def video(frames: int) -> list[Image.Image]:
    return [video_image(16 * i) for i in range(frames)]
