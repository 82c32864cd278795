"""Arguments of the classes under TRL's names, which are checked when an object is made: names that are unknown, and
values that the model or the method does not take.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

from flowgrpo.errors import UserError, nearest

LISTED = 20  # arguments at most that an error lists


class UnknownArgument(UserError, TypeError):
    """Arguments of names that a class does not have."""


class NamedArguments:
    """Base of classes that raise UnknownArgument for all arguments of unknown names, before anything else is looked at.
    """

    def __new__(cls, *_: Any, **given: Any) -> Any:
        parameters = inspect.signature(cls.__init__).parameters.values()
        known = [each.name for each in parameters if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)][1:]
        if not any(each.kind is each.VAR_KEYWORD for each in parameters):
            require_known(cls.__name__, list(given), known, f"help(flowgrpo.trl.{cls.__name__})")
        return super().__new__(cls)


def require_known(where: str, given: list[str], known: list[str], place: str) -> None:
    """Raise UnknownArgument for names that are not known, each with the nearest. place: of the list of all."""
    told = []
    for name in given:
        if name not in known:
            end = nearest(name, known)
            told.append(f"unknown argument {name!r}"
                        + (f"; {place} lists all" if len(known) > LISTED and end.startswith(";") else end))
    if told:
        raise UnknownArgument(f"{where}: {' '.join(told)}")


def check(model: Any, rewards: dict[Any, Any], prompts: Any, keys: dict[str, Any],
          require_kind: Callable[[str], None] | None = None) -> None:
    """Raise UserError for arguments of `align` that its configuration, the method or the model's kind does not take.

    require_kind: a further check of the model's kind (`policies.build`). No weights are loaded.
    """
    from flowgrpo.arguments import OMITTED, build_config  # these load torch, and a configuration needs none
    from flowgrpo.policies import build
    from flowgrpo.rewards.find import locate
    from flowgrpo.training import announcement, checks

    config, functions = build_config(model, rewards, prompts, OMITTED, None, keys)
    pipe = None if isinstance(model, (str, Path)) else model
    config, _ = announcement.fit_model(config, pipe)
    if require_kind is not None:
        require_kind(build.kind(config, pipe))
    checks.check_keys(config, pipe)
    for label, rule in (config.trained | config.extra_rewards).items():
        if label not in functions:
            locate(rule.use or label)
