"""Parts of this folder that a recipe can name, by their place in a method (see `advantages.places`)."""

from __future__ import annotations

from types import ModuleType

from flowgrpo.curriculum import expansion, gradient_variance, history, order, resampling

MODULES: dict[str, tuple[ModuleType, ...]] = {
    "curriculum": (order, gradient_variance, history),
    "expansion": (expansion,),
    "redraw": (resampling,)}
