"""Make the rollout of a policy and a method."""

from __future__ import annotations

from typing import Any

from flowgrpo.config.schema import Config
from flowgrpo.data.prompts import Prompt
from flowgrpo.methods.method import Method
from flowgrpo.methods.targets import RecordedPairs, RelaxedTraces


def make_explorer(config: Config, policy: Any, method: Method, *rest: Any, first: Prompt | None = None):
    """Make the object that samples and replays a policy.

    The arguments are those of `denoising.Explorer`. first: of a pipeline alone.
    """
    if isinstance(method.target, RelaxedTraces):
        from flowgrpo.rollouts.relaxed import RelaxedExplorer

        return RelaxedExplorer(config, policy, method, *rest)
    if policy.modality == "text":
        from flowgrpo.policies.language import engines

        if engines.wanted(config):
            from flowgrpo.rollouts.engine import EngineExplorer

            return EngineExplorer(config, policy, method, *rest)
        from flowgrpo.rollouts.text import TextExplorer

        return TextExplorer(config, policy, method, *rest)
    if isinstance(method.target, RecordedPairs):
        from flowgrpo.rollouts.recorded import PairExplorer

        return PairExplorer(config, policy, method, *rest, first)
    from flowgrpo.rollouts.denoising import Explorer

    return Explorer(config, policy, method, *rest, first)
