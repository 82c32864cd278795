"""Methods by name: presets stack, a recipe's `parts` are laid over them, and a method of Python gets its names.

`preset("mix_grpo", "grpo_guard")`, on the command line `--method mix_grpo+grpo_guard`. No other module reads a
method's name. A method that Python made is recorded as the nearest preset and the parts in which it differs.
"""

import dataclasses
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from flowgrpo.data import provenance
from flowgrpo.errors import UserError, nearest
from flowgrpo.methods import reads, registry
from flowgrpo.methods.method import Method
from flowgrpo.methods.presets import BASE_METHODS, OF_TEXT, OVERLAYS, PRESETS, TEXT_ALONE
from flowgrpo.user_code import call_user_code, from_file, group_entry_points


def preset(*names: str) -> Method:
    """Stack presets from left to right: preset("mix_grpo", "grpo_guard") or preset("mix_grpo+grpo_guard"). Raises
    UserError for an unknown one, and for two base methods."""
    method = Method()
    chain = [part.strip() for joined in names for part in joined.split("+")]
    functions = {name: _preset(name) for name in chain}
    if len(bases := [name for name in chain if name in BASE_METHODS]) > 1:
        raise UserError(f"method {'+'.join(names)}: got the base methods {bases[0]} and {bases[1]}, expected one: keep "
                        "one of them, and add modifiers such as grpo_guard")
    for name in chain:
        try:
            method = functions[name](method)
        except UserError:  # it names the preset
            raise
        except ValueError as error:
            raise UserError(f"method {'+'.join(names)}: {error}") from None
    for base in bases:
        if type(PRESETS[base]().target) is not type(method.target):
            raise UserError(f"method {'+'.join(names)}: {base} trains {PRESETS[base]().target.trains}, the other "
                            f"presets {method.target.trains}: leave {base} or the other out")
    return method


def _preset(name: str) -> Callable[..., Method]:
    """The preset of a name, of FILE.py:NAME or of an installed package. Raises UserError."""
    if name in PRESETS:
        return PRESETS[name]
    points = {} if ".py:" in name else group_entry_points(registry.PRESET_GROUP)
    if ".py:" in name:
        function = from_file(name, "method")
    elif name in points:
        function = call_user_code(f"method {name!r} does not import", points[name].load)
    else:
        raise UserError(f"unknown method {name!r}{nearest(name, [*PRESETS, *points])} (`flowgrpo list methods` lists "
                        "all; or path/to/file.py:function)")
    return lambda method: _apply(name, function, method)


def _apply(name: str, function: Any, method: Method) -> Method:
    """function(method). Raises UserError if that fails or is no method."""
    if isinstance(function, type) and dataclasses.is_dataclass(function):
        place = next((place for place, base in registry.BASES.items() if issubclass(function, base)), "PLACE")
        raise UserError(f"method {name}: got a part, expected a function from a method to a method: name the part by "
                        f"its place, parts: {{{place}: {{type: {name}}}}}")
    if not callable(function):
        raise UserError(f"method {name}: got a value of type {type(function).__name__}, expected a function from a "
                        "method to a method")
    changed = call_user_code(f"method {name}", function, method)
    if not isinstance(changed, Method):
        raise UserError(f"method {name}: returned a {type(changed).__name__}, expected a method, such as "
                        "method.having(roots=1)")
    return changed


def with_parts(method: Method, parts: dict[str, Any]) -> Method:
    """Lay a recipe's `parts` over a method: {"plan": {"size": 2}, "kernel": {"type": "CPS", "level": 0.8}}.
    A part is named by its field, whichever group has it; the target comes first. Raises UserError."""
    for name in sorted(parts, key=lambda name: name != "target"):
        present = method.parts() | {"target": method.target}
        if name not in present:
            if name in registry.NAMES:
                value = parts[name]
                kind = value["type"] if isinstance(value, dict) and "type" in value else value
                raise UserError(reads.refusal(method, name, f"parts.{name} {kind}"))
            raise UserError(f"unknown key parts.{name}{nearest(name, list(present))}")
        holder = method if hasattr(method, name) else getattr(method, method.group_of(name))
        part = _overlay_value(present[name], parts[name], f"parts.{name}", _optional(holder, name))
        method = _build(method.having, {name: part}, "parts")
    return method


