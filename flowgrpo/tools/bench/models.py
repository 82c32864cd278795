"""Models of a bench: packaged models (the settings of their recipes that all methods share, and three disjoint sets
of prompts), and methods as they are given: a preset, presets joined by +, FILE.py:NAME, or a recipe file.
"""

import dataclasses
import functools
import math
import zlib
from collections import Counter, defaultdict
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from flowgrpo import rewards
from flowgrpo.config import parse, recipes
from flowgrpo.config.schema import sections
from flowgrpo.config.sections import Adapter
from flowgrpo.data import sets
from flowgrpo.data.prompts import Prompt, to_jsonl
from flowgrpo.errors import UserError
from flowgrpo.methods import overlay
from flowgrpo.methods.targets import LatentEdits
from flowgrpo.storage import atomic

VALIDATION = 5  # one of so many training texts of a task is for validation
SIDES = ("train", "validation", "held_out")
# Keys of the recipe that every bench sets itself, and why.
OF_BENCH = {
    "method": "the methods are compared",
    "parts": "each method has its published parts",
    "prompts": "training, validation and held-out prompts share no text",
    "held_out": "training, validation and held-out prompts share no text",
    "seed": "0 to `--seeds` less 1",
    "name": "method, seed and a hash of the settings",
    "output": "the folder of the bench",
    "tracker": "none: a bench has a page of its own",
    "train.epochs": "as many as the budget buys",
    "train.save_every": "the measured epochs are saved",
    "train.keep": "the measured epochs are saved",
    "eval.every": "`--points` measurements",
    "eval.prompts": "all held-out prompts, or `--prompts`",
    "eval.rewards": "the accuracy, and a reward that is not trained on"}
RECIPES = (".yaml", ".yml")
# Keys of a recipe that are the bench's.
SHARED = ("name", "output", "model", "prompts", "held_out", "seed", "tracker", "train.epochs", "train.save_every")
CLIPS = ("low", "high", "bound")  # fields of losses that bound a ratio


@dataclass(frozen=True)
class BenchModel:
    """Facts of a model that a bench needs.

    process: as in `Method.on`. prompts: name of its set. measured: reward that is the accuracy. watched: rule of a
    reward that is not trained on, by name. differs: dotted keys whose value in the recipe is not the bench's, with the
    bench's and the reason. gradient: `reward` for methods that follow a reward's gradient; None without a
    differentiable one. reference: default method to compare with, whose sampler also measures the KL. evaluations: the
    default budget, which holds an epoch of each method and about as many as the model's recipe has.
    """

    process: str
    prompts: str
    measured: str
    watched: dict[str, dict[str, Any]]
    differs: dict[str, tuple[Any, str]] = field(default_factory=dict)
    reference: str = "flow_grpo"
    gradient: dict[str, float] | None = None
    evaluations: int = 40_000
    parts_of_kl: dict[str, Any] = field(default_factory=lambda: {"kl": {"type": "GaussianKL", "weight": 1.0}})


MODELS: dict[str, BenchModel] = {
    "starter": BenchModel(
        "flow", "starter", "scene", {"sharpness": {}},
        {"adapter.targets": (["to_q", "to_k", "add_k_proj", "linear_1", "linear_2"],
                             "the recipe trains text encoders, most methods the denoiser"),
         "train.lr": (2.0e-3, "of the denoiser, and one number for all methods: what `auto` finds depends on the "
                              "method")},
        gradient={"scene_soft": 1.0}),
    "starter_consistency": BenchModel("flow", "starter", "scene", {"sharpness": {}}, gradient={"scene_soft": 1.0}),
    "starter_video": BenchModel(
        "flow", "starter_video", "motion", {"sharpness": {"use": "frames", "args": {"reward": "sharpness"}}}),
    "starter_text": BenchModel(
        "tokens", "starter_text", "numeric_match", {"repetition": {}}, reference="grpo", evaluations=800_000,
        parts_of_kl={})}
SIXTEEN = {"train.prompts": 6, "train.group": 16}  # as many samples as 4 groups of 24
# What presets need beside their published parts on few steps and small groups: splits that a short grid has, and
# groups of the size that two, two, two and two make; fewer previews; an edit that learns within the budget.
ADJUSTED: dict[str, dict[str, Any]] = {
    "branch_grpo": SIXTEEN | {"parts": {"plan": {"splits": [0, 1, 2, 3]}}},
    "tree_rpo": SIXTEEN,
    "texforce": {"adapter.targets": Adapter().targets},  # a LoRA of the text encoder alone reads none
    "sol_rl": {"parts": {"preview": {"pool": 48, "steps": 4}}},
    "expo": SIXTEEN | {"train.lr": 1.0e-3, "train.inner_epochs": 2, "parts": {"edit": {"candidates": 4}}}}


@functools.cache
def _recipe(name: str) -> dict[str, Any]:
    raw = parse.read_recipe(name)
    trained = raw["reward"] if isinstance(raw["reward"], dict) else {raw["reward"]: 1.0}
    return recipes.flat(raw | {"reward": trained}, sections())  # parts and rewards stay whole


def common_settings(name: str) -> dict[str, Any]:
    """Dotted settings of all runs on a model: its recipe's, but OF_BENCH and `BenchModel.differs`."""
    of = MODELS[name]
    kept = {key: value for key, value in _recipe(name).items() if key not in OF_BENCH}
    return kept | {key: value for key, (value, _) in of.differs.items()} | {
        "model": name, "tracker": "none", "eval.rewards": of.watched | {of.measured: {}}}


