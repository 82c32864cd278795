"""Demands of a method's parts on the rewards of a run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flowgrpo import rewards
from flowgrpo.advantages.step_credit import chosen_weights
from flowgrpo.errors import UserError
from flowgrpo.methods.method import Method
from flowgrpo.rewards import pairwise


def require(method: Method, trained: Mapping[str, Any], group: int) -> None:
    """Raise UserError for rewards that cannot serve the method's parts.

    They are judges of pairs with a group or pool that they cannot share out, rewards without a gradient that is
    followed, and rewards that compare samples where clean predictions or deterministic samples are scored one by one.
    """
    pools = [part.pool for part in (method.rollout.preview, method.rollout.pruning) if part is not None]
    pairwise.require(trained, group, *pools)
    if method.target.follows_reward:
        rewards.require_gradient(trained)
    progress = method.credit.progress
    if progress is None and not method.credit.advantage.reads_baseline:
        return
    for name in chosen_weights(dict.fromkeys(trained, 1.0), progress.rewards if progress else ()):
        if pairwise.sees_groups(trained[name]) or rewards.sees_base(trained[name]):
            part = "parts.progress" if progress else "parts.advantage"
            raise UserError(f"{part} scores pictures one by one, but the reward {name!r} compares several: name others "
                            "in parts.progress.rewards, or leave it out")
