"""Rewards with a mistake each, and a few that are unusual and right, for try_bad_inputs.py."""

import time

import numpy as np
import torch

import flowgrpo
from flowgrpo.rewards import differentiable


class Length:
    """Answer that has a length and nothing else."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count


class Stop(BaseException):
    """Exception that `except Exception` does not catch."""


def raises(images, prompts):
    raise RuntimeError("my bug\nsecond line")


def short(images, prompts):
    return [0.5] * (len(prompts) - 1)


def nan(images, prompts):
    return images.mean((1, 2, 3)) * float("nan")


def inf(images, prompts):
    return [float("inf")] * len(prompts)


def strings(images, prompts):
    return ["good"] * len(prompts)


def none(images, prompts):
    return None


def nones(images, prompts):
    return [None] * len(prompts)


def prints(images, prompts):
    print("hello from a reward")
    return images.mean((1, 2, 3))


def exits(images, prompts):
    raise SystemExit(3)


def scalars(images, prompts):
    return list(np.linspace(0, 1, len(prompts)).astype(np.float32))


async def coroutine(images, prompts):
    return [0.5] * len(prompts)


def generator(images, prompts):
    return (image.mean() for image in images)


def meta(images, prompts):
    return torch.empty(len(prompts), device="meta")


def sparse(images, prompts):
    return torch.ones(len(prompts)).to_sparse()


def hangs(images, prompts):
    time.sleep(3600)


def in_place(images, prompts):
    images.zero_()
    return images.mean((1, 2, 3))


def one_argument(images):
    return [0.5] * len(images)


def constant(images, prompts):
    return [1.0] * len(prompts)


def two_dimensions(images, prompts):
    return images.mean((2, 3))


def requires_grad(images, prompts):
    return images.mean((1, 2, 3)).clone().requires_grad_()


def dictionary(images, prompts):
    return {"score": [0.0] * len(prompts)}


def complex_numbers(images, prompts):
    return [0j] * len(prompts)


def scalar(images, prompts):
    return 0.5


def huge(images, prompts):
    return [10**400] * len(prompts)


def unordered(images, prompts):
    return {0.1 * place for place in range(len(prompts))}


def length_alone(images, prompts):
    return Length(len(prompts))


def recursion(images, prompts):
    return recursion(images, prompts)


def base_exception(images, prompts):
    raise Stop("not an Exception")


def objects(images, prompts):
    return np.array([object() for _ in prompts], dtype=object)


def empty(images, prompts):
    return []


def three_required(images, prompts, metadata, extra):
    return [0.5] * len(prompts)


def booleans(images, prompts):
    return [True] + [False] * (len(prompts) - 1)


def clears_metadata(images, prompts, metadata):
    for row in metadata:
        row.clear()
    return [0.5 + 0.01 * place for place in range(len(prompts))]


@differentiable
def detached(images, prompts):
    return torch.ones(len(prompts), requires_grad=True)


@flowgrpo.reward("bluish")
def blue_share(images, prompts):
    return images[:, 2].mean((1, 2))


not_callable = 5
