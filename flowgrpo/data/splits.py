"""Splits of prompts: training and held-out parts, the prompts of an epoch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from flowgrpo.config.schema import Config
from flowgrpo.data import sets
from flowgrpo.data.prompts import Prompt
from flowgrpo.errors import UserError

LEAST = 1e-9  # share of the largest factor that replaces a factor of 0
SPLIT_SEED = 0  # not the run's seed: runs with other seeds share the held-out prompts


def split(prompts: list[Prompt], held_out: float | str, seed: int) -> tuple[list[Prompt], list[Prompt]]:
    """Split prompts into (train, held out); no text is ever on both sides, or none with the same image.

    A share holds out that part of the different texts (rounded, at least one), chosen by a permutation that depends on
    the texts and the seed alone. A path is read as the held-out prompts, and their texts leave the training side. A
    text with another image is another text.
    Raises UserError if a side is left empty.
    """
    if isinstance(held_out, str):
        held = sets.load(held_out)
        keys = {prompt.key for prompt in held}
    else:
        keys = _share(sorted({prompt.key for prompt in prompts}), held_out, seed)
        held = [prompt for prompt in prompts if prompt.key in keys]
    train = [prompt for prompt in prompts if prompt.key not in keys]
    if not train:
        raise UserError(f"held_out: {held_out!r} holds out every prompt and leaves none to train on")
    return train, held


def _share(texts: list[str], share: float, seed: int) -> set[str]:
    if not 0 < share < 1:
        raise UserError(f"held_out: got {share!r}, expected a share between 0 and 1, or a prompt file")
    if len(texts) < 2:
        raise UserError(f"held_out: {len(texts)} different prompts cannot be parted into training and held-out ones: "
                        f"give more prompts, or a file of held-out prompts")
    count = max(1, round(share * len(texts)))
    return {texts[i] for i in np.random.default_rng(seed).permutation(len(texts))[:count]}


def draw(prompts: list[Prompt], count: int, epoch: int, seed: int,
         factors: Sequence[float] | None = None) -> list[Prompt]:
    """Return the prompts of one epoch: a pure function of its arguments, the same on every process and after a resume.

    No prompt is repeated in an epoch unless `count` exceeds their number n. Then each occurs count // n times, and only
    the rest is drawn. With equal weights, epochs walk through the data: every n draws in a row, counted from the start,
    are one permutation. Otherwise an epoch is drawn with probabilities in proportion to the weights.

    factors: the method's factors on the prompts' weights, 0 or more. Equal factors change nothing; a prompt of factor 0
    is drawn only if the others do not suffice.
    """
    whole, rest = divmod(count, len(prompts))
    weights = np.array([prompt.weight for prompt in prompts])
    if factors is not None and min(factors) < max(factors):
        weights = weights * np.maximum(factors, LEAST * max(factors))
    if (weights == weights[0]).all():
        chosen = _walk(len(prompts), rest, epoch, seed)
    else:
        rng = np.random.default_rng([seed, epoch])
        chosen = rng.choice(len(prompts), rest, replace=False, p=weights / weights.sum())
    return prompts * whole + [prompts[i] for i in chosen]


def _walk(n: int, count: int, epoch: int, seed: int) -> np.ndarray:
    """Return indices [count] at `epoch * count` of an endless sequence of permutations of n > count.

    If an epoch crosses the end of one permutation, the next begins with indices that the epoch does not have yet.
    """
    if not count:
        return np.empty(0, int)
    start, order = epoch * count, np.empty(0, int)
    last = (start + count - 1) // n
    for number in range(last + 1):
        before, order = order, np.random.default_rng([seed, number]).permutation(n)
        given = number * n % count  # how many of this epoch came from the previous permutation
        fresh = order[~np.isin(order, before[n - given:])][:count - given]
        order = np.concatenate([fresh, order[~np.isin(order, fresh)]])
    offset = start - max(last - 1, 0) * n
    return np.concatenate([before, order])[offset:offset + count]


def require_suited(config: Config) -> None:
    """Raise UserError for a test set that is trained on, unless `train_on_test_set`; and for a held-out share of a set
    that brings held-out prompts, where it would have no effect.

    The default share is accepted: a run's saved configuration has it. Recorded pairs replace the training prompts.
    """
    if not config.train_on_test_set and config.preferences is None:
        sets.require_training_set(config.prompts)
    usual = config.held_out == Config.model_fields["held_out"].default
    if _held_out_of(config.prompts) and isinstance(config.held_out, float) and not usual:
        raise UserError(f"held_out: got {config.held_out!r}, but prompts: {config.prompts} brings held-out prompts of "
                        "its own: leave it out, or name a file")


def resolve(config: Config) -> tuple[list[Prompt], list[Prompt]]:
    """Return the (training, held-out) prompts of a configuration.

    `prompts` names a set of `sets.SETS`, a file, or a dataset of the hub. The held-out side of a set replaces a share.
    """
    named = sets.SETS.get(config.prompts)
    prompts = sets.load(named.train if named else config.prompts)
    share = isinstance(config.held_out, float)
    return split(prompts, (_held_out_of(config.prompts) if share else None) or config.held_out, SPLIT_SEED)


def _held_out_of(prompts: str) -> str | None:
    """Return the file, or the hub's name, of a set's own held-out side."""
    side = sets.SETS[prompts].held_out if prompts in sets.SETS else None
    return None if side is None else str(side)
