"""Checks of a trainer's arguments when it is made, so that `train()` finds none of them wrong."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from flowgrpo.arguments import OMITTED, build_config
from flowgrpo.policies import build
from flowgrpo.rewards.find import locate
from flowgrpo.training import announcement, checks


def check(model: Any, rewards: dict[Any, Any], prompts: Any, keys: dict[str, Any],
          require_kind: Callable[[str], None] | None = None) -> None:
    """Raise UserError for arguments of `align` that its configuration, the method or the model's kind does not take.

    require_kind: a further check of the model's kind (`policies.build`). No weights are loaded.
    """
    config, functions = build_config(model, rewards, prompts, OMITTED, None, keys)
    pipe = None if isinstance(model, (str, Path)) else model
    config, _ = announcement.fit_model(config, pipe)
    if require_kind is not None:
        require_kind(build.kind(config, pipe))
    checks.check_keys(config, pipe)
    for label, rule in (config.trained | config.extra_rewards).items():
        if label not in functions:
            locate(rule.use or label)
