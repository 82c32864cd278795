"""Prompts that are encoded anew whenever they are read: text encoders in the graph (TexForce, 2311.15657)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from flowgrpo.errors import UserError
from flowgrpo.policies.conditioning import Conditioning, join


def encoded_anew(policy: Any, conditioning: Conditioning) -> Conditioning:
    """The same rows, as the present text encoders encode them, with gradients where they are enabled.

    Every prompt is encoded once, however many rows it has, and by itself where the results fit together: rollout and
    replay so compute the same numbers, whatever their batches. UserError where no gradient gets through.
    """
    rows = list(zip(conditioning.prompts, conditioning.negatives,
                    zip(*([id(each) for each in values] for values in conditioning.inputs.values()))
                    if conditioning.inputs else [()] * len(conditioning.prompts), strict=True))
    first = {row: rows.index(row) for row in rows}
    asked = replace(conditioning, calls=(), per_prompt=())
    each = [policy.encoded(asked.rows(torch.tensor([at]))) for at in first.values()]
    fits = len({tuple(map(_shapes, one.calls)) for one in each}) == 1
    found = join(each) if fits else policy.encoded(asked.rows(torch.tensor(list(first.values()))))
    if torch.is_grad_enabled() and not any(_in_graph(value) for call in found.calls for value in call):
        raise UserError(f"encode_prompt of {type(policy.pipe).__name__} gives no gradient of its text encoders: train "
                        "the denoiser alone, parts: {adapted: {encoders: false, denoisers: true}}")
    places = {row: place for place, row in enumerate(first)}
    return found.rows(torch.tensor([places[row] for row in rows]))


def _shapes(call: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(tuple(value.shape) if torch.is_tensor(value) else None for value in call)


def _in_graph(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return any(map(_in_graph, value))
    return torch.is_tensor(value) and value.requires_grad
