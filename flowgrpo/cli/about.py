"""`check`, and what there is: `flowgrpo list methods`, `parts` and `recipes`, `docs`, `constraints`."""

import ast
import json
import re
from operator import itemgetter
from pathlib import Path
from typing import Annotated, Any

import typer

from flowgrpo.cli.dry_run import predict
from flowgrpo.cli.options import Trusted, recipe_and_options
from flowgrpo.cli.prepare import show, size
from flowgrpo.cli.reproduce import of_recipe
from flowgrpo.cli.root import TRAIN, Words, app, list_app, matching, print_groups, print_table
from flowgrpo.config import parse
from flowgrpo.config import recipes as packaged
from flowgrpo.errors import UserError, nearest
from flowgrpo.log import status
from flowgrpo.starter import FOLDERS
from flowgrpo.user_code import group_entry_points

PACKAGE = Path(__file__).parents[1]
IN_GIB = ("weights", "memory", "memory_parts")  # keys of a `check` report that are in GiB


@app.command(rich_help_panel=TRAIN, short_help="Predict memory and hours on a GPU; check that a model trains.",
             context_settings={"ignore_unknown_options": True})
def check(
    arguments: Annotated[list[str] | None, typer.Argument(
        metavar="MODEL|--KEY=VALUE", show_default=False, help="MODEL: starter, a local directory, a hub id, or the "
        "name of a pipeline's or language model's class, for a tiny random instance; or a recipe, in place "
        "of --recipe. With --gpu: the recipe's model unless given. Any key of the configuration, such as "
        "--train.micro_batch=2, overrides the recipe.")] = None,
    recipe: Annotated[str | None, typer.Option(help="A YAML recipe, or the name of a packaged one, for its adapter, "
                                               "precision and memory.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda; without it cuda where it is there.")] = None,
    gpu: Annotated[str | None, typer.Option(help="Such as H100, A6000 or 4090: predict memory and "
                                            "seconds of the recipe's epoch on it, from only configuration "
                                            "files.")] = None,
    processes: Annotated[int, typer.Option(min=1, help="With --gpu: processes that share an epoch's prompts.")] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", help="With --gpu: print memory and seconds by phase, and "
                                          "what is counted.")] = False,
    trusted: Trusted = False,
) -> None:
    """Check that a model can be trained, and estimate memory and time; exit code 2 where it cannot, or where
    that is unknown."""
    others = "recipe", "gpu", "processes", "json", "verbose", "trust"
    model, options = recipe_and_options(arguments or [], "model", others)
    # What stands in the model's place may be a recipe, or a slip of one.
    if recipe is None and model is not None and (Path(model).suffix in (".yaml", ".yml") or model in packaged.names()
                                                 and (gpu or model not in FOLDERS) and not Path(model).exists()):
        model, recipe = None, model
    if recipe is None and model is not None and not Path(model).exists():
        names = [*packaged.names(), *FOLDERS]
        if model not in names and re.fullmatch(r"[a-z0-9_.-]+", model):  # no path, no hub id and no class
            if (hint := nearest(model, names)).startswith(":"):
                raise UserError(f"no model or recipe {model!r}{hint}")
    if gpu is not None:
        predict(model, recipe, options, gpu, processes, as_json, verbose, trusted)
        return
    config = parse.load(recipe, options, trusted) if recipe or options else None
    model = model or (config.model if config and recipe else None)
    if model is None:
        raise UserError("flowgrpo check needs a MODEL or a recipe")
    from flowgrpo.tools.check.report import of_class, report

    # What the recipe lacks here, before a model is loaded.
    if recipe is not None and config is not None and not as_json:
        from flowgrpo.tools.check.needs import needs

        with status(f"looking for what {recipe} needs"):
            found = needs(config, size)
        show(found)
    with status(f"checking {model}"):
        result = report(model, config, device)
    if as_json:
        typer.echo(json.dumps(result, indent=2, default=str))
    else:
        tiny = of_class(model)
        named = result["model"] + " (a tiny random instance: its sizes are not those of a model)" * tiny
        known = {"model": named, "supported": "unknown"} | {
            key: value for key, value in result.items()
            if value is not None and key != "model" and not (tiny and key in IN_GIB)}
        lines = {key.replace("_", " ") + ", GiB" * (key in IN_GIB): _plain(value) for key, value in known.items()}
        for key, value in lines.items():
            typer.echo(f"{key:<{max(map(len, lines))}}  {value}")
    if not result["supported"]:
        raise typer.Exit(2)


def _plain(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, dict):
        return ", ".join(f"{key} {_plain(inner)}" for key, inner in value.items())
    if isinstance(value, (list, tuple)):
        return ", ".join(map(_plain, value)) or "none"
    if isinstance(value, (int, float)):
        return f"{value:,}" if isinstance(value, int) else f"{value:.3g}"
    return str(value)


# Modules of presets by title, which are read and not imported: that would load torch.
GROUPS = {
    "For pipelines: recorded steps of a rollout": ("methods.presets.denoising",),
    "For pipelines: final samples of a rollout; drakes is for masked language models":
        ("methods.presets.finals", "text.presets.relaxed"),
    "For language models": ("text.presets.completions",),
    "Modifiers of a base method: BASE+MODIFIER, such as mix_grpo+grpo_guard":
        ("methods.presets.overlays", "text.presets.overlays")}


