"""Arguments of the trainers, checked when an object is made: unknown names, and values out of range."""

import inspect
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

from flowgrpo.arguments import OMITTED, Options, build_config
from flowgrpo.errors import UserError, nearest
from flowgrpo.parts import Range
from flowgrpo.rewards.find import locate
from flowgrpo.training import announcement, checks


class UnknownArgument(UserError, TypeError):
    """Arguments of names that a class does not have."""


class NamedArguments:
    """Base of classes that raise UnknownArgument for all arguments of unknown names, before any other check."""

    def __new__(cls, *_: Any, **given: Any) -> Any:
        known = [*inspect.signature(cls.__init__).parameters][1:]
        wrong = []
        for name in given:
            if name not in known:
                end = nearest(name, known)
                wrong.append(f"unknown argument {name!r}" + (
                    f"; help(flowgrpo.trl.{cls.__name__}) lists all" if end[0] == ";" and len(known) > 15 else end))
        if wrong:
            raise UnknownArgument(f"{cls.__name__}: {' '.join(wrong)}")
        return super().__new__(cls)


def wrong_numbers(config: Any, ranges: Mapping[str, Range | int]) -> Iterator[str]:
    """Yield what is wrong of fields that are not None, not in their range, or no integers of the least."""
    for name, taken in ranges.items():
        value, whole = getattr(config, name), isinstance(taken, int)
        number = isinstance(value, int if whole else (int, float)) and not isinstance(value, bool)
        if value is not None and not (number and (value >= taken if isinstance(taken, int) else taken.takes(value))):
            yield f"{name}: got {value!r}, expected " + (
                f"an integer of {taken} or more" if whole else str(taken) if number else "a number")


def with_options(keys: Mapping[str, Any], options: Any) -> dict[str, Any]:
    """Put options over the keys of a configuration. Raises UserError if they are no dictionary."""
    if not isinstance(options, Mapping):
        raise UserError(f"options: got {' '.join(repr(options).split())[:80]}, expected a dictionary of flowgrpo's "
                        "keys")
    result = dict(keys)
    for key, value in options.items():
        below = result.get(key)
        result[key] = with_options(below, value) if isinstance(below, dict) and isinstance(value, Mapping) else value
    return result


def processes() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def check(model: Any, rewards: dict[Any, Any], prompts: Any, keys: dict[str, Any]) -> None:
    """Raise UserError for arguments that `align` would reject before it loads a model."""
    config, functions = build_config(model, rewards, prompts, OMITTED, None, cast(Options, keys))
    pipe = None if isinstance(model, (str, Path)) else model
    config, _ = announcement.fit_model(config, pipe)
    checks.check_keys(config, pipe)
    for label, rule in (config.trained | config.extra_rewards).items():
        if label not in functions:
            locate(rule.use or label)
