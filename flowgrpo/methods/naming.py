"""Names of a method that Python made: the nearest preset, and the parts in which it differs, as a recipe has them."""

from __future__ import annotations

import dataclasses
from typing import Any

from flowgrpo.data import provenance
from flowgrpo.errors import UserError
from flowgrpo.methods import registry
from flowgrpo.methods.method import Method
from flowgrpo.methods.overlay import with_parts
from flowgrpo.methods.presets import OF_TEXT, PRESETS, TEXT_ALONE
from flowgrpo.user_code import packaged


def recorded(method: Method) -> tuple[str, dict[str, Any]]:
    """Return (preset, parts) of which a recipe makes the same method.

    A class of FILE.py is recorded by its place, another one by its name alone: this process knows it from now on, other
    ones ask for the object. Raises UserError for a part that is no dataclass, and for a value that YAML cannot hold.
    """
    name, base = min(_candidates(method).items(), key=lambda item: len(_differing(item[1], method)))
    parts = {key: _described(part, base.parts().get(key), f"method.{key}")
             for key, part in _differing(base, method).items()}
    if type(base.target) is not type(method.target):
        parts = {"target": _described(method.target, None, "method.target")} | parts
    if _differing(with_parts(base, parts), method):
        raise UserError(f"method: its parts cannot be written to a recipe as they are, beside {name}: {parts}")
    return name, parts


def _candidates(method: Method) -> dict[str, Method]:
    """Return the presets with the method's rollout, and with its target where there are any."""
    made = {name: PRESETS[name]() for name in PRESETS if method.for_tokens or name not in {*OF_TEXT, *TEXT_ALONE}}
    alike = {name: preset for name, preset in made.items() if type(preset.rollout) is type(method.rollout)}
    return {name: preset for name, preset in alike.items() if type(preset.target) is type(method.target)} or alike


def _differing(base: Method, method: Method) -> dict[str, Any]:
    """Return the parts of a method that the base has not, or has otherwise."""
    present = base.parts()
    return {name: part for name, part in method.parts().items()
            if name not in present or _plain(present[name]) != _plain(part)}


def _plain(value: Any) -> Any:
    """Return a part in values that compare by their content."""
    if dataclasses.is_dataclass(value):
        return type(value).__name__, {field.name: _plain(getattr(value, field.name))
                                      for field in dataclasses.fields(value)}
    return [*map(_plain, value)] if isinstance(value, (list, tuple)) else value


def _described(value: Any, present: Any, path: str) -> Any:
    """Return a part as a recipe has it: its type, and its fields that differ from the present part's or the default."""
    if not dataclasses.is_dataclass(value):
        return _value(value, path)
    cls: Any = type(value)
    if type(present) is not cls:
        required = any(field.default is dataclasses.MISSING for field in dataclasses.fields(cls))
        present = None if required else cls()
    fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(cls)}
    return {"type": _type_name(cls)} | {
        name: _described(inner, getattr(present, name, None), f"{path}.{name}") for name, inner in fields.items()
        if present is None or _plain(getattr(present, name)) != _plain(inner)}


def _value(value: Any, path: str) -> Any:
    if isinstance(value, (list, tuple)):
        return [_value(inner, path) for inner in value]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise UserError(f"{path} is a {type(value).__name__}: expected a frozen dataclass, or a value that YAML can hold")


def _type_name(cls: type) -> str:
    """Return the name of a part's class, under which this process has it from now on."""
    if registry.TYPES.get(cls.__name__) is cls:
        return cls.__name__
    value = f"{cls.__module__}:{cls.__qualname__}"
    if names := [name for name, point in packaged(registry.PART_GROUP).items()
                 if point.value == value and name not in registry.TYPES]:
        return names[0]
    name = provenance.place(cls) or f"{registry.OBJECT}{cls.__name__}"
    registry.GIVEN[name] = cls
    return name
