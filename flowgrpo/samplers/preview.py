"""Preview and select (Sol-RL, 2604.06916): score many initial noises with a cheap run, then sample the most
informative.

A preview is deterministic and short. The chosen noises enter the rollout by their seeds, so its images start from the
same noise. They are scored again; the preview's scores only choose noises.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import torch

from flowgrpo.errors import UserError
from flowgrpo.parts import AtLeast, OneOf, part
from flowgrpo.samplers.denoiser import C, Denoiser
from flowgrpo.samplers.rollout import RolloutSpec, Seed
from flowgrpo.samplers.scheduler import Segment

PRECISIONS = ("full", "auto", "int8", "fp8", "nvfp4")


@part("preview", jointly={"pool steps": "2 or more and 1 or more"})
class Preview:
    """Pool of initial noises scored before a rollout, and the cost of each preview (Sol-RL, 2604.06916).

    pool: noises per prompt.
    steps: steps of the deterministic preview grid.
    precision: of the products of the denoiser's linear layers in a preview: "full" or, by torchao, "int8", "fp8",
        "nvfp4". "auto" is the one that suits the GPU, and "full" on other devices and without torchao
        (policies/weights/low_precision.py).

    Raises ValueError for an unknown precision, a pool below 2 or steps below 1.
    """

    pool: Annotated[int, AtLeast(2)] = 96
    steps: Annotated[int, AtLeast(1)] = 6
    precision: Annotated[str, OneOf(PRECISIONS)] = "auto"


def previews(policy: Denoiser[C], conditioning: C, grid: torch.Tensor, timesteps: torch.Tensor | None, pool: int,
             micro_batch: int, seed: Seed) -> torch.Tensor:
    """Return the final states [P*pool,*D] of deterministic runs from the noises seed(prompt, 0) to seed(prompt,
    pool-1).

    grid and timesteps are those of `make_grid`.
    """
    prompts = torch.arange(len(conditioning.prompts)).repeat_interleave(pool)
    task = Segment(grid, range(len(grid) - 1), timesteps=timesteps)
    finals = []
    for rows in torch.arange(len(prompts)).split(micro_batch):
        generators = policy.generators(seed(int(row) // pool, int(row) % pool) for row in rows)
        finals.append(policy.run(task, conditioning.rows(prompts[rows]), None, generators)[0])
    return torch.cat(finals)


def contrasting(scores: torch.Tensor, group: int) -> torch.Tensor:
    """Return the indices of the group/2 largest and the group/2 smallest of the scores [P,pool]: int64 [P,group], best
    first.

    A noise without a score (NaN) is chosen only if there are too few others.
    Raises UserError if the group is odd or larger than the pool.
    """
    if group % 2 or group > scores.shape[1]:
        raise UserError(f"a group of {group} cannot be the best and the worst of a pool of {scores.shape[1]}: "
                         "expected an even number, at most the pool")
    ranked = torch.stack([_ranked(row) for row in scores])
    return torch.cat([ranked[:, :group // 2], ranked[:, scores.shape[1] - group // 2:]], 1)


def _ranked(scores: torch.Tensor) -> torch.Tensor:
    """Return the indices of scores [n], largest first; NaN, which sorts as the largest, goes in the middle."""
    ranked, lost = scores.argsort(descending=True, stable=True), int(scores.isnan().sum())
    middle = (len(scores) + lost) // 2
    return torch.cat([ranked[lost:middle], ranked[:lost], ranked[middle:]])


def require_choice(explorations: Sequence[RolloutSpec], pool: int) -> None:
    """Raise UserError unless a pool can give each sample of a group a separate initial noise, once per epoch."""
    group, roots = explorations[0].group, explorations[0].roots
    if roots < group or len(explorations) > 1:
        raise UserError(f"previews choose an initial noise for each of the {group} samples of a group, but those of "
                        "this method share theirs or use it several times: name sol_rl last, over a method without "
                        "branches")
    contrasting(torch.zeros(1, pool), group)


def chosen(seed: Seed, places: torch.Tensor) -> Seed:
    """Return seed(prompt, sample) of the chosen noises: sample k of a prompt is noise places[prompt, k]."""
    return lambda prompt, sample: seed(prompt, int(places[prompt, sample]))
