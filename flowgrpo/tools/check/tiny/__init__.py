"""Tiny random models for `flowgrpo check` and tests: real classes with a few thousand weights, built in code. Nothing
is loaded.

Pipelines are of diffusers: a factory takes a seed and returns (pipeline, arguments of its call besides prompts), see
the modules. Language models are of transformers' families, by the name of a class or a family.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from flowgrpo.errors import UserError, nearest

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

Factory = Callable[[int], tuple[Any, dict[str, Any]]]

LARGEST = 20_000_000  # maximum parameters of a tiny model
# Names shared by most families; a family's config translates its own names and ignores the rest.
SIZES = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
             head_dim=8, max_position_embeddings=256)
ENDINGS = ("ForCausalLM", "ForMaskedLM")


def factories() -> dict[str, Factory]:
    from flowgrpo.tools.check.tiny import derived

    return derived.OWN | derived.FACTORIES


def make(name: str, seed: int = 0) -> tuple[Any, dict[str, Any]]:
    """Build a tiny random instance of the pipeline class `name`.
    Raises UserError for a class without a factory."""
    known = factories()
    if name not in known:
        raise UserError(f"no tiny {name!r} can be built{nearest(name, sorted(known))}")
    return known[name](seed)


def is_language_model(name: str) -> bool:
    """Return True for a transformers class, such as Qwen3ForCausalLM, or a family, such as qwen3."""
    return name.replace("-", "_").isidentifier() and _class(name) is not None


def make_language_model(name: str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Return (model, tokenizer) with random weights; the tokenizer is the text starter's.
    Raises UserError for a family whose small sizes cannot be guessed."""
    import torch

    from flowgrpo.starter.arithmetic import build_tokenizer

    cls: Any = _class(name)
    tokenizer = build_tokenizer()
    if cls.__name__.endswith("ForMaskedLM"):
        tokenizer.add_special_tokens({"mask_token": "<mask>"})
    ids = {f"{kind}_token_id": getattr(tokenizer, f"{kind}_token_id") for kind in ("pad", "bos", "eos")}
    try:
        config = cls.config_class(**SIZES, vocab_size=len(tokenizer), **ids)
        with torch.device("meta"):
            size = sum(parameter.numel() for parameter in cls(config).parameters())
        if size > LARGEST:
            raise ValueError(f"it would have {size:,} parameters")
        torch.manual_seed(0)
        return cls(config), tokenizer
    except Exception as error:  # a family can raise anything on sizes that are not its own
        message = " ".join(str(error).split())[:200]
        raise UserError(f"no tiny instance of {cls.__name__} ({message}): give a directory or a hub id") from None


def _class(name: str) -> type | None:
    import transformers
    from transformers.models.auto import modeling_auto

    if name.endswith(ENDINGS):
        return getattr(transformers, name, None)
    for names in (modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES):
        if isinstance(names.get(name), str):
            return getattr(transformers, names[name], None)
    return None
