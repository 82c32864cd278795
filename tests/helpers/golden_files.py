"""What tests compare with files below golden/.

`PYTHONPATH=. python tests/helpers/golden_files.py` writes them anew, or those named: methods, parts, config, help,
metrics.
Look at the difference before you keep it.
"""

import contextlib
import dataclasses
import io
import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

from typer import rich_utils

from flowgrpo.cli import main
from flowgrpo.config import load
from flowgrpo.config.schema import fields
from flowgrpo.errors import UserError
from flowgrpo.methods import preset, presets, reads, registry
from flowgrpo.methods.method import Method
from flowgrpo.methods.validate import resolve
from flowgrpo.parts import ranges, settings
from flowgrpo.policies import build
from flowgrpo.train import Trainer
from tests.helpers import tiny_runs
from tests.helpers.commands import commands

FOLDER = Path(__file__).parents[1] / "golden"
RECIPES = Path(__file__).parents[2] / "configs"
PROCESSES = ("flow", "vp", "tokens", "masks")
# Recipes whose pipeline predicts noise, which only its loaded scheduler says.
VARIANCE_PRESERVING = {"sd15", "sd15_24gb", "sd15_short", "sdxl", "sdxl_24gb", "sdxl_short", "starter_consistency"}
# Presets of models that answer about their own images: tests/contrib/questions/test_self_answers.py has their values.
ABOUT_IMAGES = ("unirl", "unirl_sft")
# Presets whose metrics on a variance-preserving model are frozen.
VP = ("ddpo", "b2_diffurl", "rlcm", "diffusion_dpo", "rpo", "refl", "draft", "alignprop", "expo")
WIDTH = 100  # of a terminal, in characters


# --- resolved methods ------------------------------------------------------------------------------------------------

def plain(part: Any) -> Any:
    """A part as JSON has it: its type and its fields."""
    if dataclasses.is_dataclass(part):
        return {"type": type(part).__name__} | {field.name: plain(getattr(part, field.name))
                                                for field in dataclasses.fields(part)}
    if isinstance(part, (list, tuple)):
        return [plain(each) for each in part]
    return str(part) if isinstance(part, float) and not math.isfinite(part) else part


def described(method: Method) -> dict[str, Any]:
    """What the method trains, and the parts of which this has any use, by the names that recipes have for them."""
    parts = {place: method.parts()[place] for place in sorted(reads.names(method))}
    off = {place for place in ("lag", "tuning") if parts.get(place) == Method().parts()[place]}
    return {"trains": method.target.trains} | {place: plain(part) for place, part in parts.items()
                              if part is not None and place not in off}


def of_presets() -> dict[str, Any]:
    """Every preset on every process that it is for; None where a variance-preserving one refuses it."""
    found = {}
    for process in PROCESSES:
        for name in presets.presets_for("flow" if process == "vp" else process):
            try:
                found[f"{name} ({process})"] = described(preset(name).on(process))
            except UserError:
                found[f"{name} ({process})"] = None
    return found | {f"{name} (image tokens)": described(preset(name).on("image tokens")) for name in ABOUT_IMAGES}


def process_of(name: str) -> str:
    """The process of a recipe's model."""
    return "vp" if name in VARIANCE_PRESERVING else build.process(build.kind(load(RECIPES / f"{name}.yaml")))


def of_recipes() -> dict[str, Any]:
    found = {}
    for name in sorted(path.stem for path in RECIPES.glob("*.yaml")):
        found[name] = described(resolve(load(RECIPES / f"{name}.yaml"), process_of(name)))
    return found


def methods() -> str:
    """A JSON object with a line for every part."""
    found = {"presets": of_presets(), "recipes": of_recipes()}
    lines = []
    for section, each in found.items():
        named = [f"  {json.dumps(name)}: " + ("null" if parts is None else "{\n" + ",\n".join(
            f"   {json.dumps(place)}: {json.dumps(part)}" for place, part in parts.items()) + "}")
            for name, parts in each.items()]
        lines.append(f" {json.dumps(section)}: {{\n" + ",\n".join(named) + "}")
    return "{\n" + ",\n".join(lines) + "}\n"


