"""Samples beside a rollout's, from its initial noises and without further noise: of the base model, for rewards that
compare with them, and of the present one, as a baseline."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic

import torch

from flowgrpo.config.geometry import BatchShape
from flowgrpo.samplers.rollout import C, Denoiser, Part
from flowgrpo.samplers.scheduler import Segment


class BaseImages(Generic[C]):
    """Base model's samples [b,...] of a part's seeds, on the CPU; called with the part and its prompts' conditioning.

    They use the rollout's sigma grid [T+1] (and timesteps [T]) and no noise but the first. Samples that share an
    initial noise, in this part or the previous one, are drawn once.
    decode: a function of finals and their conditioning.
    """

    def __init__(self, policy: Denoiser[C], grid: torch.Tensor, timesteps: torch.Tensor | None, shape: BatchShape,
                 decode: Callable[[torch.Tensor, C], torch.Tensor]):
        self.policy = policy
        self.shape = shape
        self.decode = decode
        self.task = Segment(grid, range(len(grid) - 1), timesteps=timesteps)
        self.known: dict[int, torch.Tensor] = {}

    def __call__(self, part: Part, conditioning: C) -> torch.Tensor:
        prompts = dict(zip(part.seeds.tolist(), part.prompts.tolist()))
        missing = [seed for seed in prompts if seed not in self.known]
        known = self.known
        self.known = {}
        with self.policy.reference():
            for start in range(0, len(missing), self.shape.micro_batch):
                seeds = missing[start:start + self.shape.micro_batch]
                rows = conditioning.rows(torch.tensor([prompts[seed] for seed in seeds]))
                finals, _ = self.policy.run(self.task, rows, None, self.policy.generators(seeds))
                known |= zip(seeds, self.decode(finals, rows))
        self.known = {seed: known[seed] for seed in prompts}
        return torch.stack([self.known[seed] for seed in part.seeds.tolist()])


@torch.no_grad()
def deterministic(policy: Denoiser[C], conditioning: C, part: Part, micro_batch: int
                  ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Sample the present policy from a part's initial noises by the ODE: final states [u,*D] of the u different ones.

    Returns (the states, the prompt of each, int64 [u], the state that each leaf is compared with, int64 [b]).
    """
    assert part.seeds is not None and part.exploration is not None, "samples without an initial noise"
    spec = part.exploration
    seeds, at = part.seeds.unique(return_inverse=True)
    prompts = torch.empty_like(seeds).scatter(0, at, part.prompts)
    task = Segment(spec.grid, range(spec.steps), solver=spec.solver, timesteps=spec.timesteps)
    finals = [policy.run(task, conditioning.rows(prompts[rows]), None, policy.generators(seeds[rows].tolist()))[0]
              for rows in torch.arange(len(seeds)).split(micro_batch)]
    return torch.cat(finals), prompts, at
