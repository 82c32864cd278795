"""Layers of the package, and rooms that are loaded where they are used."""

import ast
import dataclasses
import importlib.util
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from graphlib import CycleError, TopologicalSorter
from importlib import import_module
from pathlib import Path

import pytest

from flowgrpo import rewards
from flowgrpo.config import features
from flowgrpo.methods import PRESETS, presets, registry

PACKAGE = Path(__file__).parents[1] / "flowgrpo"

# Bottom first. A room is a file or folder of the package; rooms of one line import each other in no direction. The
# rooms of `text` stand on the floors of the core's: TEXT says on which.
LAYERS = [
    ("errors", "nouns", "parts", "version"),
    ("notebook", "packages"),
    ("domains", "escaped"),
    ("images", "trust"),
    ("cores", "device", "files", "gpus", "host_weights", "loopback", "published", "starter", "user_code"),
    ("types", "config"),
    ("gaussian", "hub"),
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
    ("evaluation",),
    ("export",),
    ("training",),
    ("train",),
    ("arguments",),
    ("run",),
    ("trl",),
    ("contrib",),
    ("serving", "tools"),
    ("__init__",),
    ("cli",),
    ("__main__",)]
HEIGHT = {room: height for height, rooms in enumerate(LAYERS) for room in rooms}
TEXT = {"credit": "advantages", "critic": "training", "evaluation": "evaluation",
        "losses": "objectives", "memory": "training",
        "policies": "policies", "presets": "methods", "rewards": "rewards", "rollouts": "rollouts",
        "samplers": "samplers", "targets": "methods"}
# What stands above the core: the core imports none of it, and names it in tables alone.
ABOVE = {"contrib", "serving", "tools", "__init__", "cli", "__main__"}


def name_of(file: Path) -> str:
    parts = file.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {name_of(file): file for file in sorted(PACKAGE.rglob("*.py"))}
FOLDERS = {name_of(folder) for file in MODULES.values() for folder in file.parents if folder.is_relative_to(PACKAGE)}


def imported_by(nodes: Iterable[ast.AST]) -> Iterator[str]:
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in MODULES)
        elif isinstance(node, ast.ImportFrom) and node.module in MODULES.keys() | FOLDERS:
            for alias in node.names:
                yield inner if (inner := f"{node.module}.{alias.name}") in MODULES else node.module


@pytest.fixture(scope="module")
def trees() -> dict[str, ast.Module]:
    return {name: ast.parse(file.read_text(encoding="utf-8")) for name, file in MODULES.items()}


@pytest.fixture(scope="module")
def imports(trees) -> dict[str, set[str]]:
    """Modules of the package that each of them imports, wherever in it."""
    return {name: set(imported_by(ast.walk(tree))) - {name} for name, tree in trees.items()}


def room(module: str) -> str:
    """The room of a module."""
    _, *inner = module.split(".")
    if inner[:1] == ["text"]:
        return TEXT[inner[1]] if inner[1:] else "images"
    return inner[0] if inner else "__init__"


def circle(graph: dict[str, set[str]]) -> str | None:
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return " imports ".join(reversed(error.args[1]))
    return None


