"""`flowgrpo compare vote`: collect preferences on a web page of this machine."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flowgrpo.cli.root import compare_app
from flowgrpo.cli.show import print_table
from flowgrpo.errors import UserError
from flowgrpo.nouns import counted
from flowgrpo.storage import paths

if TYPE_CHECKING:
    from flowgrpo.vote.ballot import Comparison


@compare_app.command("vote", short_help="Collect blind votes on pairs of images in a browser.")
def vote(
    places: Annotated[list[Path], typer.Argument(
        metavar="RUN_OR_GRID | A B", show_default=False, help="A finished run, the PNG of `flowgrpo grid`, or two "
                                                              "folders of images with equal names.")],
    lora: Annotated[list[Path] | None, typer.Option(
        show_default=False, help="Generate the pairs: with two LoRAs, or with the base and one.")] = None,
    prompts: Annotated[Path | None, typer.Option(help="With --lora: a prompt file; without: the run's held-out "
                                                 "prompts.")] = None,
    count: Annotated[int, typer.Option(min=1, help="With --lora: number of prompts.")] = 50,
    output: Annotated[Path, typer.Option(help="The file of pairs, for `flowgrpo reward train` and --preferences. Votes "
                                         "in it are kept, and only the other pairs are shown.")] = Path("pairs.jsonl"),
    seed: Annotated[int, typer.Option(min=0, help="Seed of the order, the sides and the samples.")] = 0,
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: a free one.")] = 8890,
) -> None:
    """Collect preferences: serve pairs of images or clips side by side to browsers of this machine, blind and in
    random order, and write the votes as a file of pairs. Ctrl-C ends it."""
    from flowgrpo.vote.ballot import Ballot
    from flowgrpo.vote.server import address, server

    if output.suffix != ".jsonl":
        raise UserError(f"--output {output}: expected a .jsonl file")
    paths.require_file(output)
    comparisons, names = _pairs(places, lora or [], prompts, count, seed, output)
    ballot = Ballot(comparisons, names, output, seed)
    with server(ballot, port) as serving:
        typer.echo(f"{counted(len(ballot.comparisons), 'pair')}, {len(ballot.verdicts)} with a vote: "
                   f"{address(serving)} "
                   "(Ctrl-C ends it)")
        with contextlib.suppress(KeyboardInterrupt):
            serving.serve_forever()
    _show(ballot.summary(), output)


def _pairs(places: list[Path], loras: list[Path], prompts: Path | None, count: int, seed: int, output: Path
           ) -> tuple[list[Comparison], tuple[str, str]]:
    """Return the pairs and the names of their sides."""
    if not loras:
        if prompts is not None:
            raise UserError("--prompts: generates pairs with a LoRA: give --lora too")
        from flowgrpo.vote import sources

        return sources.pairs(places)
    if len(places) != 1:
        raise UserError(f"--lora: goes with one run or model, got {len(places)} paths")
    from flowgrpo.vote import drawn

    return drawn.pairs(places[0], loras, prompts, count, seed, output.with_name(f"{output.stem}-pictures"))


def _show(summary: dict[str, Any], output: Path) -> None:
    """Print the numbers of votes, and the share that prefers B."""
    a, b = summary["a"], summary["b"]
    print_table(["prompts", "votes", f"for {b}", "ties", f"share for {b} over {a}, 95 %"],
                [[name, str(row["votes"]), str(row["b"]), str(row["ties"]), row["share"]]
                 for name, row in summary["rows"].items()])
    typer.echo(f"{output}: intervals are Wilson's, without ties")
