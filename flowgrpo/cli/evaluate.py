"""`flowgrpo eval`."""

import re
from pathlib import Path
from typing import Annotated, Literal

import typer

from flowgrpo import trust
from flowgrpo.cli import options
from flowgrpo.cli.root import LOOK, app
from flowgrpo.errors import UserError

SUITE = ("A set of `flowgrpo list prompts`, a prompt file, a published suite's file or folder, a hub dataset's id, "
         "or OWNER/NAME/FILE.")


@app.command("eval", rich_help_panel=LOOK, short_help="Score a model on a suite of prompts, and its base beside it.")
def evaluate(
    context: typer.Context,
    source: Annotated[str, typer.Argument(metavar="MODEL_OR_RUN", help="A model, or a finished run or its checkpoint, "
                                          "as for sample.")],
    suite: Annotated[str, typer.Option(metavar="NAME|PATH", help=SUITE)] = "",
    on: Annotated[str, typer.Option(metavar="MODEL", help="In place of --suite: a distilled sibling of the run's "
                                    "model, on which the run's LoRA is measured with the run's held-out prompts and "
                                    "rewards: how much of the gain is kept.")] = "",
    on_lora: Annotated[str | None, typer.Option(metavar="FILE", help="With --on: a LoRA that distils, fused into that "
                                                "model first.")] = None,
    on_steps: Annotated[int | None, typer.Option(min=1, help="Steps of --on; without: its card's.")] = None,
    on_guidance: Annotated[float | None, typer.Option(min=0, help="Guidance scale of --on; without: its "
                                                      "card's.")] = None,
    weights: Annotated[str, typer.Option(metavar="W,W", help="With --on: weights of the run's LoRA.")] = "1",
    output: Annotated[Path | None, typer.Option(help="The folder of samples, scores and tables (without: "
                                                "RUN/eval/SUITE or runs/eval/MODEL/SUITE). The same command "
                                                "continues.")] = None,
    rewards: Annotated[str, typer.Option(metavar="A,B|FILE.yaml", help="Rewards, or a file of them with their args, as "
                                         "under eval.rewards; without: those of the run.")] = "",
    lora: Annotated[str | None, typer.Option(help=options.LORA)] = None,
    base: Annotated[bool, typer.Option("--base", help="Sample the base too, and compare.")] = False,
    samples: Annotated[int, typer.Option(min=1, help="Images or completions per prompt; several: also pass@k.")] = 1,
    steps: Annotated[int | None, typer.Option(min=1, help="Denoising steps; without: the run's or pipeline's.")] = None,
    guidance: Annotated[float | None, typer.Option(min=0, help="Guidance scale, as for --steps.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the samples.")] = 0,
    features: Annotated[str, typer.Option(help="Features whose distances are the diversity: pixels, clip, "
                                               "inception, or path/to/file.py:function.")] = "pixels",
    distance: Annotated[str, typer.Option(metavar="fid,kid", help="FID, KID or both, of the tuned images to the "
                                          "base's, in --features; needs --base.")] = "",
    rlg: Annotated[str | None, typer.Option(metavar="W|W,W", help=f"{options.RLG} Several: each is scored, and rlg.png "
                                            "shows the rewards over them.")] = None,
    batch: Annotated[int | None, typer.Option(min=1, help="Samples per call of the model; several give the same to "
                                              "rounding, sooner. Without: 1 image, 8 completions.")] = None,
    temperature: Annotated[float | None, typer.Option(min=0, help="Temperature of a language model. Without: the "
                                                      "run's, and 1 for several samples where that is 0.")] = None,
    max_tokens: Annotated[int | None, typer.Option(
        min=1, help="Tokens of a completion; without: the run's, or 256.")] = None,
    precision: Annotated[options.Precision | None, typer.Option(help=options.PRECISION)] = None,
    epoch: Annotated[int | None, typer.Option(min=0, help=options.EPOCH)] = None,
    best_of: Annotated[int, typer.Option(metavar="N", min=1, help=options.BEST_OF)] = 1,
    by: Annotated[str, typer.Option(metavar="REWARD|FILE.yaml", help=options.BY)] = "",
    enhancer: Annotated[str | None, typer.Option(metavar="MODEL_OR_RUN", help=options.ENHANCER)] = None,
    generates: Annotated[Literal["text", "image"] | None, typer.Option(help=options.GENERATES)] = None,
    trust_run: Annotated[bool, typer.Option(trust.FLAG, help=options.TRUST)] = False,
) -> None:
    """Score a model on a suite of prompts, by several rewards, and against its base."""
    if on:
        return _on_sibling(context, source, on)
    if not suite:
        raise UserError("expected --suite, a set of prompts, or --on, a distilled sibling of a run's model")
    _require_read(context, "--suite", ("on_lora", "on_steps", "on_guidance", "weights"))
    branches = options.weights_of(rlg)
    if base and len(branches) > 1:
        raise UserError("--base: several weights of --rlg are compared side by side; leave it out: 0 is the base")
    from flowgrpo.evaluation import evaluate as evaluation

    output = output or folder_of(source, suite)
    named, scorer = options.parse_rewards(rewards), options.best_by(by)
    options.opening(context, trust_run, named, features, scorer)
    try:
        results = evaluation.evaluate(
            options.local_source(source), suite, named, output, lora=options.local_lora(lora), base=base,
            samples=samples, steps=steps, guidance=guidance, seed=seed, features=features, rlg=branches, batch=batch,
            temperature=temperature, max_tokens=max_tokens, precision=precision, epoch=epoch, best_of=best_of,
            by=scorer, generates=generates, enhancer=enhancer and options.local_source(enhancer),
            distance=[name.strip() for name in distance.split(",")] if distance else [])
    except KeyboardInterrupt:
        typer.echo(f"flowgrpo: interrupted; the same command continues with what is in {output}", err=True)
        raise
    if results:  # the first of several processes has them
        from flowgrpo.evaluation import findings

        findings.show(results)
        files = ["table.md", "results.json", "grid.png", *(["rlg.png"] if len(branches) > 1 else [])]
        typer.echo(", ".join(str(output / name) for name in files))


