"""Recipes by name: those of the package, and files."""

from __future__ import annotations

from pathlib import Path

from flowgrpo.errors import UserError, nearest

FOLDER = Path(__file__).parents[1] / "recipes"  # a link to configs/ in a clone, files in an installed package


def names() -> list[str]:
    """Return the names of the packaged recipes."""
    return sorted(file.stem for file in FOLDER.glob("*.yaml"))


def own(recipe: Path) -> bool:
    """Return True for a packaged recipe, and for one below the working folder; a link counts as what it leads to."""
    return any(recipe.resolve().is_relative_to(folder) for folder in (FOLDER.resolve(), Path.cwd().resolve()))


def located(given: str | Path) -> Path:
    """Return the file of a recipe: the file itself if there is one, else the packaged recipe of that name.

    Raises UserError for a name that is neither. A path that is no name is returned as it is, whether it exists or not.
    """
    path = Path(given)
    named = path.name == str(given) and not path.suffix
    if path.exists() and not (path.is_dir() and named and path.name in names()) or not named:
        return path
    if path.name not in names():
        raise UserError(f"no recipe {path.name!r}{nearest(path.name, names())}; `flowgrpo list recipes` has the "
                        "packaged ones, and a file is given with its ending, such as mine.yaml")
    return FOLDER / f"{path.name}.yaml"
