"""`flowgrpo compare vote`: collect preferences on a web page of this machine; and `flowgrpo compare methods`: alignment
methods compared on a packaged model.
"""

import contextlib
from pathlib import Path
from typing import Annotated, Literal

import typer

from flowgrpo.cli.options import Trusted
from flowgrpo.cli.root import compare_app, print_table
from flowgrpo.errors import UserError
from flowgrpo.nouns import quantity
from flowgrpo.storage import paths

BenchModel = Literal["starter", "starter_video", "starter_consistency", "starter_text"]


@compare_app.command("vote", short_help="Collect blind votes on pairs of images in a browser.")
def vote(
    places: Annotated[list[Path], typer.Argument(
        metavar="RUN_OR_GRID | A B | MODEL", show_default=False, help="A finished run, the PNG of `compare grid`, two "
        "folders of images with equal names, or a model with --prompts.")],
    lora: Annotated[list[Path] | None, typer.Option(
        show_default=False, help="Generate the pairs: with two LoRAs, or with the base and one.")] = None,
    prompts: Annotated[Path | None, typer.Option(metavar="FILE_OR_SET", help="Generate the pairs for these prompts: "
                                                 "without --lora two samples of the model. With only --lora: for the "
                                                 "run's held-out prompts.")] = None,
    count: Annotated[int, typer.Option(min=1, help="Of generated pairs: number of prompts.")] = 50,
    output: Annotated[Path, typer.Option(help="The file of pairs, for `flowgrpo reward train` and --preferences. Votes "
                                         "in it are kept, and only the other pairs are shown.")] = Path("pairs.jsonl"),
    seed: Annotated[int, typer.Option(min=0, help="Seed of the order, the sides and the samples.")] = 0,
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: a free one.")] = 8890,
) -> None:
    """Collect preferences: serve pairs of images or clips side by side to browsers of this machine, blind and in
    random order, and write the votes as a file of pairs. Ctrl-C ends it."""
    from flowgrpo.tools.vote import sources
    from flowgrpo.tools.vote.ballot import Ballot
    from flowgrpo.tools.vote.server import address, server

    if output.suffix != ".jsonl":
        raise UserError(f"--output {output}: expected a .jsonl file")
    paths.require_file(output)
    if not lora and prompts is None:
        comparisons, names = sources.pairs(places)
    elif len(places) != 1:
        raise UserError(f"{'--lora' if lora else '--prompts'}: goes with one run or model, got {len(places)} paths")
    else:
        folder = output.with_name(f"{output.stem}-images")
        comparisons, names = sources.drawn_pairs(places[0], lora or [], prompts, count, seed, folder)
    ballot = Ballot(comparisons, names, output, seed)
    with server(ballot, port) as serving:
        typer.echo(f"{quantity(len(ballot.comparisons), 'pair')}, {len(ballot.verdicts)} with a vote: "
                   f"{address(serving)} (Ctrl-C ends it)")
        with contextlib.suppress(KeyboardInterrupt):
            serving.serve_forever()
    heads, *rows = ballot.table()
    print_table(heads, rows)
    typer.echo(f"{output}: intervals are Wilson's, without ties")


@compare_app.command("methods", short_help="Compare methods on a packaged model from the same budget.")
def compare_methods(
    methods: Annotated[str, typer.Option(metavar="A,B", show_default=False, help="Methods to compare, separated by "
                                         "commas: presets, presets joined by +, path/to/file.py:function, or recipe "
                                         "files with parts.")],
    output: Annotated[Path, typer.Option(show_default=False, help="The folder of the bench. One that was interrupted "
                                         "continues there, and finished runs are kept.")],
    model: Annotated[BenchModel, typer.Option(help="The packaged model that all methods train.")] = "starter",
    evaluations: Annotated[int | None, typer.Option(min=1, help="Denoiser evaluations that each run may spend in "
                                                    "training; of starter_text, tokens through the model. Without: "
                                                    "40,000, of starter_text 800,000.")] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Runs of each method, with seeds from 0 on.")] = 3,
    reference: Annotated[str | None, typer.Option(help="The method that others are compared with; without: flow_grpo, "
                                                  "of starter_text grpo. It runs even if --methods lacks it.")] = None,
    sweep: Annotated[str, typer.Option(
        metavar="A,B", show_default=False, help="Of --methods, those that also run with learning rate and clip times "
        "1/3, 1 and 3, chosen on validation prompts; all: every method.")] = "",
    points: Annotated[int, typer.Option(min=1, help="Measurements of the held-out accuracy in each run.")] = 4,
    prompts: Annotated[int | None, typer.Option(min=2, help="Measured prompts; without: all held-out ones.")] = None,
    jobs: Annotated[int | None, typer.Option(min=1, help="Runs at the same time; without: half of the cores.")] = None,
    trusted: Trusted = False,
) -> None:
    """Compare methods on a packaged model from the same budget: accuracy with intervals and tests, cost, KL and
    diversity. Writes results.md, .csv, .tex and .json, index.html and curves.pdf."""
    from flowgrpo.tools.bench import bench, models, plan

    of = models.MODELS[model]
    given, swept = ([name.strip() for name in names.split(",") if name.strip()] for names in (methods, sweep))
    bench.run(plan.Request(given, model, reference or of.reference, evaluations or of.evaluations, seeds, points,
                           prompts, swept, output, trusted), jobs)
