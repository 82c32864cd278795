"""Weights of a recipe's rewards: bytes, device, and whether they leave it between scorings."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from flowgrpo.config.schema import Config
from flowgrpo.errors import UserError
from flowgrpo.rewards.about import lazily
from flowgrpo.rewards.failures import relabel_errors
from flowgrpo.rewards.find import find
from flowgrpo.rewards.placement import weight_bytes
from flowgrpo.training import memory


def reward_weights(config: Config) -> dict[str, dict[str, int] | None]:
    """The bytes by device of each reward of a recipe that has weights; None for one that cannot be made here."""
    sizes: dict[str, dict[str, int] | None] = {}
    for label, rule in (config.trained | config.extra_rewards).items():
        try:
            with lazily(), relabel_errors(label, rule.use):
                reward = find(rule.use or label, rule.args)
            sizes[label] = weight_bytes(reward)
        except UserError:
            sizes[label] = None
    return {label: size for label, size in sizes.items() if size != {}}


def on_device(sizes: dict[str, dict[str, int] | None], device: torch.device) -> int:
    """The bytes of rewards on one device; a name without an index is its first."""
    def same(name: str) -> bool:
        other = torch.device(name)
        return other.type == device.type and (other.index or 0) == (device.index or 0)

    return sum(size for of in sizes.values() for name, size in (of or {}).items() if same(name))


def describe_rewards(sizes: dict[str, dict[str, int] | None], config: Config) -> dict[str, Any]:
    """The report's entry of each reward: GiB, and its device; "unknown" for one that cannot be made here."""
    away = config.memory.rewards == "cpu"
    return {label: "unknown" if of is None else ", ".join(
        f"{size / 2**30:.3f} GiB on {name}"
        + ", which it leaves after scoring" * (away and torch.device(name) != torch.device("cpu"))
        for name, size in of.items()) for label, of in sizes.items()}


def parts_that_leave(config: Config) -> list[str]:
    """Parts that leave the device while they have nothing to do."""
    room = config.memory
    parts = {"text encoders": room.encoders == "cpu", "recorded states": room.states == "cpu",
             "reward models": room.rewards == "cpu"}
    return [part for part, leaves in parts.items() if leaves]


def memory_entries(recipe: Config | None, config: Config, device: torch.device,
                   phases: Callable[[int], dict[str, dict[str, int]]]) -> dict[str, Any]:
    """The report's entries of memory and of reward models.
    recipe: None for a check without one, whose rewards do not count. phases: bytes by phase and part, from those of
    the rewards on `device`."""
    sizes = reward_weights(recipe) if recipe else {}
    found = phases(on_device(sizes, device))
    told = {"rewards": describe_rewards(sizes, config), "leaves_device": parts_that_leave(config)}
    return {key: value for key, value in told.items() if value} | {
        "memory": {name: memory.total(parts) for name, parts in found.items()},
        "memory_parts": {name: memory.total({name: size}) for name, size in found["update"].items()}}
