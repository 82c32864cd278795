"""What an epoch costs in denoiser evaluations, rows that go through a denoiser, known before anything runs.

P = `prompts`, G = `group`. Rows with a shared initial noise are one row per prompt up to and with the first stochastic
step, at which they part (see `samplers.rollout`). A prompt whose rows lie in several micro-batches is evaluated at that
step in each of them; without `micro_batch`, none lies so. Guidance that runs the denoiser twice per step doubles every
count.
"""

from __future__ import annotations

from flowgrpo.samplers.plans import Schedule


def rollout(schedule: Schedule, steps: int, prompts: int, group: int, shared_noise: bool,
            micro_batch: int | None = None) -> int:
    """Evaluations of a rollout of P*G pictures on a grid of `steps` intervals."""
    rows = prompts * group
    if not shared_noise:
        return rows * steps
    parting = schedule.stochastic[0]
    return prompts * parting + _parting_rows(prompts, group, micro_batch) + rows * (steps - parting - 1)


def update(schedule: Schedule, prompts: int, group: int, shared_noise: bool, passes: int,
           micro_batch: int | None = None) -> int:
    """Evaluations of `passes` replays of all trained steps: a pass with gradients, one of the reference, and so on."""
    shared = shared_noise and schedule.stochastic[0] in schedule.trained
    each = prompts * group * (len(schedule.trained) - shared)
    return passes * (each + shared * _parting_rows(prompts, group, micro_batch))


def _parting_rows(prompts: int, group: int, micro_batch: int | None) -> int:
    """Rows of the parting step: of every micro-batch, the prompts that it holds."""
    rows, size = range(prompts * group), micro_batch or group
    parts = (rows[start:start + size] for start in rows[::size])
    return sum(part[-1] // group - part[0] // group + 1 for part in parts)
