"""`flowgrpo export` and `flowgrpo report`: results of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from flowgrpo.cli.root import app
from flowgrpo.errors import UserError

ExportForm = Literal["kohya", "merged", "card"]


@app.command()
def export(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a finished run.")],
    form: Annotated[ExportForm | None, typer.Option(
        help="kohya: a LoRA for ComfyUI, where it has names for the model's layers; merged: a whole pipeline or "
             "language model; card: README.md in the run's folder. Without: kohya, but before an upload none.")] = None,
    output: Annotated[Path | None, typer.Option(help="The file or folder; without: in the run's folder.")] = None,
    push_to_hub: Annotated[str | None, typer.Option(
        metavar="OWNER/NAME", help="Upload the run with its card, and with --form kohya that file.")] = None,
    private: Annotated[bool, typer.Option("--private", help="A repository that only you see.")] = False,
) -> None:
    """Write a run's result in another form, or upload it."""
    from flowgrpo.export import export as forms

    forms.finished(run)
    if push_to_hub and (output or form == "merged"):
        raise UserError("--push-to-hub uploads the run's folder, without a merged model or an --output elsewhere: "
                        f"write these first, without --push-to-hub, and then `hf upload {push_to_hub} PATH`")
    if output and form == "card":
        raise UserError("--form card writes README.md into the run's folder: leave out --output")
    if form == "card":
        typer.echo(forms.card(run))
    elif form == "merged":
        typer.echo(forms.merged(run, output or run / "merged"))
    elif form or not push_to_hub:
        for path in forms.kohya(run, output or run / "kohya.safetensors"):
            typer.echo(path)
    if push_to_hub:
        typer.echo(forms.push(run, push_to_hub, private))


@app.command()
def report(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run, finished or not.")],
    live: Annotated[bool, typer.Option("--live", help="Serve it to browsers of this machine; it follows the run.")]
    = False,
    port: Annotated[int, typer.Option(min=0, max=65535, help="With --live; 0: a free one.")] = 8899,
) -> None:
    """Write report.html: a run's curves, pictures through training, best and worst samples, in one file."""
    if not run.is_dir():
        raise UserError(f"no run at {run}: expected the folder that `flowgrpo train` wrote")
    if live:
        from flowgrpo.evaluation.report.server import server

        with server(run, port) as serving:
            typer.echo(f"http://{serving.server_name}:{serving.server_port} (Ctrl-C ends it)")
            serving.serve_forever()
    else:
        from flowgrpo.evaluation.report.report import write

        typer.echo(write(run))