def differences(name: str) -> list[tuple[str, Any, Any, str]]:
    """Keys of `BenchModel.differs` with the recipe's value, None for its default, the bench's, and why."""
    return [(key, _recipe(name).get(key), value, why) for key, (value, why) in MODELS[name].differs.items()]


@functools.cache
def split(name: str) -> dict[str, list[Prompt]]:
    """Prompts of each side: no text is on two of them.

    The held-out side is that of the packaged set. Of every task's training texts, the fifth with the lowest CRC-32,
    rounded down and at least one, is the validation side; it leaves the training side.
    """
    packaged = sets.SETS[MODELS[name].prompts]
    assert packaged.held_out is not None, "a bench measures on a packaged held-out side"
    held, tasks = sets.load(packaged.held_out), defaultdict(set)
    keys = {prompt.key for prompt in held}
    train = [prompt for prompt in sets.load(packaged.train) if prompt.key not in keys]
    for prompt in train:
        tasks[prompt.metadata.get("task")].add(prompt.key)
    chosen = {key for texts in tasks.values() for key in sorted(
        texts, key=lambda text: (zlib.crc32(text.encode()), text))[:max(len(texts) // VALIDATION, 1)]}
    return {"train": [prompt for prompt in train if prompt.key not in chosen],
            "validation": [prompt for prompt in train if prompt.key in chosen], "held_out": held}


def write_sides(name: str, folder: Path) -> None:
    for side, prompts in split(name).items():
        atomic.write_text(folder / f"{side}.jsonl", to_jsonl(prompts))


@dataclass(frozen=True)
class Entry:
    """Method of a bench. label: its name in tables. given: as the user wrote it. settings: dotted, over the shared
    ones. adjusted: those that the bench set beside the published parts; of a recipe file all that it sets."""

    label: str
    given: str
    settings: dict[str, Any]
    adjusted: dict[str, Any]


def entries(given: list[str], name: str, of: BenchModel, trusted: bool = False) -> list[Entry]:
    """Methods of a list. name: of the model. trusted: as of `parse.load`. Raises UserError for an unknown method, one
    for other models, and one that is given twice."""
    if twice := [text for text, count in Counter(given).items() if count > 1]:
        raise UserError(f"--methods: {twice[0]} is given twice, expected different methods")
    made = [_of_recipe(Path(text), name, trusted) if text.endswith(RECIPES) else _of_method(text, of) for text in given]
    for entry in made:
        if overlay.preset(entry.settings["method"]).on(of.process).target.follows_reward:
            given_rewards = parse.validate({"reward": entry.settings.get("reward", common_settings(name)["reward"])})
            with rewards.lazily():
                rewards.require_gradient(rewards.compose(given_rewards.trained, None))
    common = {label for label, count in Counter(entry.label for entry in made).items() if count > 1}
    return [replace(entry, label=entry.given) if entry.label in common else entry for entry in made]


def _of_method(text: str, of: BenchModel) -> Entry:
    method = overlay.preset(text)
    adjusted: dict[str, Any] = {}
    for part in text.split("+"):
        adjusted = recipes.over(adjusted, ADJUSTED.get(part, {}))
    if method.target.follows_reward and of.gradient:
        adjusted["reward"] = of.gradient
    label = "+".join(part.rpartition(":")[2] if ".py:" in part else part for part in text.split("+"))
    return Entry(label, text, {"method": text} | adjusted, adjusted)


def _of_recipe(path: Path, name: str, trusted: bool) -> Entry:
    raw = parse.read_yaml(path)
    if not trusted:
        parse.require_own(path, raw)
    config = parse.validate(raw, where=str(path))
    if "model" in raw and config.model != name:
        raise UserError(f"{path}: its model is {config.model}, but the bench is of {name}: give --model "
                        f"{config.model}, or another recipe")
    settings = {"method": config.method} | {key: value for key, value in recipes.flat(raw, sections()).items()
                                            if key not in SHARED and not key.startswith("eval.")}
    return Entry(path.stem, str(path), settings, settings)


# --- sweep -----------------------------------------------------------------------------------------------------------

def scale_entry(entry: Entry, rate: float, lr: float, clip: float) -> dict[str, Any]:
    """An entry's settings with factors on its learning rate and on its clip. rate: learning rate without factors.
    Raises UserError for a clip that the loss refuses."""
    settings = entry.settings | ({} if lr == 1 else {"train.lr": rate * lr})
    if clip == 1:
        return settings
    parts = recipes.over(settings.get("parts", {}), {"surrogate": clip_of(entry, clip)})
    overlay.with_parts(overlay.preset(entry.settings["method"]), parts)
    return settings | {"parts": parts}


def clip_of(entry: Entry, factor: float) -> dict[str, Any]:
    """The clip's fields of a method's loss times a factor; empty for a loss without a clip."""
    method = overlay.with_parts(overlay.preset(entry.settings["method"]), entry.settings.get("parts", {}))
    return {} if isinstance(method.target, LatentEdits) else _clip(method.loss.surrogate, factor)


def _clip(surrogate: Any, factor: float) -> dict[str, Any]:
    values = {field.name: getattr(surrogate, field.name) for field in dataclasses.fields(surrogate)}
    fields: dict[str, Any] = {}
    for key in CLIPS:
        bound, most = values.get(key), 1.0 if key == "low" else math.inf  # a ratio is at least 0
        if isinstance(bound, float) and math.isfinite(bound):  # a `low` of 1 bounds nothing, and stays
            fields[key] = bound if key == "low" and bound == 1 else min(bound * factor, most)
    inner = _clip(values["surrogate"], factor) if dataclasses.is_dataclass(values.get("surrogate")) else {}
    return fields | ({"surrogate": inner} if inner else {})

