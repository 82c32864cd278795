"""The command line. What a person gets wrong is told in one line, with exit code 2; `--help` loads no torch."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from flowgrpo import __version__
from flowgrpo.errors import UserError

ColumnKind = Literal["checkpoints", "runs", "seeds", "guidance", "steps", "rlg"]
ExportForm = Literal["kohya", "merged", "card"]
RLG = "Draw with base + W * (tuned - base): 0 the base, 1 the tuned model, above 1 beyond it (RLG). Other weights " \
      "run the denoiser twice as often."
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
    select_best: Annotated[str | None, typer.Option(metavar="REWARD", help="Keep the weights that are best by this "
                                                    "held-out reward: eval.best.")] = None,
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
    named = dict(method=method, reward=reward, prompts=prompts, model=model, output=output, seed=seed,
                 **{"eval.best": select_best})
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
    from flowgrpo import data, recorded_pairs, rewards

    recorded_pairs.in_place(settings, data.resolve(settings))
    for label, rule in (settings.trained | settings.watched).items():
        rewards.locate(rule.use or label)


@app.command()
def sample(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="starter, a local directory, or a hub id.")],
    prompt: Annotated[list[str] | None, typer.Option(show_default=False,
                                                     help="What to draw; may be given several times.")] = None,
    prompts: Annotated[Path | None, typer.Option(help="A prompt file in place of --prompt; the folder gets a "
                                                 "prompts.jsonl, which names each sample, too. The same again goes "
                                                 "on.")] = None,
    lora: Annotated[str | None, typer.Option(help="A finished run, or a folder with a LoRA.")] = None,
    count: Annotated[int, typer.Option(min=1, help="Pictures per prompt.")] = 1,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    steps: Annotated[int | None, typer.Option(min=1, help="Denoising steps; without: the pipeline's own.")] = None,
    guidance: Annotated[float | None, typer.Option(min=0, help="Guidance scale; without: the pipeline's own.")] = None,
    rlg: Annotated[str | None, typer.Option(metavar="W", help=RLG)] = None,
    output: Annotated[Path, typer.Option(help="The folder for the PNG files.")] = Path("samples"),
    temperature: Annotated[float | None, typer.Option(min=0, help="Of a language model; 0 takes the likeliest token. "
                                                      "Without: the run's, or 0 for one text, 1 for several.")] = None,
    image: Annotated[Path | None, typer.Option(help="A picture for a language model that reads images.")] = None,
    batch: Annotated[int | None, typer.Option(min=1, help="With --prompts: samples per call of the model. Without: 1 "
                                              "picture, 8 texts.")] = None,
    key: Annotated[str | None, typer.Option(metavar="NAME", help="With --prompts: what prompts.jsonl calls a sample "
                                            "in the metadata. Without: base_image or base_text.")] = None,
) -> None:
    """Draw pictures with a model, or write texts, with or without a LoRA."""
    weight = _weight(rlg)
    if weight is not None and lora is None:
        raise UserError("--rlg: expected --lora too, whose change of the model it weights")
    if bool(prompt) == (prompts is not None):
        raise UserError(f"got {'both' if prompt else 'neither'}, expected --prompt TEXT or --prompts FILE")
    if prompts is not None:
        if image is not None:
            raise UserError("--image: goes with --prompt; in a prompt file, every prompt may bring an `image`")
        from flowgrpo.evaluation import prompt_file

        typer.echo(prompt_file.sample(model, prompts, output, lora=lora, count=count, seed=seed, steps=steps,
                                      guidance=guidance, rlg=weight, batch=batch, temperature=temperature, key=key))
        return
    for name, value in {"batch": batch, "key": key}.items():
        if value is not None:
            raise UserError(f"--{name}: goes with --prompts FILE; leave it out")
    if not all(text.strip() for text in prompt):
        raise UserError("--prompt: expected a text, got an empty one")
    if _writes(model, lora):
        if weight is not None:
            raise UserError("--rlg: weights the velocities of a denoiser; leave it out for a language model")
        from flowgrpo.evaluation import texts

        for text in texts.sample(model, Path(lora) if lora else None, prompt, count, seed, temperature,
                                 str(image) if image else None):
            typer.echo(text)
        return
    if image is not None:
        raise UserError("--image: is for a language model that reads images; a pipeline's picture stands in a prompt "
                        "file, for train and eval")
    from flowgrpo.evaluation import compare

    for path in compare.sample(model, lora, prompt, count, seed, steps, guidance, output, weight):
        typer.echo(path)


def _writes(model: str, run: str | Path | None = None) -> bool:
    """Whether a model is a language model, as the run that trained it, its files or the hub say."""
    from flowgrpo.config import load
    from flowgrpo.policies.build import writes

    recipe = Path(run) / "config.yaml" if run else None
    return writes(model, load(recipe) if recipe and recipe.is_file() else None)


@app.command()
def grid(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a finished run.")],
    prompts: Annotated[Path | None, typer.Option(help="A prompt file; without: the run's held-out prompts.")] = None,
    count: Annotated[int, typer.Option(min=1, help="Number of prompts.")] = 12,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    columns: Annotated[ColumnKind | None, typer.Option(help="What differs from column to column; without: base and "
                                                            "tuned.")] = None,
    values: Annotated[str, typer.Option(metavar="A,B", help="Of the columns: epochs, folders of runs, numbers.")] = "",
    rlg: Annotated[str | None, typer.Option(metavar="W", help=RLG)] = None,
    output: Annotated[Path | None, typer.Option(help="The PNG file; without: grid.png in the run's folder.")] = None,
) -> None:
    """Draw before and after: the base and a run's LoRA on the same prompts and seeds. Or, with --columns, a page of
    several columns as PNG and HTML, of texts as Markdown and HTML."""
    if not run.is_dir():
        raise UserError(f"no run at {run}: expected the folder that `flowgrpo train` wrote")
    if output is not None and output.suffix.lower() == ".html":
        raise UserError(f"--output {output}: expected the name of the PNG; the HTML page of --columns lies beside it")
    weight = _weight(rlg)
    if columns is None:
        if values:
            raise UserError("--values: expected --columns too, which says what they are of")
        from flowgrpo.evaluation import compare, texts

        if not _writes("", run):
            typer.echo(compare.grid(run, prompts, count, seed, output or run / "grid.png", weight))
            return
        if weight is not None:
            raise UserError("--rlg: weights the velocities of a denoiser; leave it out for a text run")
        typer.echo(texts.grid(run, prompts, count, seed, output or run / "grid.png"))
        return
    if weight is not None:
        raise UserError("--rlg: goes without --columns; for a column of each weight, --columns rlg --values 0,1,2")
    from flowgrpo.evaluation import columns as pages

    given = [value.strip() for value in values.split(",") if value.strip()]
    for path in pages.columns(run, columns, given, prompts, count, seed, output or run / f"grid-{columns}.png"):
        typer.echo(path)


@app.command("eval")
def evaluate(
    source: Annotated[str, typer.Argument(metavar="MODEL_OR_RUN", help="A model as for sample, or a finished run.")],
    suite: Annotated[str, typer.Option(metavar="NAME|PATH", help="starter, starter_video, starter_text, "
                                       "geneval_coco, a published suite's file or folder, or a hub dataset's id.")],
    output: Annotated[Path, typer.Option(help="The folder of samples, scores and tables; the same again goes on.")],
    rewards: Annotated[str, typer.Option(metavar="A,B", help="Rewards; without: those of the run.")] = "",
    lora: Annotated[Path | None, typer.Option(help="A finished run, a folder with a LoRA, or its file.")] = None,
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
) -> None:
    """Score a model on a suite of prompts, by several rewards, and against its base."""
    weights = _weights(rlg)
    from flowgrpo.evaluation import evaluate as evaluation
    from flowgrpo.evaluation import findings

    names = [name.strip() for name in rewards.split(",") if name.strip()]
    results = evaluation.evaluate(source, suite, names, output, lora=lora, base=base, samples=samples, steps=steps,
                                  guidance=guidance, seed=seed, features=features, rlg=weights, batch=batch,
                                  temperature=temperature, max_tokens=max_tokens)
    if results:  # of several processes the first has them
        findings.show(results)
        written = ["table.md", "results.json", "grid.png", *(["rlg.png"] if len(weights) > 1 else [])]
        typer.echo(", ".join(str(output / name) for name in written))


def _weight(text: str | None) -> float | None:
    """The one weight of --rlg."""
    found = _weights(text)
    if len(found) > 1:
        raise UserError(f"--rlg: got {text!r}, expected one number from 0 up")
    return found[0] if found else None


def _weights(text: str | None) -> list[float]:
    """The weights of --rlg; UserError for what is no finite number from 0 up."""
    try:
        found = [] if text is None else [float(value) for value in text.split(",")]
    except ValueError:
        found = [-1.0]
    if not all(0 <= weight < float("inf") for weight in found):
        raise UserError(f"--rlg: got {text!r}, expected numbers from 0 up")
    return found


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
def report(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run, finished or not.")],
    live: Annotated[bool, typer.Option("--live", help="Serve it to browsers of this machine; it follows the run.")]
    = False,
    port: Annotated[int, typer.Option(min=0, max=65535, help="With --live; 0: a free one.")] = 8899,
) -> None:
    """Write report.html: a run's curves, pictures through training, best and worst samples, in one file."""
    if not run.is_dir():
        raise UserError(f"no run at {run}: expected the folder that `flowgrpo train` wrote")
    if live:
        from flowgrpo.evaluation.live import server

        with server(run, port) as serving:
            typer.echo(f"http://{serving.server_name}:{serving.server_port} (Ctrl-C ends it)")
            serving.serve_forever()
    else:
        from flowgrpo.evaluation.report import write

        typer.echo(write(run))


