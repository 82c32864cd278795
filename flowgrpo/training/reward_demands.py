"""Rewards of a run that do not fit its method, its model or its prompts."""

from __future__ import annotations

from flowgrpo import rewards
from flowgrpo.advantages.step_credit import chosen_weights
from flowgrpo.errors import UserError
from flowgrpo.methods.setup import Setup
from flowgrpo.policies import build
from flowgrpo.rewards import pairwise


def check(setup: Setup) -> None:
    """Raise UserError for rewards that cannot serve the method's parts.

    They are judges of pairs with a group or pool that they cannot share out, rewards without a gradient that is
    followed, and rewards that compare samples where clean predictions or deterministic samples are scored one by one.
    """
    method, trained = setup.method, setup.trained
    pools = [part.pool for part in (method.rollout.preview, method.rollout.pruning) if part is not None]
    pairwise.require(trained, setup.config.train.group, *pools)
    if method.target.follows_reward:
        rewards.require_gradient(trained)
    progress = method.credit.progress
    if progress is None and not method.credit.advantage.reads_baseline:
        return
    for name in chosen_weights(dict.fromkeys(trained, 1.0), progress.rewards if progress else ()):
        if pairwise.sees_groups(trained[name]) or rewards.sees_base(trained[name]):
            part = "parts.progress" if progress else "parts.advantage"
            raise UserError(f"{part} scores images one by one, but the reward {name!r} compares several: name others "
                            "in parts.progress.rewards, or leave it out")


def check_modality(setup: Setup) -> None:
    """Raise UserError for a reward that judges another modality than the model's, or what it does not have.

    A pipeline on the hub is not known before it is loaded.
    """
    known = {**setup.trained, **setup.watched}
    if modality := build.modality_ahead(setup.config, setup.loaded):
        rewards.require_modality(known, modality)
        rewards.require_base(known, modality)
        rewards.require_latents(known, modality)


def check_clips(setup: Setup) -> None:
    """Raise UserError in the first process for a function that scores pictures where clips are generated."""
    if setup.first and build.modality_ahead(setup.config, setup.loaded) == "video":
        prompt = setup.split[0][0]
        rewards.require_clips({**setup.trained, **setup.watched}, prompt.text, prompt.metadata)


def check_routes(setup: Setup) -> None:
    """Raise UserError for a reward that applies to none of the prompts that it is for."""
    for routed, side in zip((setup.trained, setup.watched), setup.split):
        rewards.require_routes(routed, [prompt.metadata for prompt in side])
    for name, rule in (setup.config.trained | setup.config.watched).items():
        rewards.require_values(f"reward {name!r}, when", rule.when,
                               [prompt.metadata for side in setup.split for prompt in side])
