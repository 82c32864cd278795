"""Parts of a method: the decorator of one, and the ranges of its fields.

A part states everything about itself where it is written: its place in a method, what it reads, and which values its
fields take. `methods/names.json` lists the parts by name without importing them.
"""

import dataclasses
import inspect
import json
import math
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from types import NoneType, SimpleNamespace
from typing import Any, Literal, TypeVar, dataclass_transform, get_args, get_origin, get_type_hints

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Taken:
    """Values that a field takes: base class of `Range` and `OneOf`.

    words: the text of messages, where it is not the range's own. named: a message begins with the part's name.
    optional: the field takes None besides; its type says so.
    """

    words: str = ""
    named: bool = True
    optional: bool = False


@dataclass(frozen=True)
class Range(Taken):
    """Numbers from `AtLeast` a bound, or `Above` it.

    to, below: the largest number, or the one below which it stays; None: neither.
    """

    bound: float
    to: float | None = field(default=None, kw_only=True)
    below: float | None = field(default=None, kw_only=True)

    def takes(self, value: Any) -> bool:
        """True for a number between the bounds, and for None where the field may be left out."""
        if value is None and self.optional:
            return True
        begins = self.bound < value if isinstance(self, Above) else self.bound <= value
        return bool(begins and (self.to is None or value <= self.to) and (self.below is None or value < self.below))


class AtLeast(Range):
    def __str__(self) -> str:
        if self.bound == -math.inf:
            return f"{self.to:g} or less"
        if self.below not in (None, math.inf):
            return f"{self.bound:g} to below {self.below:g}"
        return f"{self.bound:g} or more" if self.to is None else f"{self.bound:g} to {self.to:g}"


class Above(Range):
    def __str__(self) -> str:
        if self.bound == -math.inf:
            return "a finite number"
        if self.below not in (None, math.inf):
            return f"between {self.bound:g} and {self.below:g}"
        return f"above {self.bound:g}" if self.to is None else f"above {self.bound:g} to {self.to:g}"


@dataclass(frozen=True)
class OneOf(Taken):
    """Names of a table, where `Literal` would repeat them."""

    known: Collection[str]

    def takes(self, value: Any) -> bool:
        """True for one of the names."""
        return value in [*self.known] or value is None and self.optional

    def __str__(self) -> str:
        return f"one of {', '.join(self.known)}"


@dataclass_transform(frozen_default=True)
def part(place: str | None = None, *, target: str | None = None, jointly: Mapping[str, str] | None = None,
         **capabilities: bool | int | str | tuple[str, ...] | Callable[[Any], Any]) -> Callable[[type[T]], type[T]]:
    """Make a class a part: a frozen dataclass that goes to a place of a method.

    The types of its fields state their ranges: `Annotated[float, Above(0)]`, `Literal["mean", "sum"]`. Another value is
    a ValueError. A field of type `tuple[...]` takes a recipe's list. The `__post_init__` of a base class runs next, and
    the class's own last.

    place: a field of a method or of a part, such as "advantage" or "kl.schedule"; None of a base class of parts.
    target: what of a target it is for, of `Target.offers`; None: it goes with any.
    jointly: by fields that one message names together, such as "low high", what it expects of them.
    capabilities: class attributes that say what it reads or can do, such as reads_groups=True; a function of the part
        where its fields decide.
    """
    messages = {name: (names.split(), words) for names, words in (jointly or {}).items() for name in names.split()}
    stated = capabilities if target is None else capabilities | {"reads_target": target}

    def make(cls: type[T]) -> type[T]:
        own, takes = cls.__dict__.get("__post_init__"), _field_ranges(cls)
        lists = [name for name, annotation in inspect.get_annotations(cls).items()
                 if str(annotation).startswith("tuple[") and str(annotation).endswith("]")]

        def __post_init__(self: Any) -> None:
            # Recipes have lists where frozen fields are tuples.
            for name in lists:
                if not isinstance(value := getattr(self, name), (tuple, dict)):
                    object.__setattr__(self, name, tuple(value))
            for name, known in takes.items():
                if not known.takes(getattr(self, name)):
                    raise ValueError(_refusal(self, *messages.get(name, ([name], known.words or str(known))),
                                              named=known.named))
            if (inherited := getattr(super(cls, self), "__post_init__", None)) is not None:
                inherited()
            if own is not None:
                own(self)

        for name, value in (stated | {"__ranges__": takes, "__post_init__": __post_init__}).items():
            setattr(cls, name, property(value) if callable(value) and name in stated else value)
        return dataclass(frozen=True)(cls)

    return make


def ranges(cls: type) -> dict[str, Range | OneOf]:
    """Ranges of a part's fields by name, those of its bases with them."""
    return {name: known for base in reversed(cls.__mro__) for name, known in vars(base).get("__ranges__", {}).items()}


def settings(part: type) -> dict[str, str]:
    """A part's fields by name as text, with their defaults and what they take: `size=4 (1 or more)`."""
    known, texts = ranges(part), {}
    for item in dataclasses.fields(part):
        text, default = item.name, item.default
        if dataclasses.is_dataclass(default):  # a part, which is listed by itself
            text += f"={type(default).__name__}"
        elif default is not dataclasses.MISSING:
            text += "=..." if isinstance(default, str) and len(default) > 40 else f"={json.dumps(default)}"
        taken = known.get(item.name)
        values = "|".join(taken.known) if isinstance(taken, OneOf) else taken
        texts[item.name] = f"{text} ({values})" if values else text
    return texts


def _field_ranges(cls: type) -> dict[str, Range | OneOf]:
    names: dict[str, Any] = vars(sys.modules[cls.__module__])
    found: dict[str, Range | OneOf] = {}
    for name, annotation in inspect.get_annotations(cls).items():
        if "ClassVar[" in str(annotation):
            continue
        with suppress(NameError):  # of what is imported for type checkers alone, which has no range
            hint = get_type_hints(SimpleNamespace(__annotations__={name: annotation}), names, include_extras=True)[name]
            inner = get_args(hint)
            if get_origin(hint) is Literal:
                found[name] = OneOf(inner, words=" or ".join(inner) if len(inner) == 2 else "")
            elif known := next((item for item in getattr(hint, "__metadata__", ())
                                if isinstance(item, (Range, OneOf))), None):
                found[name] = replace(known, optional=NoneType in get_args(inner[0]))
    return found


def _refusal(part: object, names: Sequence[str], expected: str, named: bool) -> str:
    values = [getattr(part, name) for name in names]
    first, *others = [f"{value!r}" if isinstance(value, str) else f"{value}" for value in values]
    *listed, last = [f"{names[0]} is {first}", *(f"{name} {value}" for name, value in zip(names[1:], others))]
    got = f"{', '.join(listed)} and {last}" if listed else last
    return f"{type(part).__name__}: " * named + f"{got}, expected {expected}"
