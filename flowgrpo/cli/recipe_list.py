"""`flowgrpo list recipes`: the packaged recipes."""

from __future__ import annotations

import json
import re
from typing import Annotated

import typer

from flowgrpo.cli.root import list_app, print_table
from flowgrpo.errors import UserError

COMPUTED = re.compile(r"^# (?P<gpus>(?:One|\d+) \w+ \(\d+ GB\)): .* in (?P<hours>[\d,.]+) h, peak (?P<peak>[\d.]+) GiB "
                      r"\(computed\)$", re.M)
HEADS = ["recipe", "model", "method", "reward", "GPUs", "hours", "peak GiB"]


@list_app.command("recipes", short_help="List the recipes that `flowgrpo train` takes by name.")
def recipes(
    word: Annotated[str | None, typer.Argument(metavar="[WORD]", show_default=False,
                                               help="List only those whose row has this word.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """List the packaged recipes: model, method, rewards, and the computed hours and memory on the GPUs that each is
    for."""
    from flowgrpo.config import recipes as packaged

    rows = [row for row in map(_row, packaged.names()) if not word or word.lower() in " ".join(row).lower()]
    if not rows:
        raise UserError(f"no recipe's row has {word!r}: `flowgrpo list recipes` lists all")
    if as_json:
        typer.echo(json.dumps([dict(zip(HEADS, row)) for row in rows], indent=2))
        return
    print_table(HEADS, rows)
    typer.echo("Hours and memory are computed, not measured. `flowgrpo check RECIPE --gpu NAME` computes them for "
               "another GPU")


def _row(name: str) -> list[str]:
    """Return the cells of a recipe."""
    from flowgrpo.config import parse
    from flowgrpo.config import recipes as packaged

    config = parse.load(name)
    said = COMPUTED.search((packaged.FOLDER / f"{name}.yaml").read_text(encoding="utf-8"))
    computed = [said["gpus"], said["hours"], said["peak"]] if said else ["any, or a CPU", "-", "-"]
    return [name, config.model.rpartition("/")[2], config.method, ", ".join(config.trained), *computed]
