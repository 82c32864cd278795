"""Make the rollouts of a policy and a method."""

from __future__ import annotations

from typing import Any

from flowgrpo.config.geometry import BatchShape
from flowgrpo.config.schema import Config
from flowgrpo.data.prompts import Prompt
from flowgrpo.distributed.processes import Processes
from flowgrpo.log import PhaseTimer
from flowgrpo.methods.method import Method
from flowgrpo.methods.targets import RecordedPairs
from flowgrpo.policies.policy import Policy
from flowgrpo.rollouts.base import GroupSampler


def make_rollouts(config: Config, policy: Policy, method: Method, geometry: BatchShape, processes: Processes,
                  clock: PhaseTimer, first: Prompt) -> GroupSampler[Any]:
    """Make what samples and replays a policy. first: a prompt, with which a pipeline's own grid is read."""
    given: tuple[Any, ...] = config, policy, method, geometry, processes, clock
    if method.for_tokens:
        from flowgrpo.text.rollouts import recorded

        return recorded.make_rollouts(*given)
    given = (*given, first)
    if isinstance(method.target, RecordedPairs):
        from flowgrpo.rollouts.recorded import RecordedRollouts

        return RecordedRollouts(*given)
    from flowgrpo.rollouts.denoising import DenoisingRollouts

    return DenoisingRollouts(*given)
