"""`flowgrpo push`: upload of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from flowgrpo.cli.options import opening
from flowgrpo.cli.root import SHARE, app
from flowgrpo.errors import UserError
from flowgrpo.nouns import counted
from flowgrpo.storage import places


@app.command(rich_help_panel=SHARE, short_help="Upload a run and its model card to the hub.")
def push(
    context: typer.Context,
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a finished run.")],
    repository: Annotated[str, typer.Argument(metavar="OWNER/NAME", help="The repository; made if there is none.")],
    private: Annotated[bool, typer.Option("--private", help="Make a new repository private.")] = False,
    revision: Annotated[str | None, typer.Option(metavar="BRANCH", help="A branch in place of main; made if there is "
                                                 "none.")] = None,
    message: Annotated[str | None, typer.Option(help="Commit message.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Write the card and list the files, without a network.")]
    = False,
) -> None:
    """Upload a run's weights, model card, images and configuration to the hub."""
    from flowgrpo.export import push as hub

    opening(context, False)
    if places.is_checkpoint(run):
        raise UserError(f"push: expected the folder of a finished run, got the checkpoint {run}")
    if not dry_run:
        typer.echo(hub.push(places.run_of(run), repository, private, revision, message))
        return
    files = hub.prepare(places.run_of(run), repository)
    sizes = [(run / path).stat().st_size for path in files]
    for path, size in zip(files, sizes):
        typer.echo(f"{size:>13,}  {path}")
    branch = "" if revision is None else f", branch {revision}"
    typer.echo(f"{sum(sizes):>13,}  bytes in {counted(len(files), 'file')}, to {repository}{branch}; nothing was "
               "uploaded")
