"""`flowgrpo taste`: clicks on images of a few-step model become a LoRA."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Annotated, Any

import typer

from flowgrpo.cli.options import recipe_and_options
from flowgrpo.cli.root import TRAIN, app
from flowgrpo.errors import UserError
from flowgrpo.nouns import quantity


@app.command("taste", rich_help_panel=TRAIN, short_help="Train a few-step model on your own clicks, in a browser.",
             context_settings={"ignore_unknown_options": True})
def taste(
    arguments: Annotated[list[str] | None, typer.Argument(
        metavar="MODEL|--KEY=VALUE", show_default=False,
        help="A few-step model: starter_consistency, a folder or a hub id; and any key of the configuration, such as "
             "--train.steps=4 or --train.lr=2e-4.")] = None,
    prompts: Annotated[str, typer.Option(metavar="FILE_OR_SET", help="A file of prompts, or a set that `flowgrpo list "
                                         "prompts` lists.")] = "starter",
    lora: Annotated[str | None, typer.Option(metavar="START", show_default=False,
                                             help="A LoRA to start from: a run, a folder or a file.")] = None,
    minutes: Annotated[float, typer.Option(min=0.1, help="Length of the session; it may be ended before.")] = 20.0,
    output: Annotated[Path, typer.Option(metavar="NAME", help="The folder of the session.")] = Path("taste"),
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the session in that folder.")] = False,
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: a free one.")] = 8890,
) -> int:
    """Train a few-step model on your own taste: choose the best of four images on a page of this machine, while the
    model learns from your clicks.

    The page's Finish button, the end of the time and Ctrl-C end a session: it then writes the LoRA, the votes as
    pairs.jsonl, the learned taste as a reward, and a report.
    """
    from flowgrpo.contrib.taste import session
    from flowgrpo.contrib.taste.loop import ROUNDS, VOTES, Taste
    from flowgrpo.contrib.taste.votes import VoteLog
    from flowgrpo.policies.pipelines import few_steps
    from flowgrpo.tools.vote.live import LiveBallot
    from flowgrpo.tools.vote.server import address, server

    others = ("prompts", "lora", "minutes", "output", "resume", "port")
    model, options = recipe_and_options(arguments or [], noun="model", others=others)
    if model is None:
        raise UserError("expected a model, such as `flowgrpo taste starter_consistency`")
    config = session.session_config(model, prompts, lora, output, options, resume)
    if few_steps.ahead(model, config.load).why is None and "train.steps" not in options:
        typer.echo(f"flowgrpo: {model} is not known as a few-step model, and has {config.train.steps} steps here: "
                   "--train.steps gives others; starter_consistency is a few-step model", err=True)
    live = LiveBallot(VoteLog(config.folder / VOTES), minutes * 60, config.seed)
    with server(live, port) as serving:
        thread = threading.Thread(target=serving.serve_forever, daemon=True)
        thread.start()
        typer.echo(f"{address(serving)} (vote there, once the model is loaded; its Finish button or Ctrl-C ends the "
                   "session)")
        epochs = session.train(config, Taste(live, config.folder), resume)
        summary = session.finish(config, live.log, epochs)
        serving.shutdown()
    return _print_summary(config.folder, live, -(-epochs // ROUNDS), summary)


def _print_summary(folder: Path, live: Any, learned: int, summary: dict[str, Any]) -> int:
    """Print what a session has left; return the command's exit code."""
    from flowgrpo.cli.train import UNTRAINED
    from flowgrpo.contrib.taste.session import PAIRS, REWARD

    clicks, against = sum(".q" in name for name in live.log.votes), live.against()
    typer.echo(f"{quantity(clicks, 'click')}, {learned} {'batch' if learned == 1 else 'batches'} learned: "
               f"votes in {folder / PAIRS}")
    if against:
        typer.echo(f"against the base you preferred the tuned model in {against['wins']:g} of {against['of']} blind "
                   f"pairs, a tie as one half: {against['share']}")
    if not summary:
        typer.echo(f"nothing is trained, since no batch of clicks is complete: --output {folder} --resume goes on")
        return UNTRAINED
    for sentence in summary["trained"]["said"][:1]:
        typer.echo(sentence)
    typer.echo(f"your taste as a reward: --reward {folder / REWARD}")
    return UNTRAINED if summary["trained"]["nothing"] else 0
