"""`flowgrpo eval`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from flowgrpo.cli.options import EPOCH, PRECISION, RLG, Precision, asked_rewards, weights_of
from flowgrpo.cli.root import app
from flowgrpo.errors import UserError


@app.command("eval")
def evaluate(
    source: Annotated[str, typer.Argument(metavar="MODEL_OR_RUN", help="A model, or a finished run or its checkpoint, "
                                          "as for sample.")],
    suite: Annotated[str, typer.Option(metavar="NAME|PATH", help="starter, starter_video, starter_text, "
                                       "geneval_coco, a published suite's file or folder, a hub dataset's id, or one "
                                       "of its files (OWNER/NAME/FILE).")],
    output: Annotated[Path, typer.Option(help="The folder of samples, scores and tables; the same again goes on.")],
    rewards: Annotated[str, typer.Option(metavar="A,B|FILE.yaml", help="Rewards, or a file of them with their args, as "
                                         "under eval.rewards; without: those of the run.")] = "",
    lora: Annotated[Path | None, typer.Option(help="A finished run, one of its checkpoints, a folder with a LoRA, "
                                               "or its file.")] = None,
    base: Annotated[bool, typer.Option("--base", help="Draw the base too, and compare.")] = False,
    samples: Annotated[int, typer.Option(min=1, help="Pictures or texts per prompt; of several, pass@k is told.")] = 1,
    steps: Annotated[int | None, typer.Option(min=1, help="Denoising steps; without: the run's or pipeline's.")] = None,
    guidance: Annotated[float | None, typer.Option(min=0, help="Guidance scale; likewise.")] = None,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    features: Annotated[str, typer.Option(help="What diversity is the distance of: pixels, clip, or path/to/file.py:"
                                               "function.")] = "pixels",
    rlg: Annotated[str | None, typer.Option(metavar="W|W,W", help=f"{RLG} Several: each is told and rlg.png shows "
                                            "the rewards over them.")] = None,
    batch: Annotated[int | None, typer.Option(min=1, help="Samples per call of the model; several give the same to "
                                              "rounding, sooner. Without: 1 picture, 8 texts.")] = None,
    temperature: Annotated[float | None, typer.Option(min=0, help="Of a language model. Without: the run's, and 1 for "
                                                      "several samples where that is 0.")] = None,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Of a completion; without: the run's, or 256.")] = None,
    precision: Annotated[Precision | None, typer.Option(help=PRECISION)] = None,
    epoch: Annotated[int | None, typer.Option(min=0, help=EPOCH)] = None,
) -> None:
    """Score a model on a suite of prompts, by several rewards, and against its base."""
    weights = weights_of(rlg)
    if base and len(weights) > 1:
        raise UserError("--base: several weights of --rlg are told side by side; leave it out, weight 0 is the base")
    from flowgrpo.evaluation import evaluate as evaluation
    from flowgrpo.evaluation import findings

    try:
        results = evaluation.evaluate(source, suite, asked_rewards(rewards), output, lora=lora, base=base,
                                      samples=samples, steps=steps, guidance=guidance, seed=seed, features=features,
                                      rlg=weights, batch=batch, temperature=temperature, max_tokens=max_tokens,
                                      precision=precision, epoch=epoch)
    except KeyboardInterrupt:
        typer.echo(f"flowgrpo: interrupted; the same command goes on with what is in {output}", err=True)
        raise
    if results:  # the first of several processes has them
        findings.show(results)
        written = ["table.md", "results.json", "grid.png", *(["rlg.png"] if len(weights) > 1 else [])]
        typer.echo(", ".join(str(output / name) for name in written))
