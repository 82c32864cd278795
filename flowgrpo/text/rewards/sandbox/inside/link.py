"""Calls between the process of the tests and that of the code, as lines of JSON. Neither can run the other's code.

The tests see the code's objects as `Remote`. Of the tests' objects the code gets plain data, and functions to call.
"""

import io
import json
import os
from collections.abc import Callable
from typing import Any

from .values import Reader, encode

LONGEST = 2**24  # bytes of a message
# Operations that the tests' process passes on; with another operand only where that is an object of the code as well,
# because an operand shows the expected value to the code.
ALONE = ("call", "getattr", "setattr", "delattr", "getitem", "setitem", "delitem", "len", "iter", "next", "str", "repr",
         "bool", "hash", "int", "float", "index", "abs", "neg", "enter", "exit", "isinstance", "reversed", "round")
PAIRED = ("eq", "ne", "lt", "le", "gt", "ge", "add", "sub", "mul", "matmul", "truediv", "floordiv", "mod", "pow", "and",
          "or", "xor", "lshift", "rshift")


class Broken(BaseException):
    """Error: the other process has ended, or has sent invalid data."""


class Link:
    """One end of the link. serve: answer to an operation: (name, object, arguments, keywords) -> value."""

    def __init__(self, source: int, target: int, serve: Callable[..., Any], functions: bool) -> None:
        self.source, self.target = io.BufferedReader(io.FileIO(source, "rb")), target
        self.serve, self.objects = serve, list[Any]()
        self.reader = Reader(self._resolve, functions)

    def ask(self, operation: str, thing: Any = None, *args: Any, **keywords: Any) -> Any:
        """The other process's answer; raises the exception that it raised there.

        Lists, dictionaries, sets and byte arrays among the arguments take the contents that they have there afterwards.
        """
        self._send(["ask", operation, *map(self._encode, (thing, list(args), keywords))])
        while True:
            message = self._receive()
            if message[0] == "ask":
                self._answer(message)
            elif message[0] == "raise":
                kind, text = self.reader.exception(message[1]), message[2]
                raise kind(text)
            else:
                for place, content in message[2]:
                    _replace(args[place], self.reader.decode(content))
                return self.reader.decode(message[1])

    def answer_all(self) -> None:
        """Answer operations until the other process ends."""
        while True:
            self._answer(self._receive())

    def _answer(self, message: list) -> None:
        try:
            _, operation, thing, args, keywords = message
            thing, args, keywords = map(self.reader.decode, (thing, args, keywords))
            result = self._encode(self.serve(operation, thing, args, keywords))
            changed = [[place, self._encode(value)] for place, value in enumerate(args)
                       if type(value) in (list, dict, set, bytearray)]
        except Broken:
            raise
        except BaseException as error:
            self._send(["raise", [base.__name__ for base in type(error).__mro__], str(error)[:1000]])
        else:
            self._send(["done", result, changed])

    def _send(self, message: list) -> None:
        data = json.dumps(message).encode() + b"\n"
        while data:
            try:
                data = data[os.write(self.target, data):]
            except OSError:
                raise Broken from None

    def _receive(self) -> list:
        line = self.source.readline(LONGEST)
        try:
            message = json.loads(line)
        except (ValueError, RecursionError):
            raise Broken from None
        if not isinstance(message, list) or not message:
            raise Broken
        return message

    def _encode(self, value: Any) -> Any:
        return encode(value, self._reference)

    def _reference(self, value: Any) -> list:
        if isinstance(value, Remote):
            return ["yours", value._number]
        for number, known in enumerate(self.objects):
            if known is value:
                return ["mine", number]
        self.objects.append(value)
        return ["mine", len(self.objects) - 1]

    def _resolve(self, kind: str, number: Any) -> Any:
        if kind == "yours":
            return self.objects[number]
        if kind != "mine" or type(number) is not int:
            raise ValueError("not a message")
        return Remote(self, number)


def _replace(target: Any, content: Any) -> None:
    """Give a collection the contents of another one of its type."""
    if type(target) is not type(content) or target == content:
        return
    if isinstance(target, (list, bytearray)):
        target[:] = content
    elif isinstance(target, (dict, set)):
        target.clear()
        target.update(content)


class Remote:
    """Object of the other process."""

    _link: Link
    _number: int

    def __init__(self, link: Link, number: int) -> None:
        object.__setattr__(self, "_link", link)
        object.__setattr__(self, "_number", number)

    def __getattr__(self, name: str) -> object:
        return self._link.ask("getattr", self, name)


def _special_method(operation: str) -> Callable[..., Any]:
    def method(self: Remote, *args: Any, **keywords: Any) -> Any:
        if operation in PAIRED and not isinstance(args[0], Remote):
            return NotImplemented
        return self._link.ask(operation, self, *args, **keywords)

    return method


for _name in (*ALONE, *PAIRED):
    if _name != "getattr":
        setattr(Remote, f"__{'instancecheck' if _name == 'isinstance' else _name}__", _special_method(_name))