def _optional(record: Any, name: str) -> bool:
    return any(str(field.type).endswith("| None") for field in dataclasses.fields(record) if field.name == name)


def _overlay_value(part: Any, value: Any, path: str, optional: bool) -> Any:
    """A field's part with a recipe's value laid over it. optional: the field may be None."""
    if value is None and optional:
        return None
    if dataclasses.is_dataclass(part) and not isinstance(value, dict):
        raise UserError(f"{path}: got {value!r}, expected keys with values, such as {{type: {type(part).__name__}}}")
    if isinstance(value, bool) and type(part) in (int, float):
        raise UserError(f"{path}: got {value!r}, expected a number")
    # A mapping for a part, for the place of an absent one, or in a number's place.
    nested = isinstance(value, dict) and (part is None or dataclasses.is_dataclass(part) or "type" in value)
    return _overlay(part, value, path) if nested else value


def _overlay(part: Any, changes: dict[str, Any], path: str) -> Any:
    hint = "" if "type" in changes else (
        f" ({path} is {type(part).__name__}; a recipe's parts may be meant for another method: --parts={{}} "
        "drops them)")
    if "type" in changes:
        changes = dict(changes)
        cls = _part_type(part, changes.pop("type"), path)
        if type(part) is not cls:
            if any(field.default is dataclasses.MISSING for field in dataclasses.fields(cls)):
                return _build(cls, changes, path)
            part = cls()
    elif part is None:
        known = registry.of_place(_place(path))
        raise UserError(f"{path}: got {changes!r}, expected " + (
            f"a type with it, such as {{type: {known[0]}}}" if known else "a value, no keys"))
    fields = {field.name: getattr(part, field.name) for field in dataclasses.fields(part)}
    for key in changes:
        if key not in fields:
            raise UserError(f"unknown key {path}.{key}{nearest(key, list(fields))}{hint}")
    values = {key: _overlay_value(fields[key], value, f"{path}.{key}", _optional(part, key))
              for key, value in changes.items()}
    return _build(lambda **kept: replace(part, **kept), values, path)


def _part_type(part: Any, name: Any, path: str) -> type:
    """The type of that name, which goes where `part` stands, or to the place that the path ends with."""
    place = registry.place_of(type(part)) or _place(path)
    if name in registry.GIVEN:
        return registry.GIVEN[name]
    if str(name).startswith(registry.OBJECT):
        raise UserError(f"{path}.type: {name} was an object of a Python run, in no file: pass it again, "
                        "flowgrpo.align(..., method=METHOD), or put its class at the top level of a file")
    if name in registry.TYPES:
        if registry.PLACES[name] != place:
            known = ", ".join(registry.of_place(place))
            raise UserError(f"{path}.type: got {name}, expected "
                            f"{'one of ' + known if known else 'a value, not a part'}")
        return registry.TYPES[name]
    points = group_entry_points(registry.PART_GROUP)
    if ".py:" in str(name):
        cls: Any = from_file(name, "part")
    elif name in points:
        cls = call_user_code(f"part {name!r} does not import", points[name].load)
    else:
        names = [*(registry.of_place(place) or registry.TYPES), *points]
        raise UserError(f"{path}.type: unknown part {name!r}{nearest(str(name), sorted(names))}")
    base = registry.BASES.get(place, object)
    if not (isinstance(cls, type) and dataclasses.is_dataclass(cls) and issubclass(cls, base)):
        of = f" that extends {base.__module__}.{base.__name__}" if base is not object else ""
        raise UserError(f"{path}.type: got {name}, expected a frozen dataclass{of}")
    return cls


