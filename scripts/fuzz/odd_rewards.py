"""Rewards of bad_edges.py: odd errors, odd arrays, and odd manners."""

import sys
from decimal import Decimal

import numpy as np
import torch


class Silent(Exception):
    """Exception that cannot be printed."""

    def __str__(self):
        raise RuntimeError("no text")

    __repr__ = __str__


class Unmade:
    """Reward that cannot be made."""

    def __init__(self):
        raise OSError("no\x1b[31m reward")

    def __call__(self, images, prompts):
        return [0.5] * len(prompts)


class Odd:
    """Number, or array, whose conversion fails."""

    def __float__(self):
        raise OverflowError("too odd")

    def __array__(self, dtype=None, copy=None):
        raise TypeError("no array")

    def __len__(self):
        return 2


def silent(images, prompts):
    raise Silent


def masked(images, prompts):
    return np.ma.masked_array(np.linspace(0, 1, len(prompts)), mask=[True] * len(prompts))


def partly_masked(images, prompts):
    return np.ma.masked_array(np.linspace(0, 1, len(prompts)), mask=[False] + [True] * (len(prompts) - 1))


def long_message(images, prompts):
    raise ValueError("x" * 10_000_000)


def escaping(images, prompts):
    raise ValueError("\x1b[2J\u202e no")


def lazy_raise(images, prompts):
    def scores():
        yield 0.5
        raise KeyError("later")

    return scores()


def bad_array(images, prompts):
    return Odd()


def bad_float(images, prompts):
    return [Odd() for _ in prompts]


def fp8(images, prompts):
    return images.mean((1, 2, 3)).to(torch.float8_e5m2) * 0 + float("nan")


def structured(images, prompts):
    return np.zeros(len(prompts), dtype=[("a", "f4"), ("b", "f4")])


def dates(images, prompts):
    return np.array(["2020-01-01"] * len(prompts), dtype="datetime64[D]")


def decimal_nan(images, prompts):
    return [Decimal("NaN")] * len(prompts)


def bytes_(images, prompts):
    return [b"0.5"] * len(prompts)


def nested(images, prompts):
    return [[0.5], [0.5]] * (len(prompts) // 2)


def interrupts(images, prompts):
    raise GeneratorExit("leaving")


def stops(images, prompts):
    raise StopIteration


def closes(images, prompts):
    sys.stdin.close()
    raise RuntimeError("closed")


def group_of_errors(images, prompts):
    raise ExceptionGroup("several", [ValueError("one"), TypeError("two")])


def forgiving(images, prompts):
    means = images.nan_to_num().mean((1, 2, 3))
    return [float(mean) for mean in means]
