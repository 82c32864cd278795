"""Extras and downloads of the recipes, for recipe_table.py: from their keys and what their rewards state."""

import functools
from collections.abc import Iterable
from dataclasses import fields
from typing import Any

import torch

from flowgrpo import published
from flowgrpo.config.schema import Config
from flowgrpo.data.sets import SETS
from flowgrpo.policies.weights.memory_options import PACKAGES
from flowgrpo.rewards.about import SERVER, lazily
from flowgrpo.rewards.find import find
from flowgrpo.rewards.local_model import LocalModel
from flowgrpo.rewards.placement import CHECKPOINTS, local_models
from flowgrpo.rewards.reward import about
from flowgrpo.tools.dry_run import from_configs

HEAD = """
## Downloads

Each model is downloaded at its first use, to the hub's cache (`HF_HOME`) or torch's (`TORCH_HOME`). Sizes above,
with the rewards, and below are computed from the parameters, at two bytes each; fp32 files, such as those of SDXL,
take twice as much. Rewards of the recipes that download weights:

| reward | downloaded | GB in bf16 | licence of code and weights |
|---|---|---:|---|
"""


def extras(config: Config, rewards: Iterable[str]) -> list[str]:
    """Return the extras of flowgrpo that a recipe needs, by its prompts, rewards, weights and optimizer."""
    of_hub = config.prompts in SETS and not SETS[config.prompts].is_packaged
    named = [PACKAGES.get(config.memory.weights, ""), "bitsandbytes" * (config.train.optimizer == "adamw8bit"),
             "datasets" * of_hub]
    for name in rewards:
        reward = made(name)
        named += [about(part).needs or "" for part in (reward, *local_models(reward))]
    return sorted({extra.strip() for needs in named for extra in needs.split(",")} - {"", SERVER})


def billions(config: Config, rewards: Iterable[str]) -> float:
    """Return the parameters that a recipe downloads, in 10^9; a reward's weights count once."""
    return of_model(config.model) + sum(map(of_reward, set(rewards)))


def of_model(model: str) -> float:
    """Return the parameters of a published pipeline in 10^9, text encoders and autoencoder included."""
    return sum(_part(repr(part)) for part in published.MODELS[model].parts.values())


def of_reward(name: str) -> float:
    """Return the parameters of a reward's models in 10^9, by their declarations."""
    return sum(model.parameters or 0 for model in local_models(made(name))) / 1e9


@functools.cache
def made(name: str) -> Any:
    """Return a reward without its weights."""
    with lazily():
        return find(name, {})


@functools.cache
def _part(described: str) -> float:
    """Return the parameters of a pipeline's component, given by the repr of its class and configuration."""
    kind, config = next(part for model in published.MODELS.values() for part in model.parts.values()
                        if repr(part) == described)
    module = from_configs.part(kind, config, torch.bfloat16)
    return sum(p.numel() for p in module.parameters()) / 1e9 if isinstance(module, torch.nn.Module) else 0.0


def reward_row(name: str) -> str:
    """Return a reward's row."""
    taken = [weights for model in local_models(made(name)) if model.parameters for weights in _named(model)]
    cells = [f"`{name}`", ", ".join(f"`{each}`" for each in taken), f"{2 * of_reward(name):.1f}"]
    return f"| {' | '.join([*cells, about(made(name)).licence or '?'])} |"


def _named(model: LocalModel) -> list[str]:
    """Return the repositories that a reward's model names, or else its name in a library."""
    values = [value for entry in fields(model) if isinstance(value := getattr(model, entry.name), str)
              and entry.name in (*CHECKPOINTS, "tokenizer", "base")]
    return ["/".join(value.split("/")[:2]) for value in values if "/" in value] or [", ".join(values)]
