"""Packaged models of a bench: settings that all methods share, and three disjoint sets of prompts."""

from __future__ import annotations

import functools
import json
import zlib
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flowgrpo.config.sections import Adapter
from flowgrpo.data import sets
from flowgrpo.data.prompts import Prompt, as_line
from flowgrpo.errors import UserError, nearest
from flowgrpo.starter import EVAL
from flowgrpo.storage import atomic

VALIDATION = 5  # one of so many training texts of a task is for validation
SIDES = ("train", "validation", "held_out")


@dataclass(frozen=True)
class BenchModel:
    """Facts of a model that a bench needs.

    process: as in `Method.on`. prompts: name of its set. settings: dotted keys of a recipe, shared by all methods.
    measured: reward that is the accuracy. watched: rule of a reward that is not trained on, by name.
    gradient: `reward` for methods that follow a reward's gradient; None without a differentiable one.
    reference: default method to compare with, whose sampler also measures the KL.
    """

    process: str
    prompts: str
    settings: dict[str, Any]
    measured: str
    watched: dict[str, dict[str, Any]]
    reference: str = "flow_grpo"
    gradient: dict[str, float] | None = None
    parts_of_kl: dict[str, Any] = field(default_factory=lambda: {"kl": {"type": "GaussianKL", "weight": 1.0}})


SHAPES = ["to_q", "to_k", "add_k_proj", "linear_1", "linear_2"]
IMAGES: dict[str, Any] = {
    "reward": {"scene": 1.0, "scene_graded": 1.0}, "adapter.rank": 16, "adapter.targets": SHAPES,
    "train.micro_batch": 96, "train.lr": 1.5e-3, "train.schedule": "linear"}
MODELS: dict[str, BenchModel] = {
    "starter": BenchModel(
        "flow", "starter",
        IMAGES | {"train.prompts": 4, "train.group": 24, "train.shift": 1.5, "train.steps": 6, "train.lr": 2.0e-3},
        "scene",
        {"sharpness": {}}, gradient={"scene_soft": 1.0}),
    "starter_consistency": BenchModel(
        "flow", "starter", IMAGES | {"train.prompts": 8, "train.group": 12, "train.steps": 4, "train.grid": "stock"},
        "scene", {"sharpness": {}}, gradient={"scene_soft": 1.0}),
    "starter_video": BenchModel(
        "flow", "starter_video",
        {"reward": {"motion": 1.0, "motion_graded": 1.0, "appearance": 1.0}, "adapter.rank": 16,
         "adapter.targets": ["to_q", "to_k", "linear_1", "linear_2"], "train.prompts": 8, "train.group": 16,
         "train.micro_batch": 128, "train.shift": 1.5, "train.steps": 6, "train.guidance": 4.0, "train.lr": 5.0e-4,
         "train.schedule": "linear"},
        "motion", {"sharpness": {"use": "frames", "args": {"reward": "sharpness"}}}),
    "starter_text": BenchModel(
        "tokens", "starter_text",
        {"reward": {"numeric_match": 1.0}, "text.max_tokens": 24, "adapter.rank": 16, "train.prompts": 32,
         "train.group": 16, "train.updates": 4, "train.micro_batch": 128, "train.lr": 2.0e-3,
         "train.schedule": "linear"},
        "numeric_match", {"repetition": {}}, reference="grpo", parts_of_kl={})}
SIXTEEN = {"train.prompts": 6, "train.group": 16}  # as many samples as 4 groups of 24
# What presets need beside their published parts on few steps and small groups: splits that a short grid has, and
# groups of the size that two, two, two and two make; fewer previews; an edit that learns within the budget.
ADJUSTED: dict[str, dict[str, Any]] = {
    "branch_grpo": SIXTEEN | {"parts": {"plan": {"splits": [0, 1, 2, 3]}}},
    "tree_rpo": SIXTEEN,
    "texforce": {"adapter.targets": Adapter().targets},  # a LoRA of the text encoder alone reads none
    "sol_rl": {"parts": {"preview": {"pool": 48, "steps": 4}}},
    "expo": SIXTEEN | {"train.lr": 1.0e-3, "train.inner_epochs": 2, "parts": {"edit": {"candidates": 4}}}}


def model(name: str) -> BenchModel:
    """Return a model of a bench.
    Raises UserError for another name."""
    if name not in MODELS:
        raise UserError(f"--model: got {name!r}{nearest(name, [*MODELS])}")
    return MODELS[name]


def shared(name: str) -> dict[str, Any]:
    """Return the dotted settings of all runs on a model, evaluation with its card's sampler included."""
    of, card = MODELS[name], EVAL.get(name, {})
    sampler = {"eval.steps": card["num_inference_steps"], "eval.guidance": card["guidance"]} if card else {}
    return of.settings | sampler | {"model": name, "tracker": "none", "eval.rewards": of.watched | {of.measured: {}}}


@functools.cache
def split(name: str) -> dict[str, list[Prompt]]:
    """Return the prompts of each side: no text is on two of them.

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
    chosen = {key for texts in tasks.values()
              for key in sorted(texts, key=_order)[:max(len(texts) // VALIDATION, 1)]}
    return {"train": [prompt for prompt in train if prompt.key not in chosen],
            "validation": [prompt for prompt in train if prompt.key in chosen], "held_out": held}


def _order(text: str) -> tuple[int, str]:
    return zlib.crc32(text.encode()), text


def write_sides(name: str, folder: Path) -> None:
    """Write the file of every side, SIDE.jsonl, to a folder."""
    for side, prompts in split(name).items():
        lines = "".join(json.dumps(as_line(prompt)) + "\n" for prompt in prompts)
        atomic.write_text(folder / f"{side}.jsonl", lines)
