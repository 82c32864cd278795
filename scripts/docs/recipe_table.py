"""Table of the packaged recipes: memory class, images per epoch, hours, prompts and rewards, computed without a GPU.

    python scripts/docs/recipe_table.py              # a dry run of each full-size recipe, half a minute each; all lines
    python scripts/docs/recipe_table.py sd15 sdxl_24gb  # of those two; the table keeps what the other recipes say
    python scripts/docs/recipe_table.py --none       # no dry run: docs/recipes.md of what the recipes say

Each recipe has a comment `# One GPU (N GB): ...` or `# 8 GPU (N GB): ...`, which names the GPUs of its memory class. A
dry run on one of them, as one of so many processes, writes the rest of the line: images, seconds and hours. The line
before it states the rewards. docs/recipes.md is written from those lines and the recipes' keys.
"""

import argparse
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import recipe_downloads
import train_recipes
import verify_recipe

from flowgrpo.config import load
from flowgrpo.config.schema import Config
from flowgrpo.gpus import GIB, gpu_named
from flowgrpo.published import MODELS
from flowgrpo.tools.dry_run.estimate import dry_run

ROOT = Path(__file__).parents[2]
MOST = 200  # hours on one GPU
PAGE = ROOT / "docs" / "recipes.md"
LINE = re.compile(r"^# (?P<count>One|\d+) (?P<gpu>\w+) \((?P<memory>\d+) GB\):(?P<said>.*)$", re.M)
REWARDS = re.compile(r"^# Trained on: .*\n", re.M)
LICENCE = re.compile(r"^# Licence: (?P<name>.+?), (?P<gated>gated|not gated)\b", re.M)
HEAD = """# Recipes of full-size models

Each recipe aligns one published model on GPUs of one memory class. `flowgrpo train sdxl_24gb` finds it by name in any
folder. Your own recipe [extends](configuration.md) one by `extends: sdxl_24gb`; a local file of that name wins.

GiB (the peak of each GPU) and hours (of all epochs) are **computed** by
`flowgrpo check RECIPE --gpu GPU --processes N` ([what is counted](performance.md#estimate-memory-and-time)). Hours are
lower bounds, without rewards and evaluations.

**No recipe has run at full size on a GPU unless its level says so**: `loads`, a number of epochs, or `curve` (each
trained reward has risen on held-out prompts, 95 %). `gated`: three epochs train on a CPU, at full width with one or two
blocks of random weights, and give the metrics that are kept (`make gates`). `computed`: memory and hours only.

Not read, for want of a copy: the schedulers' files of Qwen-Image-2.1 and HunyuanImage 2.1, on which no number here
depends, and whether FLUX.3 is gated.

Check a licence on the model's page before you publish weights. For a gated model, accept its licence there and run
`hf auth login`.

Recipes of edits and of videos from an image read your own prompt file, with an image in each line:
`{"prompt": "make the dog red", "image": "dog.png"}` ([prompts](prompts.md)). `geneval` reads `metadata` too:
`{"tag": "colors", "include": [{"class": "dog", "count": 1, "color": "red"}]}`.
"""
TABLE = """
## All recipes

| recipe | GiB | hours | level | GPUs | method | trained on |
|---|---:|---:|---|---|---|---|
"""
MODELS_HEAD = """

Hours with a star are too many for one GPU: use several.

## Models

| model | licence | GB to download | extras |
|---|---|---:|---|
"""


def names() -> list[str]:
    """Return the recipes of models with a published configuration."""
    return [file.stem for file in sorted((ROOT / "configs").glob("*.yaml")) if load(file).model in MODELS]


def computed(name: str) -> str:
    """Run a recipe dry on its GPUs; return the comment's text. SystemExit if it does not fit."""
    config, line = load(path(name)), comment(name)
    gpu = gpu_named(line["gpu"])
    counts = dry_run(config, gpu, processes(line)).correct(line["gpu"], config.model)
    if above := counts.above(gpu.room):
        raise SystemExit(f"{name} does not fit a {line['gpu']} in {', '.join(above)}: {counts.peak / GIB:.1f} GiB of "
                         f"{gpu.room / GIB:.1f}")
    return said(config, counts.seconds, counts.peak / GIB, counts.source)


def processes(line: re.Match[str]) -> int:
    return 1 if line["count"] == "One" else int(line["count"])


def said(config: Config, seconds: float, peak: float, source: str = "") -> str:
    """Return what a recipe's comment says of an epoch and of the run. peak: GiB. source: of a measured correction."""
    train = config.train
    hours = train.epochs * round(seconds) / 3600
    return (f"{train.prompts * train.group:,} {noun(config)} an epoch in {round(seconds):,} s, "
            f"{train.epochs} epochs in {hours:,.{0 if hours >= 10 else 1}f} h, peak {peak:.1f} GiB "
            f"({f'computed, hours corrected as {source}' if source else 'computed'})")


