"""Objects by name, of which some are loaded when they are asked for: rooms that most runs do without name theirs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import Any, TypeVar

T = TypeVar("T")


class ByName(Mapping[str, T]):
    """Objects by name.

    places: by name the object, or the module of the package that has it under this name, such as "text.targets".
    """

    def __init__(self, places: Mapping[str, T | str]):
        self.places: dict[str, Any] = dict(places)

    def __getitem__(self, name: str) -> T:
        found = self.places[name]
        if isinstance(found, str):
            found = self.places[name] = getattr(import_module(f"flowgrpo.{found}"), name)
        return found  # type: ignore[no-any-return]  # an object, once it is loaded

    def __contains__(self, name: object) -> bool:
        return name in self.places

    def __iter__(self) -> Iterator[str]:
        return iter(self.places)

    def __len__(self) -> int:
        return len(self.places)
