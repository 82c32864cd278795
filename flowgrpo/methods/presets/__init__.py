"""Named methods: functions from a Method to a Method, which hold what differs.

A new one adds at most one part, one preset and one test. Every public function of the modules here is a preset, and so
is every one of `text.presets`, which `registry.NAMED` has.
"""

import inspect
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any

from flowgrpo import domains
from flowgrpo.methods.method import Method
from flowgrpo.methods.presets import denoising, finals, overlays
from flowgrpo.methods.registry import NAMED, ByName


def of_module(module: ModuleType) -> dict[str, Callable[..., Method]]:
    return {name: function for name, function in vars(module).items() if inspect.isfunction(function)
            and function.__module__ == module.__name__ and not name.startswith("_")}


OF_DOMAINS: dict[str, list[str]] = NAMED["presets"]
OF_TEXT: dict[str, str] = {name: module for module, names in OF_DOMAINS.items() for name in names}
PRESETS: ByName[Callable[..., Method]] = ByName[Any](
    {**of_module(denoising), **of_module(overlays), **of_module(finals), **OF_TEXT})


def _names(modules: Iterable[str]) -> set[str]:
    return {name for module in modules for name in OF_DOMAINS[module]}


# Base methods of denoisers: they name what is sampled and trained. Modifiers change one thing of a base method.
BASE_METHODS = {*of_module(denoising), *of_module(finals)}.union(*(_names(each.base_methods) for each in domains.all()))
OVERLAYS = {*of_module(overlays)}.union(*(_names(each.modifiers) for each in domains.all()))

TEXT_ALONE = {"kdrl"}  # modifiers of any base method that make one of language models without it


def presets_for(process: str) -> list[str]:
    """The presets for a process, such as "tokens"."""
    return [name for name, make in PRESETS.items() if make().fits(process)]
