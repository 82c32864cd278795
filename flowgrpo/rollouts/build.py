"""Make the rollout of a policy and a method."""

from __future__ import annotations

from typing import Any

from flowgrpo.config.schema import Config
from flowgrpo.data.prompts import Prompt


def make_explorer(config: Config, policy: Any, *rest: Any, first: Prompt | None = None):
    """Make the object that samples and replays a policy.

    The arguments are those of `denoising.Explorer`. first: of a pipeline alone.
    """
    if policy.process == "masks" and rest[0].backprop:
        from flowgrpo.rollouts.relaxed import RelaxedExplorer

        return RelaxedExplorer(config, policy, *rest)
    if policy.modality == "text":
        from flowgrpo.policies.language import engines

        if engines.wanted(config):
            from flowgrpo.rollouts.engine import EngineExplorer

            return EngineExplorer(config, policy, *rest)
        from flowgrpo.rollouts.text import TextExplorer

        return TextExplorer(config, policy, *rest)
    if config.preferences is not None:
        from flowgrpo.rollouts.recorded import PairExplorer

        return PairExplorer(config, policy, *rest, first)
    from flowgrpo.rollouts.denoising import Explorer

    return Explorer(config, policy, *rest, first)
