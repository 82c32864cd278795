"""Evaluation with another number of frames, in a dry run: one micro-batch of it, extrapolated to all."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any, cast

import torch

from flowgrpo.dry_run.meta_gpu import MetaGPU, Phase
from flowgrpo.policies.pipelines.frames import clips_of
from flowgrpo.samplers.grids import shifted
from flowgrpo.samplers.rollout import seeder
from flowgrpo.samplers.scheduler import Segment
from flowgrpo.train import Trainer

FEW = (1, 2)  # denoising steps that are run: their difference is the cost of a step


def of(trainer: Trainer, meta: MetaGPU, processes: int) -> Phase:
    """Return the phase of one evaluation on one of so many processes: its peak, and the cost of all held-out samples.

    The stock scheduler's own arithmetic is that of a rollout's.
    """
    settings, rows = trainer.config.eval, trainer.geometry.micro_batch
    total = math.ceil(settings.prompts * settings.samples / processes)
    rows = min(rows, total)
    one, two = (_run(trainer, meta, rows, steps) for steps in FEW)
    times, more = total / rows, settings.steps - FEW[0]

    def extrapolated(first: float, second: float) -> float:
        return times * (first + more * max(second - first, 0))

    waits = {reason: round(extrapolated(one.waits[reason], two.waits[reason])) for reason in one.waits | two.waits}
    return Phase(meta.spare + max(one.allocated, two.allocated), meta.spare + max(one.reserved, two.reserved),
                 extrapolated(one.flops, two.flops), round(extrapolated(one.kernels, two.kernels)),
                 extrapolated(one.seconds, two.seconds), waits=Counter(waits),
                 traffic=extrapolated(one.traffic, two.traffic))


@torch.no_grad()
def _run(trainer: Trainer, meta: MetaGPU, rows: int, steps: int) -> Phase:
    """Return the counts of sampling and decoding so many rows with so many steps."""
    policy, rollouts, config = cast(Any, trainer.policy), cast(Any, trainer.rollouts), trainer.config
    settings, prompt = config.eval, trainer.prompts[0]
    conditioning = rollouts.encode([prompt.text], [config.negative_prompt], [prompt.brings])
    conditioning = conditioning.rows(torch.zeros(rows, dtype=torch.int64))
    guidance, policy.guidance = policy.guidance, settings.guidance
    flow = policy.process == "flow"
    grid = shifted(steps, 3.0) if flow else torch.linspace(0.1, 0.99, steps + 1)  # no value changes a count
    timesteps = None if flow else torch.linspace(900, 100, steps).long()
    task, seed = Segment(grid, range(steps), timesteps=timesteps), seeder(0, 0)
    with clips_of(policy, settings.frames), meta.during(f"evaluation of {steps} steps"):
        latents, _ = policy.run(task, conditioning, generators=policy.generators(seed(0, k) for k in range(rows)))
        policy.decode(latents, conditioning)
    policy.guidance = guidance
    return meta.phases[f"evaluation of {steps} steps"]
