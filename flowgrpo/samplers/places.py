"""Parts of this folder that a recipe can name, by their place in a method (see `advantages.places`)."""

from __future__ import annotations

from types import ModuleType

from flowgrpo.samplers import (
    grids,
    kernels,
    latent_edits,
    learned_noise,
    noised_finals,
    old_policy,
    plans,
    preview,
    pruning,
    reward_gradient,
    solvers,
)

MODULES: dict[str, tuple[ModuleType, ...]] = {
    "kernel": (kernels, learned_noise),
    "plan": (plans,),
    "solver": (solvers,),
    "tail": (grids,),
    "preview": (preview,),
    "pruning": (pruning,),
    "times": (noised_finals,),
    "lag": (old_policy,),
    "backprop": (reward_gradient,),
    "edit": (latent_edits,)}
# What parts return or hold, and what no recipe names.
RECORDS: set[type] = {plans.Schedule, reward_gradient.ResumableStates, reward_gradient.RewardGradientRollout,
                      latent_edits.Edits}
