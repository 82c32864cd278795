"""Runs on recorded pairs: the pairs of a file take the place of drawn pictures, as the groups that are trained on."""

from __future__ import annotations

from dataclasses import replace

from flowgrpo.config.schema import Config
from flowgrpo.data.pairs import OVERALL, Pair, load_pairs
from flowgrpo.data.prompts import Prompt
from flowgrpo.errors import UserError

Prompts = list[Prompt]


def in_place(config: Config, split: tuple[Prompts, Prompts]) -> tuple[Prompts, Prompts]:
    """The (training, held-out) prompts, with `preferences` those of its pairs in place of the training ones.

    A prompt stands for one pair: its metadata say which files are `chosen` and `rejected`, and in `preferred` the
    verdict, 1 for the chosen one; beside them is what the file of prompts says of the same text. Where the file labels,
    the picture that it prefers is the chosen one, whatever the line calls it, and its ties teach nothing and are left
    out. No held-out prompt is trained on. UserError where no pair is left.
    """
    if config.preferences is None:
        return split
    train, held = split
    known, unseen = {prompt.text: prompt for prompt in train}, {prompt.text for prompt in held}
    pairs = [pair for pair in load_pairs(config.preferences)
             if pair.prompt not in unseen and (config.labels == "rewards" or pair.verdicts[OVERALL] != 0.5)]
    if not pairs:
        raise UserError(f"preferences {config.preferences}: every pair is a tie or one of a held-out prompt, which "
                        "leaves none to train on")
    if config.labels == "file":
        pairs = [pair if pair.verdicts[OVERALL] else _turned(pair) for pair in pairs]
    return [_prompt(known.get(pair.prompt, Prompt(pair.prompt)), pair) for pair in pairs], held


def _turned(pair: Pair) -> Pair:
    """A pair of which the rejected picture is preferred, the other way round."""
    return Pair(pair.prompt, pair.rejected, pair.chosen, {OVERALL: 1.0})


def _prompt(prompt: Prompt, pair: Pair) -> Prompt:
    told = {"chosen": str(pair.chosen), "rejected": str(pair.rejected), "preferred": pair.verdicts[OVERALL]}
    return replace(prompt, metadata=prompt.metadata | told)