def _place(path: str) -> str:
    name = path.rpartition(".")[2]
    return next((place for place in registry.MODULES if place.rpartition(".")[2] == name), name)


def _build(make: Callable[..., Any], values: dict[str, Any], path: str) -> Any:
    try:
        return make(**values)
    except (TypeError, ValueError) as error:
        raise UserError(f"{path}: {error}") from None


def overlays(method: str) -> dict[str, tuple[Method, Method]]:
    """The method before and after each preset of a chain that changes another one, by name."""
    pairs = {}
    names = [name.strip() for name in method.split("+")]
    for count, name in enumerate(names):
        if name in OVERLAYS:
            before = preset(*names[:count]) if count else Method()
            pairs[name] = before, PRESETS[name](before)
    return pairs


def preset_and_parts(method: Method) -> tuple[str, dict[str, Any]]:
    """(preset, parts) of which a recipe makes the same method.
    A class of FILE.py is recorded by its place, another one by its name alone: this process knows it from now on, other
    ones ask for the object. Raises UserError for a part that is no dataclass, and for a value that YAML cannot hold."""
    name, base = min(_candidates(method).items(), key=lambda item: len(_differing(item[1], method)))
    parts = {key: _describe(part, base.parts().get(key), f"method.{key}")
             for key, part in _differing(base, method).items()}
    if type(base.target) is not type(method.target):
        parts = {"target": _describe(method.target, None, "method.target")} | parts
    if _differing(with_parts(base, parts), method):
        raise UserError(f"method: its parts cannot be written to a recipe as they are, beside {name}: {parts}")
    return name, parts


def _candidates(method: Method) -> dict[str, Method]:
    made = {name: PRESETS[name]() for name in PRESETS if method.for_tokens or name not in {*OF_TEXT, *TEXT_ALONE}}
    alike = {name: preset for name, preset in made.items() if type(preset.rollout) is type(method.rollout)}
    return {name: preset for name, preset in alike.items() if type(preset.target) is type(method.target)} or alike


def _differing(base: Method, method: Method) -> dict[str, Any]:
    present = base.parts()
    return {name: part for name, part in method.parts().items()
            if name not in present or _plain(present[name]) != _plain(part)}


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return type(value).__name__, {field.name: _plain(getattr(value, field.name))
                                      for field in dataclasses.fields(value)}
    return [*map(_plain, value)] if isinstance(value, (list, tuple)) else value


def _describe(value: Any, present: Any, path: str) -> Any:
    """A part as a recipe has it: its type, and its fields that differ from the present part's or the default."""
    if not dataclasses.is_dataclass(value):
        return _value(value, path)
    cls: Any = type(value)
    if type(present) is not cls:
        required = any(field.default is dataclasses.MISSING for field in dataclasses.fields(cls))
        present = None if required else cls()
    fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(cls)}
    return {"type": _type_name(cls)} | {
        name: _describe(inner, getattr(present, name, None), f"{path}.{name}") for name, inner in fields.items()
        if present is None or _plain(getattr(present, name)) != _plain(inner)}


def _value(value: Any, path: str) -> Any:
    if isinstance(value, (list, tuple)):
        return [_value(inner, path) for inner in value]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise UserError(f"{path} is a {type(value).__name__}: expected a frozen dataclass, or a value that YAML can hold")


def _type_name(cls: type) -> str:
    """The name of a part's class, under which this process has it from now on."""
    if registry.TYPES.get(cls.__name__) is cls:
        return cls.__name__
    value = f"{cls.__module__}:{cls.__qualname__}"
    if names := [name for name, point in group_entry_points(registry.PART_GROUP).items()
                 if point.value == value and name not in registry.TYPES]:
        return names[0]
    name = provenance.place(cls) or f"{registry.OBJECT}{cls.__name__}"
    registry.GIVEN[name] = cls
    return name
