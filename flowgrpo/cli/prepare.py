"""`flowgrpo prepare`, and the lines of what is missing of `check` and `train`."""

from __future__ import annotations

import importlib.metadata
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flowgrpo.cli.options import Trusted, recipe_and_options, recipe_argument
from flowgrpo.cli.root import TRAIN, app, print_table
from flowgrpo.config import parse
from flowgrpo.errors import UserError
from flowgrpo.log import status
from flowgrpo.nouns import quantity

if TYPE_CHECKING:
    from flowgrpo.tools.check.needs import Need

CLONE = Path(__file__).parents[2]


@app.command(rich_help_panel=TRAIN, short_help="Download what a recipe needs, after it has listed it.",
             context_settings={"ignore_unknown_options": True})
def prepare(
    arguments: Annotated[list[str] | None, recipe_argument(
        "A YAML recipe, or the name of a packaged one, and any key of the configuration.")] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    trusted: Trusted = False,
) -> None:
    """List what a recipe needs: extras, weights of the model and of the rewards, with sizes and licences. Then install
    and download what is missing. The same command continues after a stop."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

    from flowgrpo.tools.check import needs

    recipe, options = recipe_and_options(arguments or [], others=("yes", "trust"))
    if recipe is None and not options:
        raise UserError("flowgrpo prepare needs a recipe, such as sdxl_24gb")
    config = parse.load(recipe, options, trusted)
    with status(f"looking for what {recipe or config.model} needs"):
        found = needs.needs(config, size)
    show(found)
    missing = [need for need in found if not need.here]
    command = f"flowgrpo train {shlex.join(arguments or [])}"
    if not missing:
        typer.echo(f"nothing is missing: {command}")
        return
    # What only the user can do comes before anything is installed or downloaded.
    if first := [need for need in missing if need.accept]:
        raise UserError("; ".join(f"{need.name}: {need.accept}" for need in first) + ": then the same command again")
    if unknown := [need.name for need in missing if need.what != "extra" and not need.files]:
        raise UserError("the hub does not answer: where there is a network, "
                        + ", ".join(f"`hf download {name}`" for name in unknown))
    to_fetch, free = sum(need.to_fetch for need in missing) - needs.begun(missing), _free()
    if to_fetch > free:
        raise UserError(f"{to_fetch:.1f} GB are to be downloaded, and {free:.1f} GB are free: make room, or name "
                        "another disk in HF_HOME")
    if not yes:
        if not sys.stdin.isatty():
            raise UserError("nothing was installed or downloaded: give --yes")
        typer.confirm("install and download what is missing?", default=True, abort=True)
    install([need.name for need in missing if need.what == "extra"])
    repositories = [need for need in needs.needs(config, size) if need.what != "extra" and not need.here]
    with Progress("downloading", BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn(),
                  console=Console(stderr=True)) as bar:
        task = bar.add_task("", total=sum(file.size for need in repositories for file in need.missing))
        needs.fetch(repositories, partial(bar.advance, task))
    files = sum(len(need.missing) for need in repositories)
    typer.echo(f"downloaded and verified {quantity(files, 'file')}: {command}")


def show(found: Sequence[Need]) -> None:
    """Print a table of what a recipe needs, and its sum."""
    rows = [[need.what, need.name, "?" * (need.what != "extra") if need.gigabytes is None else
             "<0.1" if need.gigabytes < 0.05 else f"{need.gigabytes:.1f}", need.licence,
             need.accept or ("here" if need.here else "partly here" if len(need.missing) < len(need.files) else
                             "missing")] for need in found]
    if not rows:
        typer.echo("needs no extra and no download")
        return
    print_table(["what", "name", "GB", "licence", "state"], rows)
    if missing := [need for need in found if not need.here and need.what != "extra"]:
        unsized = any(not need.files and need.gigabytes is None for need in missing)
        sized = sum(need.to_fetch for need in missing)
        said = [*([f"{sized:.1f} GB"] if sized or not unsized else []), *(["what has a ? above"] if unsized else [])]
        typer.echo(f"to download: {' and '.join(said)}; free in the cache's disk: {_free():.0f} GB")
        if not all(need.files for need in missing):
            typer.echo("the hub does not answer: sizes are computed, for files of 16 bits a weight; files of 32 bits "
                       "take twice as much")


def _free() -> float:
    from huggingface_hub import constants

    cache = Path(constants.HF_HUB_CACHE)
    return shutil.disk_usage(next(folder for folder in (cache, *cache.parents) if folder.exists())).free / 1e9


def size(model: str) -> float | None:
    """Gigabytes of a published model, computed from its parameters at two bytes each; None for another."""
    from flowgrpo import published

    if model not in published.MODELS:
        return None
    import torch

    from flowgrpo.tools.dry_run import from_configs

    parts = (from_configs.part(*part, torch.bfloat16) for part in published.MODELS[model].parts.values())
    return sum(2 * sum(p.numel() for p in part.parameters()) / 1e9 for part in parts
               if isinstance(part, torch.nn.Module))


def install(extras: Sequence[str]) -> None:
    """Install extras, in a clone at the versions of constraints.txt. Raises UserError if pip fails."""
    if not extras:
        return
    packages = requirements(extras)
    lock = ["-c", str(CLONE / "constraints.txt")] if (CLONE / "constraints.txt").is_file() else []
    command = [sys.executable, "-m", "pip", "install", *lock, *packages]
    typer.echo(" ".join(["pip install", *lock, *(f"'{package}'" for package in packages)]))
    if subprocess.run(command, check=False).returncode:
        raise UserError(f"pip did not install {', '.join(packages)}: its lines above say why")
    importlib.invalidate_caches()


def requirements(extras: Sequence[str]) -> list[str]:
    """Requirements of extras, as flowgrpo's metadata states them."""
    lines = importlib.metadata.requires("flowgrpo") or []
    return sorted({line.partition(";")[0].strip() for line in lines for extra in extras
                   if re.search(rf""";.*extra == ['"]{re.escape(extra)}['"]""", line)})
