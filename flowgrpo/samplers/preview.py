"""Preview and select (Sol-RL, 2604.06916): look at many initial noises cheaply, sample again only those that tell most.

A preview is deterministic and short. The noises it chooses go into the rollout by their seeds, so that the pictures
there start from the very same noise; they are scored anew, and the preview's scores are used for nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from flowgrpo.errors import UserError
from flowgrpo.samplers.rollout import Exploration, Seed
from flowgrpo.samplers.scheduler import Task

PRECISIONS = ("full", "int8", "fp8", "nvfp4")


@dataclass(frozen=True)
class Preview:
    """How many initial noises are looked at before a rollout, how briefly and how roughly (Sol-RL, 2604.06916).

    pool: noises per prompt; steps: of the deterministic grid that they are looked at on; precision: of the denoiser's
    linear weights meanwhile, "full" or, by torchao, "int8", "fp8" or "nvfp4" (policies/quantised.py).
    """

    pool: int = 96
    steps: int = 6
    precision: str = "full"

    def __post_init__(self) -> None:
        if self.precision not in PRECISIONS:
            raise ValueError(f"Preview: precision is {self.precision!r}, expected one of {', '.join(PRECISIONS)}")
        if self.pool < 2 or self.steps < 1:
            raise ValueError(f"Preview: pool is {self.pool} and steps {self.steps}, expected 2 or more and 1 or more")


def previews(policy, conditioning, grid: torch.Tensor, timesteps: torch.Tensor | None, pool: int, micro_batch: int,
             seed: Seed) -> torch.Tensor:
    """Final states [P*pool,*D] of the deterministic run of seed(prompt, 0) to seed(prompt, pool-1); grid and timesteps
    are those of `make_grid`."""
    prompts = torch.arange(len(conditioning.prompts)).repeat_interleave(pool)
    task = Task(grid, range(len(grid) - 1), timesteps=timesteps)
    finals = []
    for rows in torch.arange(len(prompts)).split(micro_batch):
        generators = policy.generators(seed(int(row) // pool, int(row) % pool) for row in rows)
        finals.append(policy.run(task, conditioning.rows(prompts[rows]), None, generators)[0])
    return torch.cat(finals)


def contrasting(scores: torch.Tensor, group: int) -> torch.Tensor:
    """Of the scores [P,pool] the places of the group/2 largest and the group/2 smallest: int64 [P,group], best first.
    One without a score, NaN, is chosen only where the others are too few.

    UserError for an odd group or one that is larger than the pool.
    """
    if group % 2 or group > scores.shape[1]:
        raise UserError(f"a group of {group} cannot be the best and the worst of a pool of {scores.shape[1]}: "
                         "expected an even number, at most the pool")
    ranked = torch.stack([_ranked(row) for row in scores])
    return torch.cat([ranked[:, :group // 2], ranked[:, scores.shape[1] - group // 2:]], 1)


def _ranked(scores: torch.Tensor) -> torch.Tensor:
    """The places of scores [n], the largest first, and those of NaN, which sort as the largest, in the middle."""
    ranked, lost = scores.argsort(descending=True, stable=True), int(scores.isnan().sum())
    middle = (len(scores) + lost) // 2
    return torch.cat([ranked[lost:middle], ranked[:lost], ranked[middle:]])


def require_choice(explorations: Sequence[Exploration], pool: int) -> None:
    """UserError where a pool cannot give each sample of a group an initial noise of its own, once per epoch."""
    group, roots = explorations[0].group, explorations[0].roots
    if roots < group or len(explorations) > 1:
        raise UserError(f"previews choose an initial noise for each of the {group} samples of a group, but those of "
                        "this method share theirs or use it several times: name sol_rl last, over a method without "
                        "branches")
    contrasting(torch.zeros(1, pool), group)


def chosen(seed: Seed, places: torch.Tensor) -> Seed:
    """seed(prompt, sample) of the chosen noises: sample k of a prompt is noise places[prompt, k]."""
    return lambda prompt, sample: seed(prompt, int(places[prompt, sample]))
