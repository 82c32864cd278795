"""Values in the messages of link.py: plain data by value, all else by a number that its owner resolves."""

import builtins
import datetime
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from typing import Any

# Types and exceptions go by name, so that each process takes its own.
NAMED: dict[str, Any] = {name: thing for name, thing in vars(builtins).items()
         if isinstance(thing, type) and not name.startswith("_")} | {
    "Fraction": Fraction, "Decimal": Decimal, "date": datetime.date, "datetime": datetime.datetime,
    "NotImplemented": NotImplemented, "Ellipsis": Ellipsis}
# Functions of Python go to the code by name as well, but are not taken from it.
FUNCTIONS = {name: thing for name, thing in vars(builtins).items()
             if callable(thing) and not isinstance(thing, type) and not name.startswith("_")}
TEXTS: dict[type, tuple[Callable[[Any], str], Callable[[str], Any]]] = {
    bytes: (bytes.hex, bytes.fromhex), bytearray: (bytearray.hex, bytearray.fromhex), Fraction: (str, Fraction),
    Decimal: (str, Decimal), datetime.date: (datetime.date.isoformat, datetime.date.fromisoformat),
    datetime.datetime: (datetime.datetime.isoformat, datetime.datetime.fromisoformat)}
SEQUENCES: tuple[Any, ...] = (list, tuple, set, frozenset)
OF_TEXT, OF_SEQUENCE = {kind.__name__: kind for kind in TEXTS}, {kind.__name__: kind for kind in SEQUENCES}
SCALARS = (bool, int, float, str)


def encode(value: Any, reference: Callable[[Any], list]) -> Any:
    """A value as JSON. reference: message of an object that does not go by value.
    Subclasses go as the plain type below them, such as a named tuple as a tuple."""
    if value is None or type(value) in SCALARS:
        return value
    if isinstance(value, type):
        for name, thing in NAMED.items():
            if value is thing:
                return ["named", name]
        if issubclass(value, BaseException):
            return ["exception", [base.__name__ for base in value.__mro__]]
        return reference(value)
    if value is NotImplemented or value is Ellipsis:
        return ["named", repr(value)]
    for scalar in SCALARS:
        if isinstance(value, scalar):
            return scalar(value)
    if isinstance(value, dict):
        return ["dict", [[encode(key, reference), encode(inner, reference)] for key, inner in value.items()]]
    if isinstance(value, (complex, range)):
        parts = [value.real, value.imag] if isinstance(value, complex) else [value.start, value.stop, value.step]
        return [type(value).__name__, parts]
    for kind in SEQUENCES:
        if isinstance(value, kind):
            return [kind.__name__, [encode(inner, reference) for inner in value]]
    for kind, (write, _) in TEXTS.items():
        if type(value) is kind:
            return [kind.__name__, write(value)]
    for name, function in FUNCTIONS.items():
        if value is function:
            return ["function", name]
    return reference(value)


class Reader:
    """Reader of messages. functions: accept FUNCTIONS by name. resolve: object of a reference."""

    def __init__(self, resolve: Callable[[str, Any], Any], functions: bool) -> None:
        self.resolve, self.functions = resolve, functions
        self.exceptions: dict[str, type] = {}

    def decode(self, message: Any) -> Any:
        """The value of a message. Raises ValueError, TypeError, KeyError for a wrong message."""
        if message is None or type(message) in SCALARS:
            return message
        kind, inner = message
        if kind == "dict":
            return {self.decode(key): self.decode(value) for key, value in inner}
        if kind in OF_SEQUENCE:
            return OF_SEQUENCE[kind](map(self.decode, inner))
        if kind in OF_TEXT:
            return TEXTS[OF_TEXT[kind]][1](inner)
        if kind == "complex":
            return complex(*inner)
        if kind == "range":
            return range(*inner)
        if kind == "named":
            return NAMED[inner]
        if kind == "function" and self.functions:
            return FUNCTIONS[inner]
        if kind == "exception":
            return self.exception(inner)
        return self.resolve(kind, inner)

    def exception(self, names: list[str]) -> type:
        """The class of an exception with these names of its bases, made here if it is none of Python's."""
        base = next(NAMED[name] for name in names if name in NAMED and issubclass(NAMED[name], BaseException))
        if names[0] == base.__name__:
            return base
        return self.exceptions.setdefault(names[0], type(str(names[0]), (base,), {}))
