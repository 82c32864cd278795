"""`flowgrpo reproduce`: a paper's run and its evaluation, and the paper's number beside ours."""

import json
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from flowgrpo.cli.evaluate import folder_of
from flowgrpo.cli.options import Trusted, recipe_and_options
from flowgrpo.cli.root import app, print_table
from flowgrpo.config import parse
from flowgrpo.errors import UserError, nearest

GPU, PROCESSES = "A100", 8  # of the costs


@dataclass(frozen=True)
class Result:
    """Published result: the base's and the tuned model's mean of a reward on a suite.

    seconds, peak: an epoch's, and GiB of each GPU, computed for PROCESSES of GPU by `flowgrpo check`.
    source: where the paper has base and tuned, and on which prompts if not on the suite. recipe: without:
    papers/PAPER_RESULT.
    """

    suite: str
    reward: str
    source: str
    epochs: int
    seconds: float
    peak: float
    base: float
    tuned: float
    recipe: str | None = None

    @property
    def hours(self) -> float:
        return self.epochs * self.seconds / 3600


FLOW, NFT = "2505.05470, table 2, with KL", "2509.16117, table 2, without guidance"
MIX = "2507.21802, tables 1 and 6, window 4, on HPDv2's 400 test prompts"
RESULTS = {
    "flow_grpo/geneval": Result("geneval", "geneval", FLOW, 1000, 246.8, 62.74, 0.63, 0.95),
    "flow_grpo/ocr": Result("ocr", "ocr", FLOW, 1000, 246.8, 62.74, 0.59, 0.92),
    "flow_grpo/pickscore": Result("drawbench", "pickscore", f"{FLOW}, on DrawBench", 1000, 246.8, 64.4, 22.34, 23.53),
    "mix_grpo/flux": Result("drawbench", "hpsv2.1", MIX, 300, 462.9, 42.97, 0.313, 0.367),
    "diffusion_nft/geneval": Result("geneval", "geneval", f"{NFT}, 1,000 iterations", 1000, 154.7, 37.63, 0.24,
                                     0.98),
    "diffusion_nft/ocr": Result("ocr", "ocr", f"{NFT}, 150 iterations", 1000, 153.1, 37.62, 0.12, 0.97),
    "diffusion_nft/pickscore": Result("drawbench", "pickscore", f"{NFT}, on DrawBench, 2,000 iterations", 1000, 154.7,
                                       39.29, 20.51, 24.03)}


@app.command(hidden=True, short_help="Train and evaluate a paper's run, beside the paper's number.",
             context_settings={"ignore_unknown_options": True})
def reproduce(
    arguments: Annotated[list[str], typer.Argument(metavar="PAPER/RESULT|--KEY=VALUE", show_default=False, help="Such "
                         "as flow_grpo/geneval, and any key of the configuration.")],
    gpus: Annotated[int | None, typer.Option(min=1, help="Processes of the training; without: the GPUs that are "
                                             "here.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the commands and the computed cost.")] = False,
    trusted: Trusted = False,
) -> None:
    """Check, train and evaluate a paper's run, and print the paper's number beside ours with its interval. The same
    command continues after a stop."""
    name, options = recipe_and_options(list(arguments), "PAPER/RESULT", ("gpus", "dry-run", "trust"))
    if name not in RESULTS:
        raise UserError(f"no published result {name!r}{nearest(str(name), list(RESULTS))}; there are "
                        f"{', '.join(RESULTS)}")
    result = RESULTS[name]
    recipe = recipe_of(name)
    folder = parse.load(recipe, options, trusted).folder
    further = [f"--{key}={value}" for key, value in options.items()]
    processes = gpus or (PROCESSES if dry_run else max(1, _gpus()))
    check, train, evaluate = commands(recipe, result, folder, processes, further)
    if dry_run:
        for command in (check, train, evaluate):
            typer.echo(shlex.join(command))
        typer.echo(f"training, computed: {result.peak:.1f} GiB on each of {PROCESSES} {GPU}, {result.seconds:.0f} s an "
                   f"epoch, {result.hours:.0f} h for {result.epochs:,} epochs, {result.hours * PROCESSES:,.0f} "
                   "GPU-hours")
        return
    if not (folder / "summary.json").is_file():
        if not gpus and not _gpus():
            raise UserError(f"no GPU is here, and {name} trains on {PROCESSES} of {result.peak:.0f} GiB: --dry-run "
                            "prints the commands, and --gpus=1 runs them here all the same")
        _ran(check)
        _ran(train)
    _ran(evaluate)
    found = folder_of(str(folder), result.suite) / "results.json"
    show(name, result, json.loads(found.read_text(encoding="utf-8")))


def commands(recipe: str, result: Result, folder: Path, processes: int, further: list[str]) -> list[list[str]]:
    launch = ["accelerate", "launch", "--multi_gpu", "--num_processes", str(processes), "-m", "flowgrpo"] \
        if processes > 1 else ["flowgrpo"]
    return [["flowgrpo", "prepare", "--yes", recipe, *further],
            [*launch, "train", recipe, "--resume=auto", *further],
            ["flowgrpo", "eval", str(folder), "--suite", result.suite, "--rewards", result.reward, "--base"]]


def of_recipe(name: str) -> list[str]:
    """GPUs, hours and peak GiB of a paper's recipe, computed; empty for another recipe."""
    return next(([f"{PROCESSES} {GPU} (80 GB)", f"{result.hours:.0f}", f"{result.peak:.1f}"]
                 for paper, result in RESULTS.items() if result.recipe is None and name == recipe_of(paper)), [])


def recipe_of(paper: str) -> str:
    return RESULTS[paper].recipe or f"papers/{paper.replace('/', '_')}"


def show(name: str, result: Result, found: dict[str, Any]) -> None:
    """Print the paper's numbers beside those of an evaluation; GenEval's is the mean of its six tasks' means."""
    from flowgrpo.evaluation.statistics import ALL

    rows = []
    for arm, published in (("base", result.base), ("tuned", result.tuned)):
        ours = found["category_means"][arm][result.reward] if result.suite == "geneval" else \
            found["arms"][arm][result.reward][ALL]
        rows.append([arm, f"{published:g}", f"{ours['mean']:.4g}", f"{ours['low']:.4g} to {ours['high']:.4g}"])
    print_table([f"{result.reward} on {result.suite}", "paper", "ours", "95 % interval"], rows)
    typer.echo(f"{name}: {result.source}; {found['suite']['prompts']:,} prompts")


def _ran(command: list[str]) -> None:
    """Run a command of this package in a process of its own. Raises UserError if it fails."""
    typer.echo(f"$ {shlex.join(command)}")
    words = [sys.executable, "-m", *command] if command[0] == "flowgrpo" else \
        [sys.executable, "-m", "accelerate.commands.accelerate_cli", *command[1:]]
    if code := subprocess.run(words, check=False).returncode:
        raise UserError(f"{shlex.join(command)} ended with exit code {code}: its last line says why; the same command "
                        "continues")


def _gpus() -> int:
    import torch

    return torch.cuda.device_count()
