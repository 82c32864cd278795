"""`flowgrpo sample` and `flowgrpo compare grid`."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from flowgrpo import trust
from flowgrpo.cli import options
from flowgrpo.cli.root import LOOK, app, compare_app
from flowgrpo.errors import UserError
from flowgrpo.starter import FOLDERS
from flowgrpo.storage import places

TEMPERATURE = ("Temperature of a language model; 0 takes the likeliest token. Without: the run's, or 0 for one text, "
               "1 for several and for images.")
IMAGE = "Image that a pipeline starts from, or that a language model reads."
BATCH = "With --prompts: samples per call of the model. Without: 1 image, 8 completions."
KEY = "With --prompts: what prompts.jsonl calls a sample in the metadata. Without: base_image or base_text. With " \
      "prompt, a text becomes the line's prompt, and the user's stands in the metadata as user_prompt."
ColumnKind = Literal["checkpoints", "runs", "seeds", "guidance", "steps", "rlg"]


@app.command(rich_help_panel=LOOK, short_help="Generate images, videos or completions, with or without a LoRA.")
def sample(
    context: typer.Context,
    model: Annotated[str, typer.Argument(metavar="MODEL_OR_RUN", help="starter, a local directory, a hub id; or a "
                                         "finished run, its checkpoint or hub:OWNER/NAME, for its model and weights.")],
    prompt: Annotated[list[str] | None, typer.Option(show_default=False,
                                                     help="A prompt; may be given several times.")] = None,
    prompts: Annotated[Path | None, typer.Option(
        metavar="FILE|SET", help="Prompts of a file, or of a set that `flowgrpo list prompts` lists, in place of "
        "--prompt; the folder gets a prompts.jsonl, which names each sample, too. The same again goes on.")] = None,
    lora: Annotated[str | None, typer.Option(help=options.LORA)] = None,
    count: Annotated[int, typer.Option(min=1, help="Images per prompt.")] = 1,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the samples.")] = 0,
    steps: Annotated[int | None, typer.Option(min=1, help="Denoising steps; without: the run's or pipeline's.")] = None,
    guidance: Annotated[float | None, typer.Option(min=0, help="Guidance scale, as for --steps.")] = None,
    rlg: Annotated[str | None, typer.Option(metavar="W", help=options.RLG)] = None,
    output: Annotated[Path, typer.Option(help="A folder; of one sample also a .png, .webp or .mp4.")] = Path("samples"),
    temperature: Annotated[float | None, typer.Option(min=0, help=TEMPERATURE)] = None,
    image: Annotated[Path | None, typer.Option(help=IMAGE)] = None,
    batch: Annotated[int | None, typer.Option(min=1, help=BATCH)] = None,
    key: Annotated[str | None, typer.Option(metavar="NAME", help=KEY)] = None,
    precision: Annotated[options.Precision | None, typer.Option(help=options.PRECISION)] = None,
    epoch: Annotated[int | None, typer.Option(min=0, help=options.EPOCH)] = None,
    best_of: Annotated[int, typer.Option(metavar="N", min=1, help=options.BEST_OF)] = 1,
    by: Annotated[str, typer.Option(metavar="REWARD|FILE.yaml", help=options.BY)] = "",
    enhancer: Annotated[str | None, typer.Option(metavar="MODEL_OR_RUN", help=options.ENHANCER)] = None,
    generates: Annotated[Literal["text", "image"] | None, typer.Option(help=options.GENERATES)] = None,
    trust_run: Annotated[bool, typer.Option(trust.FLAG, help=options.TRUST)] = False,
) -> None:
    """Generate images, or completions, with a model, with or without a LoRA."""
    scorer = options.best_by(by)
    options.opening(context, trust_run, scorer)
    weight = options.one_weight(rlg)
    _require_options(prompt, prompts, image, output, {"batch": batch, "key": key})
    from flowgrpo.evaluation import images
    from flowgrpo.policies import checkpoints

    model, weights = checkpoints.source(options.local_source(model), options.local_lora(lora), epoch)
    if weight is not None and weights is None:
        raise UserError("--rlg: weights the change that a LoRA makes: give --lora")
    rewriter = enhancer and options.local_source(enhancer)
    drawn: dict[str, Any] = {"count": count, "seed": seed, "precision": precision, "best_of": best_of, "by": scorer}
    if prompts is not None:
        typer.echo(images.sample_file(model, prompts, output, lora=weights, steps=steps, guidance=guidance, rlg=weight,
                                      batch=batch, temperature=temperature, key=key, enhancer=rewriter,
                                      generates=generates, **drawn))
    elif _writes(model, weights, weight):  # of a language model: texts, or images of image tokens
        from flowgrpo.text import evaluation as texts

        if rewriter is not None:
            raise UserError("--enhancer: rewrites the prompts of a pipeline; leave it out for a language model")
        trained = checkpoints.config_of(weights)
        if (generates or (trained.text.generates if trained else "text")) == "image":
            if image is not None or steps is not None:
                raise UserError(f"--{'steps' if image is None else 'image'}: image tokens are generated one after the "
                                "other, from a text only: leave it out")
            _print(texts.sample_images(model, weights, prompt or [], output=output, guidance=guidance,
                                  temperature=temperature, **drawn))
            return
        _print(texts.sample(model, weights, prompt or [], temperature=temperature,
                            image=str(image) if image else None, **drawn))
    elif generates is not None:
        raise UserError(f"--generates {generates}: is of language models, and {model} is a pipeline: leave it out")
    else:
        from flowgrpo.evaluation.samplers import Enhancer

        writer = None if rewriter is None else Enhancer(rewriter, seed)
        _print(images.sample(model, weights, prompt or [], steps=steps, guidance=guidance, output=output, rlg=weight,
                             image=image, enhancer=writer, **drawn))
        for text, written in writer.known.items() if writer else ():
            typer.echo(f"{text} -> {written}", err=True)


def _print(lines: Sequence[object]) -> None:
    for line in lines:
        typer.echo(line)


def _require_options(prompt: list[str] | None, prompts: Path | None, image: Path | None, output: Path,
                     of_files: dict[str, object]) -> None:
    """Raise UserError for options of `sample` that do not go together. of_files: those that --prompts alone reads."""
    if bool(prompt) == (prompts is not None):
        raise UserError(f"got {'both' if prompt else 'neither'}, expected --prompt TEXT or --prompts FILE")
    if prompts is not None and image is not None:
        raise UserError("--image: goes with --prompt; in a prompt file, every prompt may bring an `image`")
    if prompts is not None and output.suffix == ".mp4":
        raise UserError(f"--output {output}: names one clip, but --prompts generates several: name a folder")
    for name, value in of_files.items() if prompts is None else ():
        if value is not None:
            raise UserError(f"--{name}: goes with --prompts FILE; leave it out")
    if not all(text.strip() for text in prompt or ()):
        raise UserError("--prompt: expected a text, got an empty one")


def _writes(model: str, run: Path | None = None, weight: float | None = None) -> bool:
    """True for a language model, judged by the run that trained it, the model's files or the hub. Raises UserError for
    a language model with a weight of RLG."""
    from flowgrpo.policies.build import writes
    from flowgrpo.policies.checkpoints import config_of

    config = config_of(run)
    if config is not None and model and model in FOLDERS and writes(model) != writes(config.model, config):
        of = "images" if writes(model) else "texts"
        raise UserError(f"--lora {run}: a run of {config.model!r}, a model of {of}, and {model!r} is none: give a run "
                        "of this model, or leave --lora out")
    if written := writes(model, config):
        if weight is not None:
            raise UserError("--rlg: weights the velocities of a denoiser; leave it out for a language model")
    return written


@compare_app.command("grid", short_help="Show the base and a run on the same prompts and seeds.")
def grid(
    context: typer.Context,
    run: Annotated[Path, typer.Argument(metavar="RUN", help=options.RUN)],
    prompts: Annotated[Path | None, typer.Option(metavar="FILE|SET", help="Prompts of a file or a set; without: the "
                                                 "run's held-out prompts.")] = None,
    count: Annotated[int, typer.Option(min=1, help="Number of prompts.")] = 12,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the samples.")] = 0,
    columns: Annotated[ColumnKind | None, typer.Option(help="Setting that differs between columns; without: base and "
                                                            "tuned.")] = None,
    values: Annotated[str, typer.Option(metavar="A,B", help="Values of --columns: epochs, run folders, numbers.")] = "",
    rlg: Annotated[str | None, typer.Option(metavar="W", help=options.RLG)] = None,
    output: Annotated[Path | None, typer.Option(help="The PNG file, for completions the .md; without: grid.png in the "
                                               "run's folder.")] = None,
    epoch: Annotated[int | None, typer.Option(min=0, help=options.EPOCH)] = None,
    trust_run: Annotated[bool, typer.Option(trust.FLAG, help=options.TRUST)] = False,
) -> None:
    """Compare before and after: the base and a run's LoRA on the same prompts and seeds. Or, with --columns, a page of
    several columns as PNG and HTML, for completions as Markdown and HTML."""
    options.opening(context, trust_run)
    given_run, run = run, places.weights_of(Path(options.local_source(str(run))), epoch)
    if output is not None and output.suffix.lower() not in ("", ".png", ".md"):
        raise UserError(f"--output {output}: expected the name of the PNG, or for completions the .md; the HTML page "
                        "of --columns is written beside it")
    weight = options.one_weight(rlg)
    if columns is None:
        if values:
            raise UserError("--values: are the values of --columns: give --columns too")
        from flowgrpo.evaluation import columns as pages
        from flowgrpo.text import evaluation as texts

        output = output or options.page_of(given_run, run, "grid.png")
        typer.echo(texts.grid(run, prompts, count, seed, output) if _writes("", run, weight) else
                   pages.grid(run, prompts, count, seed, output, weight))
        return
    if weight is not None:
        raise UserError("--rlg: does not go with --columns: for a column per weight, use --columns rlg --values 0,1,2")
    from flowgrpo.evaluation import columns as pages

    given = [options.local_source(value.strip()) for value in values.split(",") if value.strip()]
    page = output or options.page_of(given_run, run, f"grid-{columns}.png")
    _print(pages.columns(run, columns, given, prompts, count, seed, page))
