"""Sizes of images: one for each group, so that a run trains several resolutions and aspect ratios."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch

from flowgrpo.errors import UserError
from flowgrpo.policies.pipelines.conditioning import Conditioning, Size
from flowgrpo.policies.pipelines.pipeline import PipelinePolicy
from flowgrpo.policies.pipelines.probes import few_steps
from flowgrpo.samplers.rollout import Part, Seed
from flowgrpo.samplers.scheduler import Segment


def drawn(sizes: Sequence[Size], keys: Sequence[str], epoch: int, seed: int) -> list[Size]:
    """Return the (height, width) of each prompt's group in an epoch: all sizes are as likely.

    A pure function of its arguments: the same on every process, and after a resume.
    keys: of the prompts (`Prompt.key`). Groups of one prompt in an epoch have one size.
    """
    return [sizes[int.from_bytes(hashlib.sha256(f"{seed} {epoch} {key}".encode()).digest()[:8], "big") % len(sizes)]
            for key in keys]


def runs(sizes: Sequence[Size]) -> Iterator[tuple[range, Size]]:
    """Yield consecutive prompts of one size, and that size. sizes: of the prompts."""
    start = 0
    for size, same in itertools.groupby(sizes):
        stop = start + len(list(same))
        yield range(start, stop), size
        start = stop


def behind(seed: Seed, first: int) -> Seed:
    """Return the seeds of prompts whose first is the one at place `first`."""
    return seed if not first else lambda prompt, sample: seed(first + prompt, sample)


def shifted(part: Part, prompts: int, groups: int) -> Part:
    """Return the part of later prompts: its prompts and groups are counted from these."""
    if not prompts:
        return part
    taken = tuple(replace(one, prompts=one.prompts + prompts) for one in part.transitions)
    return replace(part, groups=range(part.groups.start + groups, part.groups.stop + groups),
                   prompts=part.prompts + prompts, transitions=taken)


def require(policy: PipelinePolicy, encode: Callable[[], Conditioning], sizes: Sequence[Size], slices: int) -> None:
    """Raise UserError if the pipeline does not make images of these sizes: a step and an image of each are tried.

    encode: gives the conditioning of one prompt. slices: of every group over processes.
    """
    if not sizes:
        return
    name = type(policy.pipe).__name__
    if missing := {"height", "width"} - set(policy.accepts):
        raise UserError(f"image.sizes is set, but {name} takes no {min(missing)}: leave it out")
    if slices > 1:
        raise UserError("image.sizes is set, but groups are split over processes: use train.prompts that the "
                        "processes divide")
    conditioning, before = encode(), policy.evaluations
    if conditioning.inputs:
        raise UserError("image.sizes is set, but prompts bring images, whose size is theirs: leave it out")
    for size in sizes:
        if (made := _made(policy, replace(conditioning, sizes=[size]), name)) != size:
            raise UserError(f"image.sizes: {name} makes images of {made[0]} x {made[1]} where {size[0]} x {size[1]}"
                            " are asked for: use sizes that it makes, such as multiples of 16")
    policy.evaluations = before


def _made(policy: PipelinePolicy, conditioning: Conditioning, name: str) -> Size:
    """Return the height and width of an image after one step."""
    grid, timesteps = few_steps(policy, 2)
    try:
        x, _ = policy.run(Segment(grid, range(1), timesteps=timesteps), conditioning, None, policy.generators([0]))
        height, width = policy.decode(x, conditioning).shape[-2:]
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, TypeError, ValueError) as error:
        [(height, width)] = conditioning.sizes
        raise UserError(f"image.sizes: {name} refuses {height} x {width} ({str(error).splitlines()[0][:200]}): use "
                        "sizes that it takes, or leave image.sizes out") from error
    return height, width
