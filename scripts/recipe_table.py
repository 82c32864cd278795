"""Table of the packaged recipes: memory class, pictures per epoch, hours, prompts and rewards, computed without a GPU.

    python scripts/recipe_table.py                   # a dry run of each full-size recipe, half a minute each; all lines
    python scripts/recipe_table.py sd15 sdxl_24gb    # of those two; the table keeps what the other recipes say
    python scripts/recipe_table.py --none            # no dry run: docs/recipes.md of what the recipes say

Each recipe has a comment `# One GPU (N GB): ...`, which names the GPU of its memory class. A dry run on that GPU writes
the rest of the line: pictures, seconds and hours. docs/recipes.md is written from those lines and the recipes' keys.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from flowgrpo.config import load
from flowgrpo.config.schema import Config
from flowgrpo.dry_run.estimate import dry_run, gib
from flowgrpo.dry_run.published import MODELS
from flowgrpo.gpus import gpu_named

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "recipes.md"
LINE = re.compile(r"^# One (?P<gpu>\w+) \((?P<memory>\d+) GB\): (?P<said>.*)$", re.M)
HEAD = """# Recipes of full-size models

Written by `scripts/recipe_table.py` from the recipes: do not edit. Memory and time are **computed, not measured**, by
`flowgrpo check --recipe RECIPE --gpu GPU`, for one GPU of the memory class that the recipe's comment names
([what is counted](performance.md#dry-run)). No recipe has been run at full size yet. Hours are those of all epochs'
rollouts, decoding and updates, without rewards and evaluation; N GPUs share the pictures of an epoch. A run can end
earlier: `eval.best` keeps the best weights, and `eval.stop` ends it.

| recipe | model | method | GPU | peak, GiB | pictures per epoch | epochs | seconds per epoch | hours | prompts | rewards | measured only |
|---|---|---|---|---:|---:|---:|---:|---:|---|---|---|
"""  # noqa: E501


def names() -> list[str]:
    """Return the recipes of models with a published configuration."""
    return [file.stem for file in sorted((ROOT / "configs").glob("*.yaml")) if load(file).model in MODELS]


def computed(name: str) -> str:
    """Run a recipe dry on its GPU; return the comment's text. SystemExit if it does not fit."""
    config, line = load(path(name)), comment(name)
    gpu = gpu_named(line["gpu"])
    counts = dry_run(config, gpu)
    if above := counts.above(gpu.room):
        raise SystemExit(f"{name} does not fit a {line['gpu']} in {', '.join(above)}: {gib(counts.peak):.1f} GiB of "
                         f"{gib(gpu.room):.1f}")
    return said(config, counts.seconds, gib(counts.peak))


def said(config: Config, seconds: float, peak: float) -> str:
    """Return what a recipe's comment says of an epoch and of the run. peak: GiB."""
    train = config.train
    hours = train.epochs * round(seconds) / 3600
    return (f"{train.prompts * train.group:,} {noun(config)} an epoch in {round(seconds):,} s, "
            f"{train.epochs} epochs in {hours:,.0f} h, peak {peak:.1f} GiB (computed)")


def noun(config: Config) -> str:
    return "clips" if (config.picture.frames or 1) > 1 else "pictures"


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
    path(name).write_text(source[:place.start("said")] + text + source[place.end("said"):], encoding="utf-8")


def row(name: str) -> str:
    """Return the recipe's row of the table."""
    config, line = load(path(name)), comment(name)
    facts = re.fullmatch(r"([\d,]+) \w+ an epoch in ([\d,]+) s, (\d+) epochs in ([\d,]+) h, peak ([\d.]+) GiB .*",
                         line["said"])
    if facts is None:
        raise SystemExit(f"{name} says {line['said']!r}: run this script with its name")
    pictures, seconds, epochs, hours, peak = facts.groups()
    prompts = f"`{config.prompts}`" if not Path(str(config.prompts)).suffix else "your own, with pictures"
    cells = [f"[`{name}`](../configs/{name}.yaml)", config.model.split("/")[-1], f"`{config.method}`",
             f"{line['gpu']} ({line['memory']} GB)", peak, pictures, epochs, seconds, hours, prompts,
             listed(rewards(config.trained)), listed(rewards(config.watched))]
    return f"| {' | '.join(cells)} |"


def rewards(rules: dict[str, Any]) -> Iterator[str]:
    """Yield the rewards' names; that of a reward of pictures for one of frames."""
    for label, rule in rules.items():
        yield rule.args.get("reward", label) if rule.use == "frames" else rule.use or label


def listed(labels: Iterable[str]) -> str:
    return ", ".join(f"`{label}`" for label in labels)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipes", nargs="*", help=f"of {', '.join(names())}; all unless given")
    parser.add_argument("--none", action="store_true", help="run none, and write the table of what the recipes say")
    args = parser.parse_args()
    for name in [] if args.none else args.recipes or names():
        write(name, computed(name))
        print(name, comment(name)["said"], flush=True)
    if not args.recipes:
        PAGE.write_text(HEAD + "\n".join(map(row, names())) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
