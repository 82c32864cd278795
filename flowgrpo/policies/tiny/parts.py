"""What tiny pipelines are made of: tokenizers, text encoders, autoencoders."""

from __future__ import annotations

import torch


def tokenizer(length: int = 16):
    """A CLIPTokenizer whose tokens are single characters."""
    from tokenizers import pre_tokenizers
    from transformers import CLIPTokenizer

    characters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [*characters, *(c + "</w>" for c in characters), "<|startoftext|>", "<|endoftext|>"]
    return CLIPTokenizer(vocab={token: i for i, token in enumerate(tokens)}, merges=[], model_max_length=length)


def text_encoder(kind, tokens):
    """A CLIP text model of the class `kind`, of two layers of width 16, for the tokenizer `tokens`."""
    from transformers import CLIPTextConfig

    return kind(CLIPTextConfig(
        vocab_size=len(tokens), hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2,
        projection_dim=16, max_position_embeddings=tokens.model_max_length, bos_token_id=tokens.bos_token_id,
        eos_token_id=tokens.eos_token_id, pad_token_id=tokens.pad_token_id))


def autoencoder(channels: int = 4, stages: int = 2):
    """An AutoencoderTiny that shrinks pictures by 2^(stages-1)."""
    from diffusers import AutoencoderTiny

    widths, blocks = (8,) * stages, (0,) * (stages - 1)
    vae = AutoencoderTiny(latent_channels=channels, encoder_block_out_channels=widths, num_encoder_blocks=(*blocks, 1),
                          decoder_block_out_channels=widths, num_decoder_blocks=(1, *blocks), upsample_fn="nearest")
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


def language_model(tokens, width: int = 16, kind=None):
    """A decoder of two layers, as most newer pipelines have it for their prompts; kind: Qwen3Model or its like."""
    from transformers import Qwen3Config, Qwen3Model

    return (kind or Qwen3Model)(Qwen3Config(
        vocab_size=len(tokens), hidden_size=width, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, max_position_embeddings=1024, pad_token_id=tokens.pad_token_id,
        bos_token_id=tokens.bos_token_id, eos_token_id=tokens.eos_token_id))


def chat_tokenizer():
    """A tokenizer whose chat template is the last message alone, so that short sequences hold the prompt."""
    tokens = tokenizer()
    tokens.chat_template = ("{% set content = messages[-1]['content'] %}{% if content is string %}{{ content }}"
                            "{% else %}{% for part in content %}{{ part['text'] }}{% endfor %}{% endif %}")
    return tokens
