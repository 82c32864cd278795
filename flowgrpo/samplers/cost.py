"""Cost of an epoch in denoiser evaluations (rows that pass a denoiser), known before anything runs.

A state is evaluated once for all transitions that leave it. A shared initial noise is one row per prompt, up to and
including the step at which the group splits. Guidance that runs the denoiser twice per step doubles every count.
"""

from collections.abc import Sequence

from flowgrpo.samplers.preview import Preview
from flowgrpo.samplers.rollout import RolloutSpec


def rollout(explorations: Sequence[RolloutSpec], prompts: int) -> int:
    """Of `prompts` groups in each exploration, whose shared prefixes run once."""
    shared = [spec for spec in explorations if not spec.alone]
    spent = max((spec.trunk * spec.roots for spec in shared), default=0)
    for spec in explorations:  # behind the shared prefix, in every granularity
        settled = spec.deterministic_from
        spent += sum(states(spec)[0 if spec.alone else spec.trunk:settled])
        spent += spec.group * sum(tail.steps - settled for tail in spec.tails())
    return prompts * spent


def preview(looked: Preview | None, prompts: int) -> int:
    """Of the previews of `prompts` prompts, at any precision."""
    return prompts * looked.pool * looked.steps if looked else 0


def alone(explorations: Sequence[RolloutSpec], prompts: int) -> int:
    """Of the same samples as in a `rollout` without sharing: each runs the whole grid."""
    return prompts * sum(spec.group * sum(tail.steps for tail in spec.tails()) for spec in explorations)


def update(explorations: Sequence[RolloutSpec], prompts: int, passes: int) -> int:
    """Of `passes` replays of all trained steps: one with gradients, one of the reference, and so on."""
    return passes * prompts * sum(states(spec)[step] for spec in explorations for step in spec.schedule.trained)


def states(exploration: RolloutSpec) -> list[int]:
    """Number of states of one prompt that each step starts from, [T]."""
    counts = []
    nodes = exploration.roots
    for step in range(exploration.steps):
        counts.append(nodes)
        nodes *= exploration.splits.get(step, 1)
    return counts
