"""`flowgrpo export`, `flowgrpo report` and `flowgrpo push`: results of a run."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from flowgrpo import hub, trust
from flowgrpo.cli.options import EPOCH, RUN, TRUST, local_source, opening, page_of
from flowgrpo.cli.root import LOOK, SHARE, app
from flowgrpo.errors import UserError
from flowgrpo.log import status
from flowgrpo.nouns import quantity
from flowgrpo.storage import paths, places

ExportForm = Literal["comfyui", "kohya", "merged", "card"]


@app.command(rich_help_panel=SHARE, short_help="Write a LoRA for ComfyUI, merged weights or a model card.")
def export(
    context: typer.Context,
    run: Annotated[Path, typer.Argument(metavar="RUN", help=RUN)],
    form: Annotated[ExportForm | None, typer.Option(
        help="comfyui: a LoRA for ComfyUI, of SD 3, FLUX and Chroma also for OneTrainer; kohya: a LoRA for kohya's "
             "scripts; merged: a whole pipeline or language model; card: README.md in the run's folder. Without: "
             "comfyui, of a language model merged.")] = None,
    output: Annotated[Path | None, typer.Option(help="The file or folder; without: in the run's folder, of a run of "
                                                "the hub here.")] = None,
    epoch: Annotated[int | None, typer.Option(min=0, help=EPOCH)] = None,
    trust_run: Annotated[bool, typer.Option(trust.FLAG, help=TRUST)] = False,
) -> None:
    """Write a run's result in another form."""
    opening(context, trust_run)
    if output and form == "card":
        raise UserError("--form card writes README.md into the run's folder: leave out --output")
    place = places.weights_of(Path(local_source(str(run))), epoch)
    if places.is_checkpoint(place):
        if form == "card":
            raise UserError(f"--form card: got the checkpoint {place}, expected a finished run: use --form "
                            "comfyui, kohya or merged")
        from flowgrpo.policies.checkpoints import as_finished

        with as_finished(place) as folder:
            _write(folder, run, place, form, output)
    elif form != "card":
        _write(place, run, place, form, output)
    elif hub.is_named(str(run)):
        raise UserError(f"--form card: got {run}, whose card is on the hub, expected a local run")
    else:
        with status("writing the model card"):
            from flowgrpo.export import export as forms

            card = forms.card(place)
        typer.echo(card)


def _write(files: Path, run: Path, place: Path, form: ExportForm | None, output: Path | None) -> None:
    """Write the LoRA or the merged model of a finished run's files. run, place: the run as given, and the run or
    checkpoint, for default names."""
    from flowgrpo.export import export as forms
    from flowgrpo.export.model_card import TOKENS

    config, summary = forms.load_finished(files)
    if form == "merged" or form is None and summary["unit"] == TOKENS:
        with status("merging the weights"):
            merged = forms.write_merged(files, output or page_of(run, place, "merged"))
        typer.echo(merged)
    else:
        program: Literal["comfyui", "kohya"] = "kohya" if form == "kohya" else "comfyui"
        name = str(forms.comfyui_file(Path(), config.name)) if program == "comfyui" else "kohya.safetensors"
        for path in forms.lora(files, output or page_of(run, place, name), program):
            typer.echo(path)


@app.command(rich_help_panel=LOOK, short_help="Write a run's report: curves and samples; of several, side by side.")
def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN", show_default=False, help="The folder of a run, "
                                               "finished or not, or one of its checkpoints; several are compared.")],
    output: Annotated[Path | None, typer.Option(help="HTML file for several runs; without: A-B.html beside the "
                                                "first.")] = None,
    live: Annotated[bool, typer.Option("--live", help="Serve it to browsers of this machine; it follows the run.")]
    = False,
    port: Annotated[int, typer.Option(min=0, max=65535, help="With --live; 0: a free one.")] = 8899,
) -> None:
    """Write report.html: a run's curves, images through training, best and worst samples, in one file. Of several
    runs: their curves in one page, and the settings that differ."""
    if len(runs) > 1:
        if live:
            raise UserError(f"--live follows one run, got {len(runs)}: leave it out, or name one")
        from flowgrpo.evaluation.report import comparison

        if output is not None:
            paths.require_file(output)
        typer.echo(comparison.write(runs, output))
        return
    if output is not None:
        raise UserError("--output: goes with several runs; the report of one is report.html in its folder")
    run = places.run_of(runs[0])
    if live:
        from flowgrpo.evaluation.report.report import server

        with server(run, port) as serving:
            typer.echo(f"http://{serving.server_name}:{serving.server_port} (Ctrl-C ends it)")
            serving.serve_forever()
    else:
        from flowgrpo.evaluation.report.report import write

        typer.echo(write(run))


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
    opening(context, False)
    if places.is_checkpoint(run):
        raise UserError(f"push: expected the folder of a finished run, got the checkpoint {run}")
    with status(f"reading {run}"):
        from flowgrpo.export import push as upload

        files = upload.prepare(places.run_of(run), repository) if dry_run else []
    if not dry_run:
        typer.echo(upload.push(places.run_of(run), repository, private, revision, message))
        return
    sizes = [(run / path).stat().st_size for path in files]
    for path, size in zip(files, sizes):
        typer.echo(f"{size:>13,}  {path}")
    branch = "" if revision is None else f", branch {revision}"
    typer.echo(f"{sum(sizes):>13,}  bytes in {quantity(len(files), 'file')}, to {repository}{branch}; nothing was "
               "uploaded")
