"""Runs on recorded pairs: the trained groups are the pairs of a file in place of sampled images or texts."""

from __future__ import annotations

from dataclasses import replace

from flowgrpo.config.schema import Config
from flowgrpo.data.pairs import OVERALL, Pair, decided, load_pairs
from flowgrpo.data.prompts import Prompt
from flowgrpo.errors import UserError

Prompts = list[Prompt]


def in_place(config: Config, split: tuple[Prompts, Prompts], text: bool = False) -> tuple[Prompts, Prompts]:
    """Return the (training, held-out) prompts; with `preferences`, its pairs replace the training ones.

    text: the pairs are of texts. A prompt stands for one pair. Its metadata has the files, or the texts, `chosen` and
    `rejected`, the verdict `preferred`, 1 for the chosen one, and the metadata that the prompt file has for the same
    text. With labels from the file, `chosen` is the preferred side, even if the line calls it otherwise; ties are left
    out. No held-out prompt is trained on.
    Raises UserError if no pair is left.
    """
    if config.preferences is None:
        return split
    train, held = split
    known, unseen = {prompt.text: prompt for prompt in train}, {prompt.text for prompt in held}
    pairs = load_pairs(config.preferences, text)
    pairs = [pair for pair in (pairs if config.labels == "rewards" else decided(pairs)) if pair.prompt not in unseen]
    if not pairs:
        raise UserError(f"preferences {config.preferences}: every pair is a tie or one of a held-out prompt, which "
                        "leaves none to train on")
    return [_prompt(known.get(pair.prompt, Prompt(pair.prompt)), pair) for pair in pairs], held


def _prompt(prompt: Prompt, pair: Pair) -> Prompt:
    metadata = {"chosen": str(pair.chosen), "rejected": str(pair.rejected), "preferred": pair.verdicts[OVERALL]}
    return replace(prompt, metadata=prompt.metadata | metadata)
