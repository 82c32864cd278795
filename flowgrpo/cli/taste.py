"""`flowgrpo taste`: clicks on images of a few-step model become a LoRA."""

import threading
from pathlib import Path
from typing import Annotated

import typer

from flowgrpo.cli.options import recipe_and_options
from flowgrpo.cli.root import TRAIN, app
from flowgrpo.cli.train import UNTRAINED
from flowgrpo.errors import UserError


@app.command("taste", rich_help_panel=TRAIN, short_help="Train a few-step model on your own clicks, in a browser.",
             context_settings={"ignore_unknown_options": True})
def taste(
    arguments: Annotated[list[str] | None, typer.Argument(
        metavar="MODEL|--KEY=VALUE", show_default=False, help="A few-step model: starter_consistency, a folder or a "
        "hub id; and any key of the configuration, such as --train.steps=4 or --train.lr=2e-4.")] = None,
    prompts: Annotated[str, typer.Option(metavar="FILE_OR_SET", help="A file of prompts, or a set that `flowgrpo list "
                                         "prompts` lists.")] = "starter",
    lora: Annotated[str | None, typer.Option(metavar="START", show_default=False,
                                             help="A LoRA to start from: a run, a folder or a file.")] = None,
    minutes: Annotated[float, typer.Option(min=0.1, help="Length of the session; it may be ended before.")] = 20.0,
    output: Annotated[Path, typer.Option(metavar="NAME", help="The folder of the session.")] = Path("taste"),
    sees: Annotated[str | None, typer.Option(metavar="REWARD", show_default=False, help="A reward of images and "
                                             "prompts that is installed, such as clip_score: its score is a feature of "
                                             "the learned taste.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the session in that folder.")] = False,
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: a free one.")] = 8890,
) -> int:
    """Train a few-step model on your own taste: choose the best of four images on a page of this machine, while the
    model learns from your clicks.

    The page's Finish button, the end of the time and Ctrl-C end a session: it then writes the LoRA, the votes as
    pairs.jsonl, the learned taste as a reward, and a report.
    """
    from flowgrpo.contrib.taste import session
    from flowgrpo.contrib.taste.loop import VOTES, Taste
    from flowgrpo.contrib.taste.votes import VoteLog
    from flowgrpo.policies.pipelines import few_steps
    from flowgrpo.tools.vote.live import LiveBallot
    from flowgrpo.tools.vote.server import address, server

    others = ("prompts", "lora", "minutes", "output", "sees", "resume", "port")
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
        epochs = session.train(config, Taste(live, config.folder, sees=sees), resume)
        summary = session.finish(config, live.log, epochs)
        serving.shutdown()
    for sentence in session.sentences(config.folder, live.log, live.against(), summary):
        typer.echo(sentence)
    return UNTRAINED if not summary or summary["trained"]["nothing"] else 0
