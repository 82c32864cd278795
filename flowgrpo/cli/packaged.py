"""Files that the package brings and a user reads: `flowgrpo docs` and `flowgrpo constraints`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from flowgrpo.cli.root import app
from flowgrpo.errors import UserError, nearest

PACKAGE = Path(__file__).parents[1]


@app.command(hidden=True, short_help="Print a page of the documentation.")
def docs(
    page: Annotated[str | None, typer.Argument(show_default=False, help="Such as rewards or get_started/laptop. "
                                               "Without it: list the pages.")] = None,
) -> None:
    """Print a page of the documentation as Markdown. Without a page: list them."""
    folder = PACKAGE / "docs"
    pages = {file.relative_to(folder).with_suffix("").as_posix(): file
             for file in sorted([*folder.glob("*.md"), *folder.glob("*/*.md")])}
    if page is None:
        for name, file in pages.items():
            typer.echo(f"{name:<32} {file.read_text(encoding='utf-8').partition('# ')[2].splitlines()[0]}")
        return
    name = page.removeprefix("docs/").partition("#")[0].removesuffix(".md")
    if name not in pages:
        raise UserError(f"docs {page}: no such page{nearest(name, [*pages])}; `flowgrpo docs` lists them")
    typer.echo(pages[name].read_text(encoding="utf-8"))


@app.command(hidden=True, short_help="Print the tested versions, for `pip install --constraint`.")
def constraints() -> None:
    """Print the versions of all packages that this version was tested with, for `pip install --constraint FILE`."""
    typer.echo((PACKAGE / "constraints.txt").read_text(encoding="utf-8"), nl=False)
