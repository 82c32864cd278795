"""Lengths of encoded prompts: padded as a pipeline does it, with zeros on the right and a mask; and the prompts that
its text encoders do not read to the end.
"""

import inspect
import json
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

import torch
from torch.nn.functional import pad

Calls: TypeAlias = tuple[tuple[Any, ...], ...]  # values of each call of `encode_prompt`
# Of each value the dtype of the mask that it is where prompts are padded; None: it is no mask, or always there.
Masks: TypeAlias = tuple[tuple[torch.dtype | None, ...], ...]

TEXTS = "a", "a red fox on a green hill, under a sky of many colours"  # of which `learn` learns
CLOSE = 0.05  # largest relative difference of values encoded together and one by one, in half precision
LENGTH = "max_sequence_length"  # of a pipeline's call: the limit of its encoders other than CLIP
UNLIMITED = 10**6  # a tokenizer without a limit states a very large one


def learn(encode: Callable[[list[str]], Calls]) -> Masks | None:
    """Return the masks that pad prompts as the pipeline pads them; None if it does not pad with zeros on the right.
    encode: the values for some prompts, each of which is its own negative prompt too."""
    prompts, together = [encode([text]) for text in TEXTS], encode([*TEXTS])
    if any([*map(len, calls)] != [*map(len, together)] for calls in prompts):
        return None
    masks = tuple(tuple(value.dtype if torch.is_tensor(value) and any(calls[c][v] is None for calls in prompts)
                        else None for v, value in enumerate(call)) for c, call in enumerate(together))
    try:
        rows = pad_calls(prompts, masks)
        same = all(_close([calls[c][v] for calls in rows], value)
                   for c, call in enumerate(together) for v, value in enumerate(call))
    except (IndexError, RuntimeError, StopIteration, TypeError):  # values that cannot be padded or joined
        return None
    return masks if same and all(map(_has_mixed_lengths, zip(*prompts, strict=True))) else None


def pad_calls(prompts: Sequence[Calls], masks: Masks) -> list[Calls]:
    """Return the values of prompts, [1, L, ...] each, with zeros up to the longest of each call that mixes lengths, and
    masks where it has none."""
    calls = []
    for c, rows in enumerate(zip(*prompts, strict=True)):
        if _has_mixed_lengths(rows):
            rows = tuple(tuple(_mask(row[:v]).to(kind) if value is None and kind is not None else value
                               for v, (value, kind) in enumerate(zip(row, masks[c], strict=True))) for row in rows)
            sizes = [max(map(_length, values)) for values in zip(*rows)]  # 0 without an L
            rows = tuple(tuple(pad(value, [0, 0] * (value.ndim - 2) + [0, size - value.shape[1]])
                               if 0 < _length(value) < size else value for value, size in zip(row, sizes))
                         for row in rows)
        calls.append(rows)
    return [*zip(*calls)]


def to_json(masks: Masks | None) -> str:
    return json.dumps(masks and [[kind and str(kind).removeprefix("torch.") for kind in kinds] for kinds in masks])


def read(text: str) -> Masks | None:
    """Return what was learned, from its JSON."""
    masks = json.loads(text)
    return masks and tuple(tuple(kind and getattr(torch, kind) for kind in kinds) for kinds in masks)


def _has_mixed_lengths(rows: Sequence[tuple[Any, ...]]) -> bool:
    return len({tuple(value.shape if torch.is_tensor(value) else None for value in row) for row in rows}) > 1


def _length(value: Any) -> int:
    return value.shape[1] if torch.is_tensor(value) and value.ndim > 1 else 0


def _mask(before: tuple[Any, ...]) -> torch.Tensor:
    """Return a mask [1, L] of ones for the last of the values before it that has tokens, [1, L, E]."""
    tokens = next(value for value in reversed(before) if torch.is_tensor(value) and value.ndim > 2)
    return torch.ones(tokens.shape[:2], device=tokens.device)


def _close(rows: list[Any], theirs: Any) -> bool:
    """Return True if the values of rows are those of a call with all of them, up to rounding."""
    if not torch.is_tensor(theirs):
        return theirs is None and all(value is None for value in rows)
    ours = torch.cat(rows)
    if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
        return False
    if not ours.is_floating_point() or ours.ndim < 3:
        return torch.equal(ours, theirs)
    empty = (ours == 0).all(-1)
    return not theirs[empty].any() and bool((ours - theirs).float().norm() <= CLOSE * theirs.float().norm())


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
