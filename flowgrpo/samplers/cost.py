"""What an epoch costs in denoiser evaluations, rows that go through a denoiser, known before anything runs.

A state is evaluated once, however many transitions leave it: a shared initial noise is one row per prompt up to and
with the step at which the group parts. Guidance that runs the denoiser twice per step doubles every count.
"""

from __future__ import annotations

from collections.abc import Sequence

from flowgrpo.samplers.preview import Preview
from flowgrpo.samplers.rollout import Exploration


def rollout(explorations: Sequence[Exploration], prompts: int) -> int:
    """Evaluations of the rollout of `prompts` groups in each of the explorations; their trunks run once."""
    shared = [each for each in explorations if each.roots < each.group]
    trunk = max((each.trunk * each.roots for each in shared), default=0)
    return prompts * (trunk + sum(_grown(each) for each in explorations))


def preview(looked: Preview | None, prompts: int) -> int:
    """Evaluations of the previews of `prompts` prompts, whatever their precision; none without a preview."""
    return prompts * looked.pool * looked.steps if looked else 0


def alone(explorations: Sequence[Exploration], prompts: int) -> int:
    """The same pictures without any sharing: every one runs the whole grid for itself."""
    return prompts * sum(each.group * sum(tail.steps for tail in each.tails()) for each in explorations)


def update(explorations: Sequence[Exploration], prompts: int, passes: int) -> int:
    """Evaluations of `passes` replays of all trained steps: a pass with gradients, one of the reference, and so on."""
    return passes * prompts * sum(states(each)[step] for each in explorations for step in each.schedule.trained)


def states(exploration: Exploration) -> list[int]:
    """How many states of one prompt each step starts from, [T]."""
    found, nodes = [], exploration.roots
    for step in range(exploration.steps):
        found.append(nodes)
        nodes *= exploration.splits.get(step, 1)
    return found


def _grown(exploration: Exploration) -> int:
    """Evaluations of one prompt behind the trunk, in every granularity."""
    start = exploration.trunk if exploration.roots < exploration.group else 0
    nodes, settled = states(exploration), exploration.settled
    return sum(nodes[start:settled]) + exploration.group * sum(tail.steps - settled for tail in exploration.tails())