@app.command()
def check(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="starter, a local directory, a hub id, or the name of a "
                                         "pipeline's or language model's class, for a tiny random instance.")],
    recipe: Annotated[str | None, typer.Option(help="A YAML recipe, for its adapter, precision and memory.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Tell whether a pipeline or a language model can be trained, what it needs, and why not; exit code 2 where it
    cannot."""
    from flowgrpo import config
    from flowgrpo.policies.check import report

    told = report(model, config.load(recipe) if recipe else None)
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
    if isinstance(value, dict):
        return ", ".join(f"{key} {inner}" for key, inner in value.items())
    if isinstance(value, (list, tuple)):
        return ", ".join(map(str, value)) or "none"
    return "-" if value is None else str(value)


@app.command()
def methods() -> None:
    """List the presets that --method takes."""
    from flowgrpo.presets import PRESETS

    _table(["name", "what it does", "source"], [[name, *_summary(preset)] for name, preset in PRESETS.items()])
    typer.echo("Formula, recipe and differences of each: docs/methods/NAME.md; papers and parts: docs/methods/index.md")


@app.command()
def rewards(as_json: Annotated[bool, typer.Option("--json", help="Print JSON, with what each does.")] = False) -> None:
    """List the rewards that --reward takes by name: what they judge, their range, needs and licence."""
    from flowgrpo.rewards import table

    found = table.listed()
    if as_json:
        typer.echo(json.dumps(found, indent=2))
        return
    _table(["name", "modality", "range", "needs", "licence", "installed"], [table.cells(reward) for reward in found])
    for reward in found:
        if reward["broken"]:
            typer.echo(reward["broken"])
    typer.echo('Needs are installed as "flowgrpo[NAME]" or by their own name; ? is what a reward does not say.')


@app.command()
def score(
    reward: Annotated[str, typer.Argument(metavar="REWARD", help="A reward's name, or path/to/file.py:function.")],
    images: Annotated[list[Path], typer.Argument(metavar="IMAGES...", help="Pictures; or folders of frames, or .txt "
                                                                           "files, for a reward that judges these.")],
    prompt: Annotated[str | None, typer.Option(help="The prompt of all of them.")] = None,
    prompts: Annotated[Path | None, typer.Option(help="A prompt file: a prompt for each, in order.")] = None,
    args: Annotated[str, typer.Option(metavar="YAML", help="Arguments of a reward that is a class.")] = "{}",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Score files with a reward."""
    from flowgrpo import data
    from flowgrpo.rewards import table

    if prompt is not None and prompts is not None:
        raise UserError("got --prompt and --prompts, expected one of them")
    given = data.load_prompts(prompts) if prompts else [data.Prompt(prompt or "")] * len(images)
    if len(given) != len(images):
        raise UserError(f"--prompts {prompts} has {len(given)} prompts for {len(images)} files, expected one for each")
    scores = table.score_files(reward, _made_with(reward, args), images, given)
    known = [None if value != value else value for value in scores]
    if as_json:
        rows = [{"file": str(file), "prompt": each.text, "score": value}
                for file, each, value in zip(images, given, known)]
        typer.echo(json.dumps({"reward": reward, "scores": rows}, indent=2))
    else:
        _table(["file", "prompt", reward], [[str(file), each.text, "-" if value is None else f"{value:.4f}"]
                                            for file, each, value in zip(images, given, known)])


@app.command()
def train_reward(
    pairs: Annotated[Path, typer.Argument(metavar="PAIRS", help="A .jsonl file: in each line `prompt`, `chosen` and "
                                          "`rejected` (pictures, relative to the file), and maybe `aspects`, an object "
                                          "of names with chosen, rejected or tie.")],
    output: Annotated[Path, typer.Option(help="The folder of the reward: --reward FOLDER, or FOLDER:ASPECT.")],
    held_out: Annotated[str, typer.Option(metavar="SHARE|FILE", help="Pairs to measure with: a share of the prompts, "
                                          "or another file of pairs.")] = "0.1",
    text: Annotated[str, typer.Option(help="Whose text encoder the network begins with: starter (its little world's "
                                           "words, 16 tokens), or a pipeline's folder or hub id.")] = "starter",
    size: Annotated[int, typer.Option(min=16, help="Pixels per side that the network sees.")] = 128,
    clip: Annotated[str | None, typer.Option(metavar="NAME", help="Another network: a head on this model of open_clip, "
                                             "frozen; --text and --size are not used then.")] = None,
    pretrained: Annotated[str | None, typer.Option(metavar="TAG|FILE", help="The weights of --clip.")] = None,
    epochs: Annotated[int, typer.Option(min=1, help="At most.")] = 20,
    patience: Annotated[int, typer.Option(min=1, help="Stop after so many epochs without a better accuracy on the "
                                          "held-out pairs; the best epoch is kept.")] = 4,
    batch: Annotated[int, typer.Option(min=1, help="Pairs per step.")] = 64,
    lr: Annotated[float, typer.Option(min=0, help="Learning rate at its highest; it falls to 0.")] = 1e-3,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    bf16: Annotated[bool, typer.Option("--bf16", help="Train in bfloat16; scores are float32 all the same.")] = False,
    device: Annotated[str | None, typer.Option(help="Without: a GPU where there is one.")] = None,
) -> None:
    """Train a reward from pairs of pictures, one of them preferred (Bradley-Terry), with one or several aspects."""
    from flowgrpo import preference_pairs

    sides = preference_pairs.split(preference_pairs.load_pairs(pairs), _share_or_file(held_out))
    preference_pairs.aspects(*sides)  # mistakes are told before torch is loaded
    from flowgrpo import preference_training as training

    found = training.train(*sides, output, training.Settings(
        text=text, size=size, clip=clip, pretrained=pretrained, epochs=epochs, patience=patience, batch=batch, lr=lr,
        seed=seed, bf16=bf16, device=device))
    _table(["aspect", "accuracy", "95 %", "prompts"],
           [[name, f"{each.mean:.3f}", f"{each.low:.3f} to {each.high:.3f}", str(each.prompts)]
            for name, each in found.items()])
    typer.echo(f"Of the held-out pairs, which chose the epoch too. Use it as --reward {output}")


def _share_or_file(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text


@app.command()
def serve_reward(
    name: Annotated[str, typer.Argument(metavar="NAME", help="A reward's name, or path/to/file.py:function.")],
    host: Annotated[str, typer.Option(help="Where to listen; 0.0.0.0 is every network of this machine.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any free one.")] = 8765,
    token_file: Annotated[Path | None, typer.Option(
        help="A file with the token that clients have to send; without: the environment's FLOWGRPO_REWARD_TOKEN, if "
             "set.")] = None,
    max_mb: Annotated[float, typer.Option(min=0.001, help="MiB of one request.")] = 64,
    max_batch: Annotated[int, typer.Option(min=1, help="Samples of one request.")] = 64,
    args: Annotated[str, typer.Option(metavar="YAML", help="Arguments of a reward that is a class.")] = "{}",
) -> None:
    """Serve a reward to other processes or machines: its name in their recipes is the URL that this prints."""
    from flowgrpo.rewards import find
    from flowgrpo.rewards.client import token
    from flowgrpo.rewards.needs import needed
    from flowgrpo.rewards.wire import Limits

    for module in ("uvicorn", "fastapi"):
        needed(module, "server", "serve-reward")
    from flowgrpo.rewards.server import serve

    secret, reward = token(token_file), find(name, _made_with(name, args))
    serve(name, reward, host, port, Limits(int(max_mb * 2**20), max_batch), secret, typer.echo)


def _made_with(reward: str, args: str) -> dict[str, Any]:
    """The arguments of a reward, from YAML."""
    from flowgrpo import config

    return config.validate({"reward": {reward: {"args": config.parse_value("args", args)}}}).trained[reward].args


def _summary(thing: Any) -> tuple[str, str]:
    """The first line of a docstring, and the source that its last brackets name."""
    line = (thing.__doc__ or "").strip().partition("\n")[0].rstrip(".")
    found = re.fullmatch(r"(.*?) *\(([^()]*)\)", line)
    return (found[1], found[2]) if found else (line, "")


def _table(heads: list[str], rows: list[list[str]]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(*heads, box=box.SIMPLE_HEAD, pad_edge=False)
    table.columns[0].no_wrap, table.columns[2].max_width = True, 20
    for row in rows:
        table.add_row(*row)
    Console(width=None if sys.stdout.isatty() else 200).print(table, markup=False)  # a pipe has no edge


def main(arguments: list[str] | None = None) -> int:
    """Run the command line -> exit code: 0, 2 after a person's mistake, 130 after an interruption."""
    os.environ.setdefault("DIFFUSERS_VERBOSITY", "error")  # its import tells of optional packages it half supports
    try:
        return app(arguments, prog_name="flowgrpo", standalone_mode=False) or 0
    except (KeyboardInterrupt, typer.Abort):
        return 130
    except UserError as error:
        told = str(error)
    except UsageError as error:
        told = error.format_message()
    finally:
        _leave_group()
    if told:  # Typer's error for a call without a command is the help it has shown
        print(f"flowgrpo: error: {' '.join(told.split())}", file=sys.stderr)
    return 2


def _leave_group() -> None:
    """End the process group that a launcher's processes opened: a process that exits with its threads still running
    may abort, though its work is done."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
