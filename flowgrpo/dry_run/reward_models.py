"""Bytes of the reward models that stay on the GPU, by the names of their rewards."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any

from flowgrpo.config.schema import Config
from flowgrpo.device import DTYPES
from flowgrpo.errors import UserError
from flowgrpo.rewards.find import locate
from flowgrpo.rewards.local_model import LocalModel


def reward_bytes(config: Config) -> float:
    """Return the bytes of a recipe's rewards, trained and measured; a model that several of them use counts once each.
    """
    return sum(_bytes(name) for name in _names(config))


def _bytes(name: str) -> float:
    """Return the bytes of a reward's default checkpoint in its default dtype; 0 for a reward without one."""
    try:
        thing = locate(name)
    except UserError:
        return 0
    if not (inspect.isclass(thing) and issubclass(thing, LocalModel) and thing.parameters is not None):
        return 0
    return thing.parameters * DTYPES[inspect.signature(thing).parameters["dtype"].default].itemsize


def _names(config: Config) -> Iterable[str]:
    rules = config.trained | config.watched
    return {inner for name, rule in rules.items() for inner in (rule.use or name, *_inner(rule.args))}


def _inner(value: Any) -> Iterable[str]:
    """Yield the rewards that a reward's arguments name."""
    if isinstance(value, dict):
        named = [value.get("reward"), value.get("use")]
        listed = value.get("rewards")
        yield from (name for name in (*named, *(listed if isinstance(listed, list) else ())) if isinstance(name, str))
        for inner in value.values():
            yield from _inner(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _inner(inner)
