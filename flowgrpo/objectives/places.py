"""Parts of this folder that a recipe can name, by their place in a method (see `advantages.places`)."""

from __future__ import annotations

from types import ModuleType

from flowgrpo.objectives import (
    actor_critic,
    balance,
    best_path,
    forward_process,
    kl,
    pair_losses,
    ratios,
    reductions,
    references,
    schedules,
    sequence_losses,
    step_weights,
    supervised_weights,
    surrogates,
)
from flowgrpo.objectives.balance import Balance
from flowgrpo.objectives.kl import Penalty
from flowgrpo.objectives.ratios import LogRatio
from flowgrpo.objectives.supervised_weights import TokenWeight
from flowgrpo.objectives.surrogates import Surrogate

MODULES: dict[str, tuple[ModuleType, ...]] = {
    "log_ratio": (ratios,),
    "surrogate": (surrogates, forward_process, sequence_losses, actor_critic, pair_losses),
    "step_weight": (step_weights,),
    "reduction": (reductions,),
    "kl": (kl,),
    "kl.schedule": (schedules,),
    "reference": (references,),
    "tuning": (best_path,),
    "data.balance": (balance,),
    "data.token_weight": (supervised_weights,)}
# What parts return or hold, and what no recipe names.
RECORDS: set[type] = {actor_critic.Seen, balance.Now, supervised_weights.Drawn, surrogates.Origin}
BASES: dict[str, type] = {"surrogate": Surrogate, "log_ratio": LogRatio, "kl": Penalty, "data.balance": Balance,
                          "data.token_weight": TokenWeight}