def noun(config: Config) -> str:
    return "clips" if (config.image.frames or 1) > 1 else "images"


def path(name: str) -> Path:
    return ROOT / "configs" / f"{name}.yaml"


def comment(name: str) -> re.Match[str]:
    """Return the comment's match. SystemExit if the recipe has none."""
    line = LINE.search(path(name).read_text(encoding="utf-8"))
    if line is None:
        raise SystemExit(f"{name} names no GPU: give it a comment such as '# One 4090 (24 GB): '")
    return line


def write(name: str, text: str) -> None:
    """Replace what the recipe's comment says behind its GPU."""
    source = path(name).read_text(encoding="utf-8")
    place = comment(name)
    path(name).write_text(source[:place.start("said")] + " " + text + source[place.end("said"):], encoding="utf-8")


def write_rewards(name: str) -> None:
    """Write the recipe's comment `# Trained on: ...` of its rewards, before that of its GPUs."""
    config, source = load(path(name)), REWARDS.sub("", path(name).read_text(encoding="utf-8"))
    trained, watched = (", ".join(rewards(rules)) for rules in (config.trained, config.extra_rewards))
    place = LINE.search(source)
    at = place.start() if place else 0
    said = f"# Trained on: {trained}. Eval-only: {watched}.\n"
    path(name).write_text(source[:at] + said + source[at:], encoding="utf-8")


def row(name: str) -> str:
    """Return the recipe's row of the table."""
    config, line = load(path(name)), comment(name)
    facts = re.fullmatch(r"([\d,]+) \w+ an epoch in ([\d,]+) s, (\d+) epochs in ([\d,.]+) h, peak ([\d.]+) GiB .*",
                         line["said"].strip())
    if facts is None:
        raise SystemExit(f"{name} says {line['said']!r}: run this script with its name")
    *_, hours, peak = facts.groups()
    gpus = f"{line['gpu']} ({line['memory']} GB)"
    if line["count"] == "One" and float(hours.replace(",", "")) > MOST:
        hours += "*"
    if line["count"] != "One":
        gpus = f"{line['count']} x {gpus}"
    cells = [f"`{name}`", peak, hours, verify_recipe.verified(name), gpus, f"`{config.method}`",
             listed(rewards(config.trained))]
    return f"| {' | '.join(cells)} |"


def model_row(model: str, names: list[str]) -> str:
    """Return the row of a model: its licence, and what its recipes need."""
    configs = [load(path(name)) for name in names]
    named = {reward for config in configs for reward in rewards(config.trained | config.extra_rewards)}
    extras = listed(sorted({extra for config in configs for extra in recipe_downloads.extras(
        config, [*rewards(config.trained | config.extra_rewards)])}))
    largest = 2 * max(recipe_downloads.billions(config, named) for config in configs)
    return f"| `{model}` | {licence(names[0])} | {largest:.1f} | {extras} |"


def page() -> str:
    """Return docs/recipes.md: the recipes of each model, and what they download."""
    recipes = {name: load(path(name)) for name in names()}
    first = {config.model: name for name, config in reversed(recipes.items())}
    used = {reward for config in recipes.values() for reward in rewards(config.trained | config.extra_rewards)}
    rows = [recipe_downloads.reward_row(name) for name in sorted(used) if recipe_downloads.of_reward(name)]
    models_of = {model: [name for name, config in recipes.items() if config.model == model] for model in first}
    models = sorted(models_of, key=str.lower)
    tables = [TABLE, "\n".join(row(name) for model in models for name in models_of[model]), MODELS_HEAD,
              "\n".join(model_row(model, models_of[model]) for model in models), "\n"]
    return HEAD + "".join(tables) + recipe_downloads.HEAD + "\n".join(rows) + "\n" + train_recipes.section()


def licence(name: str) -> str:
    """Return the name of the model's licence, and whether it is gated."""
    stated = LICENCE.search(path(name).read_text(encoding="utf-8"))
    if stated is None:
        raise SystemExit(f"{name} names no licence: give it a comment such as '# Licence: Apache 2.0, not gated.'")
    return stated["name"] + (", gated" if stated["gated"] == "gated" else "")


def rewards(rules: dict[str, Any]) -> Iterator[str]:
    """Yield the rewards' names; that of a reward of images for one of frames."""
    for label, rule in rules.items():
        yield rule.args.get("reward", label) if rule.use == "frames" else rule.use or label


def listed(labels: Iterable[str]) -> str:
    return ", ".join(f"`{label}`" for label in labels)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipes", nargs="*", help=f"of {', '.join(names())}; all unless given")
    parser.add_argument("--none", action="store_true", help="run none, and write the table of what the recipes say")
    args = parser.parse_args()
    for name in names():
        write_rewards(name)
    for name in [] if args.none else args.recipes or names():
        write(name, computed(name))
        print(name, comment(name)["said"].strip(), flush=True)
    if not args.recipes:
        PAGE.write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
