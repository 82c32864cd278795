"""`flowgrpo list runs`: the runs of a folder."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from flowgrpo.cli.root import list_app, print_table


@list_app.command("runs", short_help="List runs with their rewards before and after.")
def runs(
    folder: Annotated[Path, typer.Argument(metavar="[FOLDER]", help="The folder that holds the runs.")] = Path("runs"),
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """List runs, the newest first: model, method, epochs, rewards on held-out prompts before and after, and state."""
    from flowgrpo.evaluation.runs import list_runs

    found = list_runs(folder)
    if as_json:
        typer.echo(json.dumps([asdict(run) for run in found], indent=2))
        return
    rows = []
    for run in found:
        rewards = list(dict.fromkeys([*run.before, *run.after]))
        before, after = ("\n".join("-" if (value := values.get(name)) is None else f"{value:.4g}" for name in rewards)
                         for values in (run.before, run.after))
        epochs = f"{run.epochs} of {'?' if run.total is None else run.total}"
        rows.append([run.name, run.model, run.method, epochs, "\n".join(rewards), before, after, run.state])
    print_table(["run", "model", "method", "epochs", "reward", "before", "after", "state"], rows)
