"""Named methods: functions from a Method to a Method, which hold what differs.

A new one adds at most one part, one preset and one test. Every public function of the modules here is a preset.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable

from flowgrpo.methods.method import Method
from flowgrpo.methods.presets import denoising, finals, overlays
from flowgrpo.text.presets import completions as text

PRESETS: dict[str, Callable[..., Method]] = {
    name: function for module in (denoising, overlays, finals, text)
    for name, function in vars(module).items()
    if inspect.isfunction(function) and function.__module__ == module.__name__ and not name.startswith("_")}
# Base methods of denoisers: they name what is sampled and trained. Modifiers change one thing of a base method.
BASE_METHODS = {name for name, function in PRESETS.items()
                if function.__module__ in (denoising.__name__, finals.__name__)}
OVERLAYS = {name for name, function in PRESETS.items() if function.__module__ == overlays.__name__}


def suited(process: str) -> list[str]:
    """Return the presets for a process, such as "tokens"."""
    return [name for name, make in PRESETS.items() if make().fits(process)]
