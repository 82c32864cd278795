"""Verified explanations: the policy writes an answer while it reads a right and a wrong one of its own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from flowgrpo.data.prompts import Prompt
from flowgrpo.errors import UserError
from flowgrpo.methods.data_sources import Explained
from flowgrpo.samplers.rollout import seeder
from flowgrpo.training.run import Run

TURN = 7_000  # separates the draws of explanations from those of an epoch's samples


def explained(run: Run, source: Explained, prompt: Prompt, place: int, right: Sequence[Tensor],
              wrong: Sequence[Tensor]) -> list[Tensor]:
    """Return the first explanation of a prompt whose total reward reaches `source.right`, as tokens [n], in a list;
    none if none does, if a side has no sample, or if the richer prompt does not fit the model's context.

    place: of the prompt in its epoch. right, wrong: tokens of its samples.
    """
    policy: Any = run.policy
    losers = Counter(_text(policy, ids) for ids in wrong)
    if not right or not losers:
        return []
    shown = source.template.format(prompt=prompt.text, right=_text(policy, right[0]),
                                   wrong=losers.most_common(1)[0][0])
    try:
        policy.require_context([shown])
    except UserError:
        return []
    seed = seeder(run.config.seed, run.epoch, TURN + place * source.tries)
    encoded = policy.encode([shown] * source.tries, images=[prompt.brings] * source.tries)
    sampled = policy.sample(encoded, run.method.generation.decoding,
                            policy.generators(seed(0, number) for number in range(source.tries)),
                            torch.zeros(source.tries, dtype=torch.bool))
    totals = run.scoring.total([prompt], sampled.texts, source.tries)[0]
    fits = [number for number, total in enumerate(totals.tolist())
            if total >= source.right and sampled.mask[number].any()]
    return [sampled.ids[number][sampled.mask[number]].cpu() for number in fits[:1]]


def _text(policy: Any, ids: Tensor) -> str:
    return str(policy.tokenizer.decode(ids, skip_special_tokens=True))
