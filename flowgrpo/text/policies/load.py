"""Load a language model and its tokenizer, and read what its files say of generation."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

from flowgrpo.config.sections import Load
from flowgrpo.device import DTYPES
from flowgrpo.errors import UserError
from flowgrpo.log import quiet
from flowgrpo.policies import hub
from flowgrpo.starter import FOLDERS


def load_causal_lm(model: str, precision: str = "fp32", trust_remote_code: bool = False,
                   classes: Sequence[str] = ("AutoModelForCausalLM", "AutoTokenizer"), files: Load = Load()
                   ) -> tuple[Any, Any]:
    """Load (model, tokenizer): a starter's name, a directory or a hub id.

    classes: of transformers. files: variant and revision.
    Raises UserError if it does not load.
    """
    import transformers
    from transformers.utils import logging

    logging.disable_progress_bar()
    source = FOLDERS.get(model, model)
    try:
        with quiet():
            body, reader = (getattr(transformers, name) for name in classes)
            common: dict[str, Any] = {"trust_remote_code": trust_remote_code, **at_revision(files)}
            return (body.from_pretrained(source, dtype=DTYPES[precision], variant=files.variant, **common),
                    reader.from_pretrained(source, **common))
    except Exception as error:  # third-party model files can raise anything
        expected = "starter_text, a directory with a config.json and a tokenizer, or a hub id"
        raise hub.load_error(error, model, "language model", expected) from error


def at_revision(files: Load) -> dict[str, str]:
    """Return the argument of transformers' `from_pretrained` for a revision; without one its own default applies."""
    return {} if files.revision is None else {"revision": files.revision}


def special_tokens(model: Any, tokenizer: Any) -> tuple[list[int], int]:
    """Return the tokens that end a completion, and the padding token. Raises UserError if none ends one."""
    config = getattr(model, "generation_config", None)  # a model without `generate` has none
    ends = config.eos_token_id if config else None
    ends = tokenizer.eos_token_id if ends is None else ends
    if ends is None:
        raise UserError("neither the model nor its tokenizer says which token ends a completion: set the tokenizer's "
                        "eos_token")
    ends = list(ends) if isinstance(ends, (list, tuple)) else [ends]
    return ends, ends[0] if tokenizer.pad_token_id is None else tokenizer.pad_token_id


def plain_generation(model: Any, ends: list[int], padding: int) -> None:
    """Drop a model's own temperature, cuts and penalties, which a replay would not apply."""
    from transformers import GenerationConfig

    if getattr(model, "generation_config", None) is None:
        return
    model.generation_config = GenerationConfig(eos_token_id=ends, pad_token_id=padding,
                                               bos_token_id=model.generation_config.bos_token_id)


def cache_name(decoder: Any) -> str:
    """Return the name of the cache in a decoder's arguments and outputs: transformers renames it to `cache`, and drops
    `past_key_values` in 5.40."""
    return "cache" if "cache" in inspect.signature(type(decoder).forward).parameters else "past_key_values"
