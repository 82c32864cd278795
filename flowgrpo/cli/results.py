"""`flowgrpo export` and `flowgrpo report`: results of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from flowgrpo.cli.options import EPOCH, RUN
from flowgrpo.cli.root import app
from flowgrpo.errors import UserError
from flowgrpo.storage import paths, places

ExportForm = Literal["kohya", "merged", "card"]


@app.command()
def export(
    run: Annotated[Path, typer.Argument(metavar="RUN", help=RUN)],
    form: Annotated[ExportForm | None, typer.Option(
        help="kohya: a LoRA for ComfyUI, where it has names for the model's layers; merged: a whole pipeline or "
             "language model; card: README.md in the run's folder. Without: kohya, of a language model merged, but "
             "before an upload none.")] = None,
    output: Annotated[Path | None, typer.Option(help="The file or folder; without: in the run's folder.")] = None,
    push_to_hub: Annotated[str | None, typer.Option(
        metavar="OWNER/NAME", help="Upload the run with its card, and with --form kohya that file.")] = None,
    private: Annotated[bool, typer.Option("--private", help="A repository that only you see.")] = False,
    epoch: Annotated[int | None, typer.Option(min=0, help=EPOCH)] = None,
) -> None:
    """Write a run's result in another form, or upload it."""
    place = places.weights_of(run, epoch)
    if push_to_hub and (output or form == "merged"):
        raise UserError("--push-to-hub uploads the run's folder, without a merged model or an --output elsewhere: "
                        f"write these first, without --push-to-hub, and then `hf upload {push_to_hub} PATH`")
    if output and form == "card":
        raise UserError("--form card writes README.md into the run's folder: leave out --output")
    if places.is_checkpoint(place):
        if push_to_hub or form == "card":
            raise UserError(f"{'--push-to-hub' if push_to_hub else '--form card'}: is of a finished run, got the "
                            f"checkpoint {place}: use --form kohya or merged")
        from flowgrpo.evaluation.checkpoints import as_finished

        with as_finished(place) as folder:
            _write(folder, place, form, output)
        return
    from flowgrpo.export import export as forms

    if form == "card":
        typer.echo(forms.card(place))
    elif form or not push_to_hub:
        _write(place, place, form, output)
    if push_to_hub:
        typer.echo(forms.push(place, push_to_hub, private))


def _write(files: Path, place: Path, form: ExportForm | None, output: Path | None) -> None:
    """Write the LoRA or the merged model of a finished run's files. place: the run or checkpoint, for default names."""
    from flowgrpo.export import export as forms
    from flowgrpo.export.model_card import TOKENS

    _, summary = forms.finished(files)
    if form == "merged" or form is None and summary["unit"] == TOKENS:
        typer.echo(forms.merged(files, output or places.beside(place, "merged")))
    else:
        for path in forms.kohya(files, output or places.beside(place, "kohya.safetensors")):
            typer.echo(path)


@app.command()
def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", show_default=False, help="The folder of a run, "
                                               "finished or not, or one of its checkpoints; several are compared.")],
    output: Annotated[Path | None, typer.Option(help="Of several runs: the HTML file; without: A-B.html beside the "
                                                "first.")] = None,
    live: Annotated[bool, typer.Option("--live", help="Serve it to browsers of this machine; it follows the run.")]
    = False,
    port: Annotated[int, typer.Option(min=0, max=65535, help="With --live; 0: a free one.")] = 8899,
) -> None:
    """Write report.html: a run's curves, pictures through training, best and worst samples, in one file. Of several
    runs: their curves in one page, and the settings that differ."""
    if len(runs) > 1:
        if live:
            raise UserError(f"--live follows one run, got {len(runs)}: leave it out, or name one")
        from flowgrpo.evaluation.report import comparison

        if output is not None:
            paths.require_file(output)
            output.parent.mkdir(parents=True, exist_ok=True)
        typer.echo(comparison.write(runs, output))
        return
    if output is not None:
        raise UserError("--output: goes with several runs; the report of one is report.html in its folder")
    run = places.run_of(runs[0])
    if live:
        from flowgrpo.evaluation.report.server import server

        with server(run, port) as serving:
            typer.echo(f"http://{serving.server_name}:{serving.server_port} (Ctrl-C ends it)")
            serving.serve_forever()
    else:
        from flowgrpo.evaluation.report.report import write

        typer.echo(write(run))
