"""Make the rollouts of a policy and a method."""

from __future__ import annotations

from typing import Any

from flowgrpo.config.geometry import Geometry
from flowgrpo.config.schema import Config
from flowgrpo.data.prompts import Prompt
from flowgrpo.distributed.processes import Processes
from flowgrpo.log import Clock
from flowgrpo.methods.method import Method
from flowgrpo.methods.targets import RecordedPairs, RelaxedTraces
from flowgrpo.rollouts.base import GroupSampler


def make_explorer(config: Config, policy: Any, method: Method, geometry: Geometry, processes: Processes, clock: Clock,
                  first: Prompt) -> GroupSampler:
    """Make what samples and replays a policy. first: a prompt, with which a pipeline's own grid is read."""
    given = config, policy, method, geometry, processes, clock
    if isinstance(method.target, RelaxedTraces):
        from flowgrpo.rollouts.relaxed import RelaxedExplorer

        return RelaxedExplorer(*given)
    if method.for_tokens:
        from flowgrpo.policies.language import engines

        if engines.wanted(config):
            from flowgrpo.rollouts.engine import EngineExplorer

            return EngineExplorer(*given)
        from flowgrpo.rollouts.text import TextExplorer

        return TextExplorer(*given)
    if isinstance(method.target, RecordedPairs):
        from flowgrpo.rollouts.recorded import PairExplorer

        return PairExplorer(*given, first)
    from flowgrpo.rollouts.denoising import Explorer

    return Explorer(*given, first)
