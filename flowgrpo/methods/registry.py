"""Parts that a recipe can name, by their place in a method: parts of one place can stand for each other.

`names.json` has the names; a part is imported when it is asked for, so that a run loads no room that it does not use.
"""

import dataclasses
import json
from collections import UserDict
from pathlib import Path
from typing import Any, TypeVar

from flowgrpo import packages
from flowgrpo.advantages.group import AdvantageRule
from flowgrpo.advantages.shaping import Shaping
from flowgrpo.advantages.token_credit import TokenCredit
from flowgrpo.methods import targets
from flowgrpo.methods.groups import Credit, Denoising, Loss
from flowgrpo.methods.supervised import DataLoss
from flowgrpo.objectives.kl import Penalty
from flowgrpo.objectives.ratios import LogRatio
from flowgrpo.objectives.supervised import Balance, TokenWeight
from flowgrpo.objectives.surrogates import Surrogate

T = TypeVar("T")


class ByName(UserDict[str, T]):
    """Objects by name. Made of the object, or the module of the package that has it under its name, "text.targets"."""

    def __getitem__(self, name: str) -> T:
        found: Any = self.data[name]
        if isinstance(found, str):
            found = self.data[name] = packages.load(f"flowgrpo.{found}:{name}")
        return found  # type: ignore[no-any-return]  # an object, once it is loaded


# Parts by place and module, and presets of language models by module; scripts/docs/build_docs.py writes it.
NAMED: dict[str, Any] = json.loads(Path(__file__).with_name("names.json").read_text(encoding="utf-8"))
MODULES: dict[str, dict[str, list[str]]] = NAMED["parts"]
_ROWS = [(name, place, module) for place, modules in MODULES.items() for module, names in modules.items()
         for name in names]
PLACES: dict[str, str] = {name: place for name, place, _ in _ROWS}
TYPES: ByName[type] = ByName[Any]({name: module for name, _, module in _ROWS})
assert len(PLACES) == len(_ROWS), "two parts have one name"
# Classes that parts of a place extend, where they have something in common besides their call.
BASES: dict[str, type] = {
    "target": targets.Target, "shaping": Shaping, "advantage": AdvantageRule, "spread": TokenCredit,
    "log_ratio": LogRatio, "surrogate": Surrogate, "kl": Penalty, "data": DataLoss, "data.balance": Balance,
    "data.token_weight": TokenWeight}
# Types of objects that Python gave in this process, by the names that its runs record: FILE.py:NAME, or OBJECT + NAME.
GIVEN: dict[str, type] = {}
OBJECT = "object:"
# Groups of entry points by which an installed package adds presets and parts.
PRESET_GROUP, PART_GROUP = "flowgrpo.methods", "flowgrpo.parts"
# Fields that some group of some method has, by which recipes name parts; the last four are those of `text`.
NAMES: set[str] = {"target", "decoding", "draws", "relaxation", "scores"} | {
    field.name for cls in (Denoising, Credit, Loss, *vars(targets).values()) if dataclasses.is_dataclass(cls)
    for field in dataclasses.fields(cls)}


def of_place(place: str) -> list[str]:
    return sorted(name for name, at in PLACES.items() if at == place)


def place_of(part: type) -> str | None:
    """The place of a part's class; None of a class that no recipe names."""
    name = part.__name__
    return PLACES[name] if name in PLACES and TYPES[name] is part else None
