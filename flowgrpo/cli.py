"""The command line. What a person gets wrong is told in one line, with exit code 2; `--help` loads no torch."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from flowgrpo import __version__
from flowgrpo.errors import UserError

ExportForm = Literal["kohya", "merged", "card"]
UsageError = typer.BadParameter.__base__  # of every mistake that Typer itself finds; not exported by it

app = typer.Typer(name="flowgrpo", no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False,
                  rich_markup_mode="rich", help="Align diffusers generators and language models to a reward by "
                                                "group-relative RL.")


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"flowgrpo {__version__}")
        raise typer.Exit


@app.callback()
def _flowgrpo(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True,
                                          help="Print the version and exit.")] = False,
) -> None:
    pass


@app.command(context_settings={"ignore_unknown_options": True}, no_args_is_help=False)
def train(
    arguments: Annotated[list[str] | None, typer.Argument(
        metavar="RECIPE|--KEY=VALUE", show_default=False,
        help="A YAML recipe (without one: the defaults), and any key of the configuration, such as --train.lr=1e-4 "
             "or --eval.every=20.")] = None,
    method: Annotated[str | None, typer.Option(help="Presets joined by +, such as mix_grpo+grpo_guard.")] = None,
    reward: Annotated[str | None, typer.Option(help="A reward's name, or path/to/file.py:function.")] = None,
    prompts: Annotated[str | None, typer.Option(help="A .txt, .jsonl or .csv file.")] = None,
    model: Annotated[str | None, typer.Option(help="starter, a local directory, or a hub id.")] = None,
    output: Annotated[str | None, typer.Option(help="The folder that holds the runs.")] = None,
    seed: Annotated[str | None, typer.Option(metavar="INTEGER", help="Seed of the run.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the run's last checkpoint.")] = False,
) -> None:
    """Align a model to a reward, as a recipe and the options say."""
    from flowgrpo import config

    recipe, options = _parse(arguments or [])
    named = dict(method=method, reward=reward, prompts=prompts, model=model, output=output, seed=seed)
    settings = config.load(recipe, options | {key: value for key, value in named.items() if value is not None})
    _check_inputs(settings)
    from flowgrpo.run import run

    run(settings, resume=resume)


def _parse(arguments: list[str]) -> tuple[str | None, dict[str, str]]:
    """Part the recipe's path from `--key=value` and `--key value`; UserError for a key that does not exist."""
    recipes, options, rest = [], {}, iter(arguments)
    for argument in rest:
        if not argument.startswith("-"):
            recipes.append(argument)
            continue
        key, equals, value = argument.lstrip("-").partition("=")
        _check_key(argument.partition("=")[0], key)
        if not equals:
            value = next(rest, "--")
            if value.startswith("--"):
                raise UserError(f"option {argument} needs a value: {argument}=VALUE")
        options[key] = value
    if len(recipes) > 1:
        raise UserError(f"expected one recipe, got {' and '.join(recipes)} (values follow their option: --KEY=VALUE)")
    return next(iter(recipes), None), options


def _check_key(option: str, key: str) -> None:
    from flowgrpo import config

    if not option.startswith("--") or not config.owner(key):
        told = config.nearest_key(key, [*config.keys(), "resume", "help"])
        raise UserError(f"unknown option {option}" + told.replace("'", "'--", 1))


def _check_inputs(settings: Any) -> None:
    """Find mistakes in prompts and rewards before torch or a model is loaded."""
    from flowgrpo import data, rewards

    data.resolve(settings)
    for name in [*settings.rewards, *settings.eval.rewards]:
        rewards.locate(name)


@app.command()
def sample(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="starter, a local directory, or a hub id.")],
    prompt: Annotated[list[str], typer.Option(help="What to draw; may be given several times.")],
    lora: Annotated[str | None, typer.Option(help="A finished run, or a folder with a LoRA.")] = None,
    count: Annotated[int, typer.Option(min=1, help="Pictures per prompt.")] = 1,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    steps: Annotated[int | None, typer.Option(min=1, help="Denoising steps; without: the pipeline's own.")] = None,
    guidance: Annotated[float | None, typer.Option(min=0, help="Guidance scale; without: the pipeline's own.")] = None,
    output: Annotated[Path, typer.Option(help="The folder for the PNG files.")] = Path("samples"),
) -> None:
    """Draw pictures with a model, with or without a LoRA."""
    if not all(text.strip() for text in prompt):
        raise UserError("--prompt: expected a text, got an empty one")
    from flowgrpo.evaluation import compare

    for path in compare.sample(model, lora, prompt, count, seed, steps, guidance, output):
        typer.echo(path)


