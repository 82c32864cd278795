"""Parts of this folder that a recipe can name, by their place in a method; `methods.registry` joins the folders.

A new part goes into one of these modules, or its module into a line.
"""

from __future__ import annotations

from types import ModuleType

from flowgrpo.advantages import (
    baselines,
    correctness,
    gae,
    group,
    selection,
    shaping,
    step_credit,
    token_credit,
    trackers,
)
from flowgrpo.advantages.group import AdvantageRule
from flowgrpo.advantages.shaping import Shaping
from flowgrpo.advantages.token_credit import TokenCredit

MODULES: dict[str, tuple[ModuleType, ...]] = {
    "shaping": (shaping,),
    "advantage": (group, baselines, trackers, correctness),
    "selection": (selection,),
    "spread": (token_credit,),
    "value": (gae,),
    "progress": (step_credit,)}
# Classes that parts of a place extend, where they have something in common besides their call.
BASES: dict[str, type] = {"advantage": AdvantageRule, "shaping": Shaping, "spread": TokenCredit}