def at_import(tree: ast.Module) -> set[str]:
    """Modules of the package that are imported with one: not inside a function, nor for type checkers alone."""
    def statements(node: ast.AST) -> Iterator[ast.stmt]:
        for inner in ast.iter_child_nodes(node):
            if isinstance(inner, (ast.Import, ast.ImportFrom)):
                yield inner
            elif isinstance(inner, ast.If) and ast.unparse(inner.test) == "TYPE_CHECKING":
                continue
            elif not isinstance(inner, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
                yield from statements(inner)
    return set(imported_by(statements(tree)))


def test_rooms_tools_and_tables_of_names():
    assert {room(module) for module in MODULES} == set(HEIGHT)
    # Neither as an import nor as a name that is loaded later: without `tools` and `cli` a run is the same.
    named = {name for name, file in MODULES.items()
             if re.search(r"flowgrpo[./]tools\b", file.read_text(encoding="utf-8"))}
    assert {room(name) for name in named} == {"tools", "cli"}


def test_imports_point_down(imports):
    """Neither inside a function nor for a type checker."""
    wrong = [f"{module} imports {other}" for module, others in imports.items() for other in others
             if room(module) not in ABOVE and room(other) in ABOVE - {"__init__"}]
    assert not wrong, "\n".join(wrong)
    upward = [f"{module} imports {other}" for module, others in imports.items() for other in others
              if room(module) != room(other) and HEIGHT[room(other)] >= HEIGHT[room(module)]]
    assert not upward, "\n".join(upward)
    assert circle(imports) is None


@pytest.mark.fast
def test_the_core_names_no_module_of_texts(trees):
    """Neither as an import nor as a name that is loaded later, but for the two modules that `domains` lists."""
    texts = {name.removeprefix("flowgrpo.") for name in MODULES if name.startswith("flowgrpo.text.")}
    wrong = []
    for module, tree in trees.items():
        if room(module) in ABOVE or module.startswith("flowgrpo.text"):
            continue
        wrong += [f"{module} imports {other}" for other in imported_by(ast.walk(tree))
                  if other.startswith("flowgrpo.text")]
        named = [str(node.value).partition(":")[0] for node in ast.walk(tree) if isinstance(node, ast.Constant)]
        wrong += [f"{module} names {name}" for name in named if name == "flowgrpo.text"
                  or name.removeprefix("flowgrpo.") in texts]
    assert wrong == ["flowgrpo.domains names flowgrpo.text"]


@pytest.mark.parametrize("folder", sorted(FOLDERS))
def test_no_rooms_of_a_folder_import_each_other(folder, imports):
    """A folder's files and folders, each with all that is in it. Its `__init__` stands above them."""
    depth = folder.count(".") + 1
    inside = {module: room(module) if depth == 1 else module.split(".")[depth] for module in MODULES
              if module.startswith(f"{folder}.")}
    graph: dict[str, set[str]] = {}
    for module, place in inside.items():
        graph.setdefault(place, set()).update(inside[other] for other in imports[module]
                                              if other in inside and inside[other] != place)
    assert circle(graph) is None


def bound(tree: ast.AST) -> set[str]:
    """Names that a module or class defines, imports or sets on an object."""
    found = {node.name for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
    found |= {(alias.asname or alias.name).split(".")[0] for node in ast.walk(tree) if isinstance(node, ast.Import |
              ast.ImportFrom) for alias in node.names}
    return found | {node.id if isinstance(node, ast.Name) else node.attr for node in ast.walk(tree)
                    if isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store)}


@pytest.mark.fast
def test_classes_that_a_docstring_names_are_where_it_says(trees):
    """`module.Class` in the source: a module that moved leaves no name behind."""
    has: dict[str, set[str]] = {}
    for module, tree in trees.items():
        has.setdefault(module.rpartition(".")[2], set()).update(bound(tree))
    for tree in trees.values():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                has.setdefault(node.name, set()).update(bound(node))
    wrong = [f"{module}: {name}" for module in MODULES
             for name in re.findall(r"`((?:\w+\.)+[A-Z]\w*)`", MODULES[module].read_text(encoding="utf-8"))
             if name.split(".")[-1] not in has.get(name.split(".")[-2], ())
             and (name.split(".")[-2] in has or importlib.util.find_spec(name.split(".")[0]) is None)]
    assert wrong == ["flowgrpo.rewards.reward: metadata.KEY"]  # a key of the user


ATTRIBUTES, OWN_IMPORTS = 20, 25  # of a class; of a module, the modules of the package that it imports

# What has more, with its number. A number may only fall, and a line whose number is within the limit goes.
MORE_ATTRIBUTES = {"flowgrpo.config.schema.Config": 27,
                   "flowgrpo.policies.pipelines.pipeline.PipelinePolicy": 32,
                   "flowgrpo.text.policies.causal_lm.CausalLM": 25, "flowgrpo.trl.ddpo.DDPOConfig": 42}
MORE_IMPORTS: dict[str, int] = {}


def attributes(node: ast.ClassDef) -> set[str]:
    """Names that a class sets on itself or on `self`."""
    found = {target.attr for target in ast.walk(node) if isinstance(target, ast.Attribute)
             and isinstance(target.ctx, ast.Store) and isinstance(target.value, ast.Name) and target.value.id == "self"}
    for line in node.body:
        if isinstance(line, (ast.AnnAssign, ast.Assign)):
            targets = [line.target] if isinstance(line, ast.AnnAssign) else line.targets
            found |= {target.id for target in targets if isinstance(target, ast.Name)}
    return found


def test_names_that_scripts_tests_and_examples_import_are_there():
    root, missing = PACKAGE.parent, []
    for file in (each for folder in ("scripts", "tests", "examples") for each in (root / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if not isinstance(node, ast.ImportFrom) or (node.module or "").partition(".")[0] != "flowgrpo":
                continue
            module = import_module(node.module)
            missing += [f"{file.relative_to(root)}:{node.lineno}: {alias.name}" for alias in node.names
                        if not (hasattr(module, alias.name) or hasattr(module, "__path__")
                                and importlib.util.find_spec(f"{node.module}.{alias.name}"))]
    assert missing == []


def above(counts: dict[str, int], limit: int) -> dict[str, int]:
    return {name: count for name, count in counts.items() if count > limit}


@pytest.mark.fast
def test_classes_and_modules_are_small(trees, imports):
    classes = {f"{name}.{node.name}": len(attributes(node)) for name, tree in trees.items()
               if name != "flowgrpo.config.options"  # types of all keys, generated
               for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}
    assert above(classes, ATTRIBUTES) == MORE_ATTRIBUTES
    assert above({name: len(others) for name, others in imports.items()}, OWN_IMPORTS) == MORE_IMPORTS


ROOT = Path(__file__).parents[1]
# Records of features, of which the configuration has keys, and of the domain.
LIGHT = ["flowgrpo.contrib", "flowgrpo.contrib.features", "flowgrpo.text"]
LOADED = "print(*(name for name in sys.modules if name.startswith(('flowgrpo.text', 'flowgrpo.contrib'))))"


def loaded(code: str) -> list[str]:
    """Modules of the two rooms that a process has loaded after some code."""
    done = subprocess.run([sys.executable, "-c", f"import sys\n{code}\n{LOADED}"], cwd=ROOT, capture_output=True,
                          text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1].split()


def test_an_image_run_and_the_presets_of_images_load_no_module_of_language_models(tmp_path):
    options = ["train", "configs/starter.yaml", "--train.epochs=1", "--train.prompts=2", "--train.group=4",
               "--train.updates=1", "--train.steps=4", "--train.lr=1e-3", "--eval.prompts=2", "--eval.steps=2",
               "--eval.every=0", "--device=cpu", f"--output={tmp_path / 'run'}"]
    assert loaded(f"from flowgrpo.cli import main\nassert main({options!r}) == 0") == LIGHT
    made = {name: PRESETS[name]() for name in PRESETS if name not in presets.OF_TEXT}
    # A match of distributions is a feature of contrib, which its presets load.
    of_images = [name for name, method in made.items() if not method.for_tokens and method.loss.distil is None]
    assert len(of_images) > 30
    code = f"""from flowgrpo.config import Config
from flowgrpo.methods import overlay, preset, reads
from flowgrpo.training.extensions import active_extensions
for name in {of_images!r}:
    method = preset(name).on("flow")
    reads.require_types(method)
    list(active_extensions(Config(method=name, reward="scene"), method))
    overlay.preset_and_parts(method)"""
    assert loaded(code) == LIGHT


def test_tables_of_presets_fields_features_and_rewards_name_what_is_there():
    for module, names in presets.OF_DOMAINS.items():
        assert [*presets.of_module(import_module(f"flowgrpo.{module}"))] == names, module
    found = {file.stem for file in (ROOT / "flowgrpo" / "text" / "presets").glob("*.py")} - {"__init__"}
    assert {module.rpartition(".")[2] for module in presets.OF_DOMAINS} == found
    assert {name for name in PRESETS if PRESETS[name]().for_tokens} == {*presets.OF_TEXT} | presets.TEXT_ALONE
    from flowgrpo.text import targets
    classes = [cls for cls in vars(targets).values() if dataclasses.is_dataclass(cls)
               and cls.__module__ == targets.__name__]
    fields = {field.name for cls in classes for field in dataclasses.fields(cls)}
    assert {"decoding", "draws", "relaxation"} <= fields <= registry.NAMES
    for feature in features.all():
        for place in filter(None, (feature.extension, feature.memory, feature.dry_run)):
            assert callable(features.at(place)), place
    for place in rewards.BUILT_IN.values():
        module, name = place.split(":")
        assert callable(getattr(import_module(module), name))