@app.command()
def grid(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a finished run.")],
    prompts: Annotated[Path | None, typer.Option(help="A prompt file; without: the run's held-out prompts.")] = None,
    count: Annotated[int, typer.Option(min=1, help="Number of prompts.")] = 12,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    output: Annotated[Path | None, typer.Option(help="The PNG file; without: grid.png in the run's folder.")] = None,
) -> None:
    """Draw before and after: the base and a run's LoRA on the same prompts and seeds."""
    if not run.is_dir():
        raise UserError(f"no run at {run}: expected the folder that `flowgrpo train` wrote")
    from flowgrpo.evaluation import compare

    typer.echo(compare.grid(run, prompts, count, seed, output or run / "grid.png"))


@app.command()
def export(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a finished run.")],
    form: Annotated[ExportForm, typer.Option(help="kohya: a LoRA as ComfyUI reads it; merged: a whole pipeline; card: "
                                                  "README.md in the run's folder.")] = "kohya",
    output: Annotated[Path | None, typer.Option(help="The file or folder; without: in the run's folder.")] = None,
    push_to_hub: Annotated[str | None, typer.Option(metavar="OWNER/NAME", help="Upload the run with its card.")] = None,
    private: Annotated[bool, typer.Option("--private", help="A repository that only you see.")] = False,
) -> None:
    """Write a run's result in another form, or upload it."""
    from flowgrpo import export as forms

    forms.finished(run)
    if push_to_hub:
        typer.echo(forms.push(run, push_to_hub, private))
    elif form == "card":
        typer.echo(forms.card(run))
    else:
        written = output or run / {"kohya": "kohya.safetensors", "merged": "merged"}[form]
        typer.echo(getattr(forms, form)(run, written))


@app.command()
def check(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="starter, a local directory, or a hub id.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Tell whether a pipeline can be trained, and why not; exit code 2 where it cannot."""
    from flowgrpo.policies.check import report

    told = report(model)
    if as_json:
        typer.echo(json.dumps(told, indent=2, default=str))
    else:
        width = max(len(key) for key in told)
        for key, value in told.items():
            typer.echo(f"{key.replace('_', ' '):<{width}}  {_plain(value)}")
    if not told["drivable"]:
        raise typer.Exit(2)


def _plain(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, (list, tuple)):
        return ", ".join(map(str, value)) or "none"
    return "-" if value is None else str(value)


@app.command()
def methods() -> None:
    """List the presets that --method takes."""
    from flowgrpo.methods import PRESETS

    _table([(name, *_summary(preset)) for name, preset in PRESETS.items()])
    typer.echo("Formula, recipe and differences of each: docs/methods/NAME.md; papers and parts: docs/methods/index.md")


@app.command()
def rewards() -> None:
    """List the rewards that --reward takes by name."""
    from flowgrpo import rewards as known

    _table([(name, _first_line(known, name), known.source(name)) for name in known.names()])


def _first_line(known: Any, name: str) -> str:
    try:
        return _summary(known.locate(name))[0]
    except UserError as error:  # a package's broken reward must not hide the others
        return str(error)


def _summary(thing: Any) -> tuple[str, str]:
    """The first line of a docstring, and the source that its last brackets name."""
    line = (thing.__doc__ or "").strip().partition("\n")[0].rstrip(".")
    found = re.fullmatch(r"(.*?) *\(([^()]*)\)", line)
    return (found[1], found[2]) if found else (line, "")


def _table(rows: list[tuple[str, str, str]]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table("name", "what it does", "source", box=box.SIMPLE_HEAD, pad_edge=False)
    table.columns[0].no_wrap, table.columns[2].max_width = True, 20
    for row in rows:
        table.add_row(*row)
    Console().print(table, markup=False)


def main(arguments: list[str] | None = None) -> int:
    """Run the command line -> exit code: 0, 2 after a person's mistake, 130 after an interruption."""
    try:
        return app(arguments, prog_name="flowgrpo", standalone_mode=False) or 0
    except (KeyboardInterrupt, typer.Abort):
        return 130
    except UserError as error:
        told = str(error)
    except UsageError as error:
        told = error.format_message()
    if told:  # Typer's error for a call without a command is the help it has shown
        print(f"flowgrpo: error: {' '.join(told.split())}", file=sys.stderr)
    return 2
