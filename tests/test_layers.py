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


ATTRIBUTES, OWN_IMPORTS = 20, 25  # of a class; of a module, the modules of the package that it imports

# What has more, with its number. A number may only fall, and a line whose number is within the limit goes.
MORE_ATTRIBUTES = {"flowgrpo.config.schema.Config": 25, "flowgrpo.config.sections.Train": 27,
                   "flowgrpo.policies.pipelines.pipeline.PipelinePolicy": 32}
MORE_IMPORTS = {"flowgrpo.methods.registry": 73, "flowgrpo.run": 48, "flowgrpo.check.pipelines": 35,
                "flowgrpo.evaluation.images": 30, "flowgrpo.evaluation.evaluate": 29,
                "flowgrpo.policies.pipelines.pipeline": 28, "flowgrpo.methods.validate": 27}


def attributes(node: ast.ClassDef) -> set[str]:
    """Names that a class sets on itself or on `self`."""
    found = {target.attr for target in ast.walk(node) if isinstance(target, ast.Attribute)
             and isinstance(target.ctx, ast.Store) and isinstance(target.value, ast.Name) and target.value.id == "self"}
    for line in node.body:
        if isinstance(line, (ast.AnnAssign, ast.Assign)):
            targets = [line.target] if isinstance(line, ast.AnnAssign) else line.targets
            found |= {target.id for target in targets if isinstance(target, ast.Name)}
    return found


def above(counts: dict[str, int], limit: int) -> dict[str, int]:
    return {name: count for name, count in counts.items() if count > limit}


def test_classes_have_few_attributes():
    classes = {f"{name}.{node.name}": len(attributes(node)) for name, file in MODULES.items()
               for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))) if isinstance(node, ast.ClassDef)}
    assert above(classes, ATTRIBUTES) == MORE_ATTRIBUTES


def test_modules_import_few_of_ours():
    assert above({name: len(others) for name, others in IMPORTS.items()}, OWN_IMPORTS) == MORE_IMPORTS