def parts() -> str:
    """A line for every part: its fields, with their defaults and the values that they take; words of messages last."""
    lines = []
    for name, part in sorted(registry.TYPES.items()):
        words = {field: known.words for field, known in ranges(part).items() if known.words}
        lines.append("; ".join([*settings(part).values(), *(f"{field} is {text}" for field, text in words.items())]))
    return "".join(f"{name}: {line}\n" for name, line in zip(sorted(registry.TYPES), lines))


# --- the command line and the configuration --------------------------------------------------------------------------

def config() -> str:
    """A line for every key: its default and its description."""
    return "".join(f"{key} = {field.default!r}  # {field.description}\n" for key, field in fields().items())


def shown(*arguments: str) -> str:
    """What a command prints on a terminal of WIDTH characters, without colours."""
    taken = io.StringIO()
    with mock.patch.multiple(rich_utils, MAX_WIDTH=WIDTH, FORCE_TERMINAL=False), contextlib.redirect_stdout(taken):
        assert main([*arguments]) == 0
    return "".join(f"{line.rstrip()}\n" for line in taken.getvalue().splitlines())


def help_texts() -> str:
    """The help of the program and of each of its commands."""
    asked = [[], *(name.split() for name in sorted(commands()))]
    return "\n".join(f"$ {' '.join(['flowgrpo', *each, '--help'])}\n{shown(*each, '--help')}" for each in asked)


# --- metrics ---------------------------------------------------------------------------------------------------------

OVERLAYS = {"flow": ("mix_grpo+grpo_guard", "flow_grpo+flow_dppo", "sol_rl+diffusion_nft", "ddpo+texforce",
                     "mix_grpo+dynamic_sampling", "mix_grpo+mopps", "mix_grpo+knapsack_rl",
                     "flow_grpo+diffusion_opd"),
            "tokens": ("dapo+dynamic_sampling", "grpo+scaf_grpo", "grpo+ghpo")}
# Every preset on every kind of model that it is for, modifiers over a base method.
RUNS = [(kind, method) for kind in tiny_runs.KINDS for method in
        [*(name for name in presets.presets_for("flow" if kind == "vp" else kind)
           if (name in presets.BASE_METHODS or kind in tiny_runs.TEXTS) and (kind != "vp" or name in VP)),
         *OVERLAYS.get(kind, ())]]
METRICS = ("loss", "grad_norm", "log_ratio_max", "clip_fraction", "kl", "reward/score/mean", "value_loss")
# Two passes over an epoch's samples: in the first all ratios are 1, and no clip is reached.
PASSES = 2


# Surrogates with a clip at a ratio of 1, where rounding says on which side a decision is.
AT_ONE = ("topr", "nft")


def selected(method: str, epoch: dict[str, Any]) -> dict[str, float]:
    """The METRICS of an epoch."""
    return {key: epoch[key] for key in METRICS if key in epoch and (key != "clip_fraction" or method not in AT_ONE)}


def trainer(kind: str, method: str) -> Trainer:
    """The trainer of one of RUNS."""
    return tiny_runs.trainer(kind, tiny_runs.config(kind, method, train__inner_epochs=PASSES))


def metrics() -> str:
    """A line for every epoch of every run, each number to six digits."""
    lines = []
    for kind, method in RUNS:
        found = [selected(method, epoch) for epoch in tiny_runs.epochs(trainer(kind, method))]
        each = [json.dumps({key: float(f"{value:.6g}") for key, value in epoch.items()}) for epoch in found]
        lines.append(f" {json.dumps(f'{method} ({kind})')}: [\n  " + ",\n  ".join(each) + "]")
    return "{\n" + ",\n".join(lines) + "}\n"


FILES: dict[str, tuple[str, Callable[[], str]]] = {
    "methods": ("methods.json", methods), "parts": ("parts.txt", parts), "config": ("config.txt", config),
    "help": ("help.txt", help_texts), "metrics": ("metrics.json", metrics)}


def kept(name: str) -> str:
    """The content of a file that was written."""
    return (FOLDER / FILES[name][0]).read_text(encoding="utf-8")


def write(names: list[str]) -> None:
    FOLDER.mkdir(exist_ok=True)
    for name in names:
        file, made = FILES[name]
        (FOLDER / file).write_text(made(), encoding="utf-8")


if __name__ == "__main__":
    write(sys.argv[1:] or [*FILES])
