"""Runs on recorded pairs: the pairs of a file take the place of drawn pictures, as the groups that are trained on."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from flowgrpo import data
from flowgrpo.config import Config
from flowgrpo.errors import UserError
from flowgrpo.parts.shaping import BradleyTerry
from flowgrpo.preference_pairs import OVERALL, Pair, load_pairs

Prompts = list[data.Prompt]


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
    return [_prompt(known.get(pair.prompt, data.Prompt(pair.prompt)), pair) for pair in pairs], held


def _turned(pair: Pair) -> Pair:
    """A pair of which the rejected picture is preferred, the other way round."""
    return Pair(pair.prompt, pair.rejected, pair.chosen, {OVERALL: 1.0})


def _prompt(prompt: data.Prompt, pair: Pair) -> data.Prompt:
    told = {"chosen": str(pair.chosen), "rejected": str(pair.rejected), "preferred": pair.verdicts[OVERALL]}
    return replace(prompt, metadata=prompt.metadata | told)


def require(config: Config, method: Any) -> None:
    """UserError where the method and the configuration do not go with recorded pairs, or not without them."""
    if config.preferences is None:
        if config.labels != "file":
            raise UserError(f"labels is {config.labels!r}, but no pairs are there: set preferences to a file of pairs")
        if getattr(method.surrogate, "similarity", 0):
            raise UserError(f"method {config.method} pulls to the first picture of recorded pairs, and none are there: "
                            "set preferences to a file of pairs, or parts.surrogate.similarity: 0")
        return
    if method.for_tokens or method.backprop is not None or method.edit is not None or method.records_steps:
        raise UserError(f"preferences is set, so that no picture is drawn, but method {config.method} trains steps of "
                        "drawing one, or edits of drawn ones: use a method of noised finals, such as diffusion_dpo")
    if config.labels == "file" and isinstance(method.shaping, BradleyTerry):
        raise UserError(f"labels is 'file', but method {config.method} draws labels from rewards, and would turn some "
                        "of the file's round: set labels: rewards, or parts.shaping: {type: AsIs}")
    if config.labels == "rewards" and getattr(method.surrogate, "similarity", 0) \
            and not isinstance(method.shaping, BradleyTerry):
        raise UserError(f"method {config.method} with parts.surrogate.similarity pulls to what the file calls chosen, "
                        "but labels is 'rewards', which may prefer the other picture: set labels: file, or similarity: "
                        "0")
    if method.preview:
        raise UserError(f"preferences is set, so that no picture is drawn, but method {config.method} chooses among "
                        "previews of drawn ones: leave sol_rl out")
    if config.train.group != 2:
        raise UserError(f"train.group is {config.train.group}, but preferences brings pairs: set train.group: 2")
