"""`flowgrpo compare methods`: alignment methods compared on a packaged model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from flowgrpo.cli.options import Trusted
from flowgrpo.cli.root import compare_app

BenchModel = Literal["starter", "starter_video", "starter_consistency", "starter_text"]


@compare_app.command("methods", short_help="Compare methods on a packaged model from the same budget.")
def bench(
    methods: Annotated[str, typer.Option(metavar="A,B", show_default=False, help="Methods to compare, separated by "
                                         "commas: presets, presets joined by +, path/to/file.py:function, or recipe "
                                         "files with parts.")],
    output: Annotated[Path, typer.Option(show_default=False, help="The folder of the bench. One that was interrupted "
                                         "continues there, and finished runs are kept.")],
    model: Annotated[BenchModel, typer.Option(help="The packaged model that all methods train.")] = "starter",
    evaluations: Annotated[int, typer.Option(min=1, help="Denoiser evaluations that each run spends in training; of "
                                             "starter_text, tokens through the model.")] = 40_000,
    seeds: Annotated[int, typer.Option(min=1, help="Runs of each method, with seeds from 0 on.")] = 3,
    reference: Annotated[str | None, typer.Option(help="The method that others are compared with; without: flow_grpo, "
                                                  "of starter_text grpo. It runs even if --methods lacks it.")] = None,
    sweep: Annotated[str, typer.Option(metavar="A,B", show_default=False, help="Of --methods, those that also run "
                                                                               "with learning rate and clip times "
                                                                               "1/3, 1 and 3, chosen on validation "
                                                                               "prompts; all: every method.")] = "",
    points: Annotated[int, typer.Option(min=1, help="Measurements of the held-out accuracy in each run.")] = 4,
    prompts: Annotated[int | None, typer.Option(min=2, help="Measured prompts; without: all held-out ones.")] = None,
    jobs: Annotated[int | None, typer.Option(min=1, help="Runs at the same time; without: half of the cores.")] = None,
    trusted: Trusted = False,
) -> None:
    """Compare methods on a packaged model from the same budget: accuracy with intervals and tests, cost, KL and
    diversity. Writes results.md, results.json and index.html."""
    from flowgrpo.bench import models
    from flowgrpo.bench.bench import run
    from flowgrpo.bench.plan import Request

    given, swept = ([name.strip() for name in names.split(",") if name.strip()] for names in (methods, sweep))
    run(Request(given, model, reference or models.model(model).reference, evaluations, seeds, points, prompts, swept,
                output, trusted), jobs)
