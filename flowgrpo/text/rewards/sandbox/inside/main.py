"""Entry of a process within a boundary: `main(JOB)`.

JOB: a folder with job.json: {mode, code or tests, cpu, memory, files, filter}, and `in`, a program's standard input.
Once confined, each writes "started" to its standard error. Modes:
- program: run `code` as __main__, with its standard input and output.
- definitions: execute `code`, then answer the tests' operations over standard input and output (link.py).
- tests: run each test against the definitions over the link, and write "1" or "0" for each to standard error.
"""

import ast
import builtins
import importlib
import json
import operator
import os
import sys
import types
from typing import Any

from .link import Broken, Link

if sys.platform == "wasi":
    from .wasi import confine, read_from, to_null
else:
    from .confine import confine, read_from, to_null

FILE = "solution.py"  # of the code, in tracebacks
OPERATIONS: dict[str, Any] = {
    "getattr": getattr, "setattr": setattr, "delattr": delattr, "len": len, "iter": iter, "next": next, "str": str,
    "repr": repr, "bool": bool, "hash": hash, "int": int, "float": float, "reversed": reversed, "round": round,
    "call": lambda thing, *args, **keywords: thing(*args, **keywords),
    "isinstance": lambda thing, value: isinstance(value, thing),
    "enter": lambda thing: type(thing).__enter__(thing),
    "exit": lambda thing, *args: type(thing).__exit__(thing, *args),
    "and": operator.and_, "or": operator.or_}


def main(job: str) -> None:
    """Confine this process and do its job."""
    with open(os.path.join(job, "job.json"), encoding="utf-8") as file:
        given = json.load(file)
    source = os.open(os.path.join(job, "in"), os.O_RDONLY) if given["mode"] == "program" else None
    if not confine(given):
        os.write(2, b"no filter of system calls for this machine\n")
        os._exit(1)
    if source is not None:
        read_from(source)
    os.write(2, b"started\n")
    report = to_null(2)
    if given["mode"] == "tests":
        run_tests(given["tests"], report)
    else:
        os.close(report)
        run_code(given["code"], given["mode"] == "program")


def run_code(code: str, program: bool) -> None:
    """Execute the code: as a program, or to answer operations on what it defines."""
    link = None if program else Link(to_null(0), to_null(1), _serve, functions=True)
    module = types.ModuleType("__main__" if program else "solution")
    sys.modules[module.__name__], sys.argv[:] = module, [FILE]
    exec(compile(code, FILE, "exec", dont_inherit=True), module.__dict__)
    if link is not None:
        sys.set_int_max_str_digits(0)
        link.objects.append(module.__dict__)
        link.answer_all()


def _serve(operation: str, thing: Any, args: list, keywords: dict) -> Any:
    """Answer an operation of the tests; without an object one on the code's names."""
    if operation == "names":
        return [name for name in sys.modules["solution"].__dict__ if not name.startswith("__")]
    if operation == "name":
        return sys.modules["solution"].__dict__[args[0]]
    return (OPERATIONS.get(operation) or getattr(operator, operation))(thing, *args, **keywords)


class Names(dict):
    """Global names of the tests: their own, else Python's, else those that the code defines.

    known: names that the code defines. modules: those of standard modules that a test reads attributes of; it gets the
    module itself, since an object of the code's could answer in its place.
    """

    def __init__(self, link: Link) -> None:
        super().__init__(__name__="tests", __builtins__=__builtins__)
        self.link, self.known, self.modules = link, frozenset[str](), frozenset[str]()

    def __missing__(self, name: str) -> Any:
        if name not in self.known or hasattr(builtins, name):
            raise KeyError(name)
        if name in self.modules:
            return importlib.import_module(name)
        return self.link.ask("name", None, name)


def run_tests(tests: list[str], report: int) -> None:
    """Run tests in order, and report each, until the code's process ends."""
    link = Link(to_null(0), to_null(1), _call, functions=False)
    sys.set_int_max_str_digits(0)
    names = Names(link)
    try:
        for number, test in enumerate(tests, 1):
            names.known = frozenset(link.ask("names"))
            # Standard modules of which the test reads attributes alone, such as math in `math.isclose`.
            nodes = [*ast.walk(ast.parse(test))]
            bases = {id(node.value) for node in nodes if isinstance(node, ast.Attribute)}
            found = [node for node in nodes if isinstance(node, ast.Name)]
            otherwise = {node.id for node in found if id(node) not in bases}
            names.modules = frozenset({node.id for node in found} - otherwise) & sys.stdlib_module_names
            os.write(report, b"1" if _passes(test, number, names) else b"0")
    except BaseException:
        pass
    os._exit(0)


def _passes(test: str, number: int, names: Names) -> bool:
    try:
        exec(compile(test, f"test {number}", "exec", dont_inherit=True), names)
        return True
    except Broken:
        raise
    except BaseException:
        return False


def _call(operation: str, thing: Any, args: list, keywords: dict) -> Any:
    if operation != "call" or not isinstance(thing, (types.FunctionType, types.MethodType)):
        raise TypeError("the code may only call functions of the tests")
    return thing(*args, **keywords)
