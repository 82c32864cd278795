"""Recipes by name, those of the package and files; and those that extend another one: `extends: flux_dev.yaml`, or the
packaged `extends: flux_dev`, at the top of a recipe.

A recipe inherits every key of its base that it does not set itself:

- sections, such as `train`, key by key;
- `parts` part by part, unless the recipe names a `method`: another method has other parts;
- any other key, such as `reward` or `eval.rewards`, as a whole;
- not `name`, which is that of the recipe's own file.

A base may extend another recipe in turn. A run records the result, without `extends`.
"""

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from flowgrpo.config.schema import sections
from flowgrpo.errors import UserError, nearest
from flowgrpo.files import at_home, beside

FOLDER = Path(__file__).parents[1] / "recipes"  # a link to configs/ in a clone, files in an installed package


def names() -> list[str]:
    return sorted(file.stem for file in FOLDER.glob("*.yaml"))


def papers() -> list[str]:
    return sorted(f"papers/{file.stem}" for file in (FOLDER / "papers").glob("*.yaml"))


def is_packaged(recipe: Path) -> bool:
    """True for a recipe of the package; a link counts as what it leads to."""
    return recipe.resolve().is_relative_to(FOLDER.resolve())


def foreign(recipe: Path) -> str | None:
    """The reason, in words, why a recipe is not the user's; None for a packaged one and one below the working folder.

    A recipe in a repository of its own below the working folder was cloned there: it is not the user's.
    """
    file, here = recipe.resolve(), Path.cwd().resolve()
    if is_packaged(file):
        return None
    if not file.is_relative_to(here):
        return "neither packaged nor below the working folder"
    between = file.parents[:len(file.parents) - len(here.parents) - 1]
    return "in a repository of its own" if any((folder / ".git").exists() for folder in between) else None


def locate(given: str | Path) -> Path:
    """File of a recipe: the file itself if there is one, else the packaged recipe of that name, such as sdxl_24gb or
    papers/flow_grpo_ocr.

    Raises UserError for a name that is neither. A path that is no name is returned as it is, whether it exists or not.
    """
    path = Path(at_home(str(given)))
    if path.parts[:1] == ("papers",) and not path.exists() and (packaged := FOLDER / f"{path}.yaml").is_file():
        return packaged
    named = path.name == str(given) and not path.suffix
    if path.exists() and not (path.is_dir() and named and path.name in names()) or not named:
        return path
    if path.name not in names():
        raise UserError(f"no recipe {path.name!r}{nearest(path.name, names())}; `flowgrpo list recipes` has the "
                        "packaged ones, and a file is given with its ending, such as mine.yaml")
    return FOLDER / f"{path.name}.yaml"


KEY = "extends"


def base_of(raw: dict[str, Any], path: Path, below: Sequence[Path]) -> Path | None:
    """Take `extends` out of a recipe's keys; return the file that it names: relative to the recipe's own, or packaged.

    path: of the recipe. below: recipes that extend it, the first one first. None if the recipe extends none.
    Raises UserError for a value that is no file, and for recipes that extend each other in a circle.
    """
    if KEY not in raw:
        return None
    value = raw.pop(KEY)
    if not isinstance(value, str) or not value:
        raise UserError(f"{path}: {KEY}: got {value!r}, expected the file of one recipe, such as flux_dev.yaml")
    try:
        base = beside(path, value)
    except UserError as error:
        raise UserError(f"{path}: {KEY}: {error}") from None
    if not base.exists() and value in names():
        base = locate(value)
    if not base.is_file():
        others = sorted(file.name for file in base.parent.glob("*.yaml") if file.name != path.name)
        raise UserError(f"{path}: {KEY}: no recipe at {base}{nearest(base.name, others)}")
    chain = [*below, path]
    if base.resolve() in [file.resolve() for file in chain]:
        circle = " -> ".join(file.name for file in [*chain, base])
        raise UserError(f"{path}: {KEY}: recipes extend each other in a circle: {circle}; leave one {KEY} out")
    return base


def merge(base: dict[str, Any], raw: dict[str, Any]) -> dict[str, Any]:
    """A recipe's keys over those of its base."""
    left = {key: value for key, value in base.items() if key != "name"}
    if "method" in raw:
        left.pop("parts", None)
    return over(left, raw, {*sections(), "parts"})


def keys_set(raw: dict[str, Any]) -> list[str]:
    """Dotted keys that a recipe sets, as `merge` takes them: those of sections, and the others whole."""
    inner = {*sections(), "parts"}
    return [path for key, value in raw.items() for path in
            ([f"{key}.{name}" for name in value] if key in inner and isinstance(value, dict) else [key])]


def flat(nested: dict[str, Any], within: Collection[str] | None = None, above: str = "") -> dict[str, Any]:
    """Values of nested dictionaries under dotted keys. within: dotted keys of those that are opened; None: all are."""
    values: dict[str, Any] = {}
    for key, value in nested.items():
        opened = isinstance(value, dict) and (within is None or above + key in within)
        values |= flat(value, within, f"{above}{key}.") if opened else {above + key: value}
    return values


def over(base: dict[str, Any], raw: dict[str, Any], inner: set[str] | None = None, prefix: str = "") -> dict[str, Any]:
    """Keys of `raw` over those of `base`, also within the dictionaries under the dotted keys `inner`; None: of all."""
    result = dict(base)
    for key, value in raw.items():
        below = result.get(key)
        if isinstance(below, dict) and isinstance(value, dict) and (inner is None or prefix + key in inner):
            value = over(below, value, inner, f"{prefix}{key}.")
        result[key] = value
    return result
