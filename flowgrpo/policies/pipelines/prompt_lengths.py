"""Prompts that a pipeline's text encoders do not read to the end."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any

LENGTH = "max_sequence_length"  # of a pipeline's call: the limit of its encoders other than CLIP
UNLIMITED = 10**6  # a tokenizer without a limit states a very large one


def limits(pipe: Any, call: dict[str, Any]) -> dict[str, tuple[Any, int]]:
    """Return the tokenizer and the tokens that are read of a prompt, by component name. call: arguments of calls."""
    parameter = inspect.signature(pipe.__call__).parameters.get(LENGTH)
    asked = call.get(LENGTH, parameter.default if parameter is not None else None)
    limited = {}
    for name, part in pipe.components.items():
        if not name.startswith("tokenizer") or not hasattr(part, "model_max_length"):
            continue
        most = part.model_max_length
        if isinstance(asked, int) and "CLIP" not in type(part).__name__:
            most = asked
        if most < UNLIMITED:
            limited[name] = part, most
    return limited


def cut(pipe: Any, call: dict[str, Any], prompts: Iterable[str]) -> str | None:
    """Return a line on the prompts that are longer than an encoder reads; None if there are none."""
    texts, longer = list(dict.fromkeys(prompts)), {}
    for name, (tokenizer, most) in limits(pipe, call).items():
        # No tokenizer here makes more tokens than bytes, beside its few special ones.
        candidates = [text for text in texts if len(text.encode()) + tokenizer.num_special_tokens_to_add() > most]
        if count := sum(len(tokenizer(text, verbose=False).input_ids) > most for text in candidates):
            longer[f"{count} by the {name} ({most} tokens)"] = count
    if not longer:
        return None
    largest = max(longer.values())
    verb = "is" if largest == 1 else "are"
    return f"{largest} of {len(texts)} prompts {verb} longer than an encoder reads: cut are {', '.join(longer)}"