@list_app.command("methods", short_help="List the methods that --method takes.")
def methods(
    words: Words = None,
) -> None:
    """List the presets that --method takes."""
    rows = [(title, row) for title, modules in GROUPS.items() for module in modules for row in _presets(module)]
    rows += [("From installed packages", [name, point.value, f"package {point.dist.name}"])
             for name, point in group_entry_points("flowgrpo.methods").items()]
    print_groups(matching("methods", words, rows, itemgetter(1)), "name", "source")
    typer.echo("Formula, recipe and differences of each, and the parts: docs/methods/index.md")


@list_app.command("parts", short_help="List the parts that a recipe's `parts` sets.")
def parts(
    words: Words = None,
) -> None:
    """List the parts of a method by their place: what each does, its fields with their defaults, and what they take."""
    from flowgrpo.methods import registry
    from flowgrpo.parts import settings

    rows = []
    for name, place in registry.PLACES.items():
        does, source = _summary(registry.TYPES[name].__doc__ or "")
        fields = ", ".join(settings(registry.TYPES[name]).values())
        rows.append((place, [name, f"{does}: {fields}" if fields else does, source]))
    found = matching("parts", words, rows, lambda row: [row[0], *row[1]])
    print_groups([(f"parts.{place}", row) for place, row in found], "name", "source")
    typer.echo("What a place is, and the parts: docs/reference/parts.md")


def _presets(module: str) -> list[list[str]]:
    file = PACKAGE.joinpath(*module.split(".")).with_suffix(".py")
    return [[node.name, *_summary(ast.get_docstring(node) or "")]
            for node in ast.parse(file.read_text(encoding="utf-8")).body
            if isinstance(node, ast.FunctionDef) and not node.name.startswith("_")]


def _summary(docstring: str) -> tuple[str, str]:
    """Split the first sentence of a docstring into (text, source in its last parentheses)."""
    line = " ".join(docstring.partition("\n\n")[0].split()).rstrip(".")
    match = re.fullmatch(r"(.*?) *\(([^()]*)\)", line)
    return (match[1], match[2]) if match else (line, "")


COMPUTED = re.compile(r"^# (?P<gpus>(?:One|\d+) \w+ \(\d+ GB\)): .* in (?P<hours>[\d,.]+) h, peak (?P<peak>[\d.]+) GiB "
                      r"\(computed\)$", re.M)
HEADS = ["recipe", "model", "method", "reward", "GPUs", "hours", "peak GiB"]


@list_app.command("recipes", short_help="List the recipes that `flowgrpo train` takes by name.")
def recipes(
    words: Words = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """List the packaged recipes: model, method, rewards, and the computed hours and memory on the GPUs that each is
    for. Words find those of papers too."""
    named = packaged.names() + (packaged.papers() if words else [])
    rows = matching("recipes", words, map(_row, named), list)
    if as_json:
        typer.echo(json.dumps([dict(zip(HEADS, row)) for row in rows], indent=2))
        return
    print_table(HEADS, rows)
    typer.echo("Hours and memory are computed, not measured. `flowgrpo check RECIPE --gpu NAME` computes them for "
               "another GPU")


def _row(name: str) -> list[str]:
    config = parse.load(name)
    said = COMPUTED.search((packaged.FOLDER / f"{name}.yaml").read_text(encoding="utf-8"))
    computed = of_recipe(name) or ([said["gpus"], said["hours"], said["peak"]] if said else ["any, or a CPU", "-", "-"])
    return [name, config.model.rpartition("/")[2], config.method, ", ".join(config.trained), *computed]


@app.command(hidden=True, short_help="Print a page of the documentation.")
def docs(
    page: Annotated[str | None, typer.Argument(show_default=False, help="Such as rewards or get_started/laptop. "
                                               "Without it: list the pages.")] = None,
) -> None:
    """Print a page of the documentation as Markdown. Without a page: list them."""
    folder = PACKAGE / "docs"
    pages = {file.relative_to(folder).with_suffix("").as_posix(): file
             for file in sorted([*folder.glob("*.md"), *folder.glob("*/*.md")])}
    if page is None:
        for name, file in pages.items():
            typer.echo(f"{name:<32} {file.read_text(encoding='utf-8').partition('# ')[2].splitlines()[0]}")
        return
    name = page.removeprefix("docs/").partition("#")[0].removesuffix(".md")
    if name not in pages:
        raise UserError(f"docs {page}: no such page{nearest(name, [*pages])}; `flowgrpo docs` lists them")
    typer.echo(pages[name].read_text(encoding="utf-8"))


@app.command(hidden=True, short_help="Print the tested versions, for `pip install --constraint`.")
def constraints() -> None:
    """Print the versions of all packages that this version was tested with, for `pip install --constraint FILE`."""
    typer.echo((PACKAGE / "constraints.txt").read_text(encoding="utf-8"), nl=False)
