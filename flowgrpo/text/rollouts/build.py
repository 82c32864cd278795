"""Make the rollouts of a language model."""

from __future__ import annotations

from typing import Any

from flowgrpo.config.geometry import BatchShape
from flowgrpo.config.schema import Config
from flowgrpo.distributed.processes import Processes
from flowgrpo.log import PhaseTimer
from flowgrpo.methods.method import Method
from flowgrpo.policies.policy import Policy
from flowgrpo.rollouts.base import GroupSampler
from flowgrpo.text.policies import engines
from flowgrpo.text.targets import RecordedCompletions, RelaxedTraces


def make_rollouts(config: Config, policy: Policy, method: Method, geometry: BatchShape, processes: Processes,
                  clock: PhaseTimer) -> GroupSampler[Any]:
    """Make what samples and replays a language model."""
    given: tuple[Any, ...] = config, policy, method, geometry, processes, clock
    if isinstance(method.target, RelaxedTraces):
        from flowgrpo.text.rollouts.recorded import RelaxedRollouts

        return RelaxedRollouts(*given)
    if isinstance(method.target, RecordedCompletions):
        from flowgrpo.text.rollouts.recorded import RecordedTextRollouts

        return RecordedTextRollouts(*given)
    if engines.wanted(config):
        from flowgrpo.text.rollouts.completions import EngineRollouts

        return EngineRollouts(*given)
    from flowgrpo.text.rollouts.completions import TextRollouts

    return TextRollouts(*given)
