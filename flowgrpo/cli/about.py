"""`flowgrpo check` and `flowgrpo methods`: trainable models and available methods."""

from __future__ import annotations

import json
import re
from typing import Annotated, Any

import typer

from flowgrpo.cli.root import app
from flowgrpo.cli.show import print_table

IN_GIB = ("weights", "memory", "memory_parts")  # keys of a `check` report that are in GiB


@app.command()
def check(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="starter, a local directory, a hub id, or the name of a "
                                         "pipeline's or language model's class, for a tiny random instance.")],
    recipe: Annotated[str | None, typer.Option(help="A YAML recipe, for its adapter, precision and memory.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda; without it cuda where it is there.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Tell whether a pipeline or a language model can be trained, what it needs, and why not; exit code 2 where it
    cannot, or where that is unknown."""
    from flowgrpo.check.report import report
    from flowgrpo.config import parse

    told = report(model, parse.load(recipe) if recipe else None, device)
    if as_json:
        typer.echo(json.dumps(told, indent=2, default=str))
    else:
        known = {key: value for key, value in told.items() if value is not None}
        known = {"model": told["model"], "drivable": "unknown"} | known
        lines = [(key.replace("_", " ") + ", GiB" * (key in IN_GIB), _plain(value)) for key, value in known.items()]
        width = max(len(key) for key, _ in lines)
        for key, value in lines:
            typer.echo(f"{key:<{width}}  {value}")
    if not told["drivable"]:
        raise typer.Exit(2)


def _plain(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, dict):
        return ", ".join(f"{key} {_plain(inner)}" for key, inner in value.items())
    if isinstance(value, (list, tuple)):
        return ", ".join(map(_plain, value)) or "none"
    if isinstance(value, (int, float)):
        return f"{value:,}" if isinstance(value, int) else f"{value:.3g}"
    return str(value)


@app.command()
def methods() -> None:
    """List the presets that --method takes."""
    from flowgrpo.methods.presets import PRESETS

    print_table(["name", "what it does", "source"], [[name, *_summary(preset)] for name, preset in PRESETS.items()])
    typer.echo("Formula, recipe and differences of each: docs/methods/NAME.md; papers and parts: docs/methods/index.md")


def _summary(thing: Any) -> tuple[str, str]:
    """Split the first line of a docstring into (text, source in its last parentheses)."""
    line = (thing.__doc__ or "").strip().partition("\n")[0].rstrip(".")
    found = re.fullmatch(r"(.*?) *\(([^()]*)\)", line)
    return (found[1], found[2]) if found else (line, "")
