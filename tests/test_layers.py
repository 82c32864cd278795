"""Layers of the package: imports point down, between rooms and within them, and no modules import each other in a
circle.

All imports count: at the top of a module, inside functions, and those for type checkers alone.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "flowgrpo"

# Bottom first. A room is a file or folder of the package; rooms of one line import each other's in no direction.
LAYERS = [
    ("errors", "ranges", "version"),
    ("escaped", "trust"),
    ("device", "files", "gpus", "loopback", "packages", "starter", "user_code"),
    ("types", "config"),
    ("gaussian",),
    ("data", "objectives"),
    ("samplers",),
    ("advantages",),
    ("distributed", "storage"),
    ("log",),
    ("curriculum",),
    ("methods",),
    ("policies",),
    ("rewards",),
    ("rollouts",),
    ("check", "evaluation"),
    ("export", "vote"),
    ("training",),
    ("train",),
    ("dry_run",),
    ("run",),
    ("bench",),
    ("__init__",),
    ("cli",),
    ("__main__",),
]
HEIGHT = {room: height for height, rooms in enumerate(LAYERS) for room in rooms}


def name_of(file: Path) -> str:
    parts = file.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {name_of(file): file for file in sorted(PACKAGE.rglob("*.py"))}


def imported(file: Path) -> Iterator[str]:
    """Modules of the package that a file imports, wherever in it."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in MODULES)
        elif isinstance(node, ast.ImportFrom) and node.module in MODULES:
            for alias in node.names:
                yield inner if (inner := f"{node.module}.{alias.name}") in MODULES else node.module


IMPORTS = {name: set(imported(file)) - {name} for name, file in MODULES.items()}


def room(module: str) -> str:
    return module.split(".")[1] if "." in module else "__init__"


def circle(graph: dict[str, set[str]]) -> str | None:
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return " imports ".join(reversed(error.args[1]))
    return None


def test_every_room_has_a_layer():
    assert {room(module) for module in MODULES} == set(HEIGHT)


def test_imports_point_to_lower_layers():
    upward = [f"{module} imports {other}" for module, others in IMPORTS.items() for other in others
              if room(module) != room(other) and HEIGHT[room(other)] >= HEIGHT[room(module)]]
    assert not upward, "\n".join(upward)


def test_no_modules_import_each_other():
    assert circle(IMPORTS) is None


@pytest.mark.parametrize("folder", [name for name, file in MODULES.items() if file.name == "__init__.py"])
def test_no_rooms_of_a_folder_import_each_other(folder):
    """A folder's files and folders, each with all that is in it. Its `__init__` stands above them."""
    depth = folder.count(".") + 1
    inside = {module: module.split(".")[depth] for module in MODULES if module.startswith(f"{folder}.")}
    graph: dict[str, set[str]] = {}
    for module, place in inside.items():
        graph.setdefault(place, set()).update(inside[other] for other in IMPORTS[module]
                                              if other in inside and inside[other] != place)
    assert circle(graph) is None


LONGEST_FILE, LONGEST_FUNCTION = 600, 80  # lines


def test_files_and_functions_are_short():
    sources = {name: file.read_text(encoding="utf-8") for name, file in MODULES.items()}
    assert {name for name, text in sources.items() if len(text.splitlines()) > LONGEST_FILE} == set()
    assert {f"{name}.{node.name}" for name, text in sources.items() for node in ast.walk(ast.parse(text))
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
            and node.end_lineno - node.lineno >= LONGEST_FUNCTION} == set()