def _on_sibling(context: typer.Context, source: str, model: str) -> None:
    """Measure a run's LoRA on a sibling of its model, and print the table."""
    given = context.params
    _require_read(context, "--on", tuple(name for name in given if not name.startswith("on") and name not in (
        "source", "weights", "precision", "trust_run")))
    weights = options.weights_of(given["weights"], "--weights")
    if not weights or 0 in weights or len({*weights}) < len(weights):
        raise UserError(f"--weights: got {given['weights']!r}, expected different numbers above 0; the plain sibling "
                        "is always measured")
    from flowgrpo.evaluation import kept, siblings
    from flowgrpo.evaluation.statistics import show
    from flowgrpo.log import plain_console
    from flowgrpo.policies.weights.lora_files import require_lora

    options.opening(context, given["trust_run"])
    if (lora := options.local_lora(given["on_lora"])) is not None:
        require_lora("--on-lora", lora)
    path, found = siblings.evaluate(options.local_source(source), model, lora, given["on_steps"], given["on_guidance"],
                                    weights, given["precision"])
    lines = kept.table(found)
    show(plain_console(), kept.sentence(found), f"{found['prompts']} held-out prompts, 95 % intervals; of the "
         "looks: of the sibling's", lines[0], lines[1:])
    typer.echo(f"{path}, {path.with_suffix('.png')}")


def _require_read(context: typer.Context, option: str, unread: tuple[str, ...]) -> None:
    """Raise UserError for an option on the command line that does not go with another one."""
    for name in unread:
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            raise UserError(f"--{name.replace('_', '-')}: does not go with {option}: leave it out")


def folder_of(source: str, suite: str) -> Path:
    def short(name: str) -> str:
        return re.sub(r"[^\w.-]+", "_", Path(name).stem if Path(name).is_file() else name.strip("/.")) or "suite"

    run = Path(source)
    return run / "eval" / short(suite) if (run / "config.yaml").is_file() else \
        Path("runs") / "eval" / short(source) / short(suite)
