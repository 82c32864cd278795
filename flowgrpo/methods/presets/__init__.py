"""Named methods: functions from a Method to a Method, which hold what differs.

A new one adds at most one part, one preset and one test. Every public function of the modules here is a preset, and so
is every one of `text.presets`, which TEXT names.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import ModuleType

from flowgrpo.methods.method import Method
from flowgrpo.methods.presets import denoising, finals, overlays
from flowgrpo.methods.registry import ByName

# Presets of language models by module; a test compares.
TEXT = {
    "text.presets.overlays": "entropy_bonus high_entropy llds visurf rl_plus chord relift",
    "text.presets.relaxed": "drakes",
    "text.presets.completions":
        "grpo dr_grpo dapo dcpo gspo cispo rloo reinforce_pp remax ppo topr nft disco reg_grpo real pacs rover "
        "sdpo dpo simpo hypo trpa w_reinforce gtpo grpo_lambda spo_chain spo_tree gigpo s_grpo latr trace_rl "
        "trace_rl_value unirl unirl_sft",
}


def of_module(module: ModuleType) -> dict[str, Callable[..., Method]]:
    """Return the presets of a module by name."""
    return {name: function for name, function in vars(module).items() if inspect.isfunction(function)
            and function.__module__ == module.__name__ and not name.startswith("_")}


OF_TEXT: dict[str, str] = {name: module for module, names in TEXT.items() for name in names.split()}
PRESETS: ByName[Callable[..., Method]] = ByName(
    {**of_module(denoising), **of_module(overlays), **of_module(finals), **OF_TEXT})
# Base methods of denoisers: they name what is sampled and trained. Modifiers change one thing of a base method.
BASE_METHODS = {*of_module(denoising), *of_module(finals), *TEXT["text.presets.relaxed"].split()}
OVERLAYS = {*of_module(overlays), *TEXT["text.presets.overlays"].split()}

TEXT_ALONE = {"kdrl"}  # modifiers of any base method that make one of language models without it


def suited(process: str) -> list[str]:
    """Return the presets for a process, such as "tokens"."""
    return [name for name, make in PRESETS.items() if make().fits(process)]
