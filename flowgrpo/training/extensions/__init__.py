"""Extensions of the training loop: what turns each one on.

A package adds its own by an entry point in the group `flowgrpo.extensions`: a class with a `wanted`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any, TypeAlias

from flowgrpo.config.schema import Config
from flowgrpo.errors import UserError
from flowgrpo.methods import capabilities
from flowgrpo.methods.method import Method
from flowgrpo.methods.setup import Setup
from flowgrpo.training.extension import Extension, Extensions
from flowgrpo.training.run import Run
from flowgrpo.user_code import packaged

Wanted: TypeAlias = Callable[[Config, Method], Any]

# In the order in which they are called. A class is imported where it is wanted.
TABLE: dict[str, Wanted] = {
    "contrib.phases:Phases": lambda config, method: config.phases,
    "contrib.engine.extension:EngineRollouts": lambda config, method: config.rollout.engine,
    "contrib.feature_cache:RolloutCache": lambda config, method: config.rollout.cache,
    "contrib.staleness.extension:Staleness":
        lambda config, method: config.train.staleness or config.text.over_provision,
    "contrib.one_pass:OnePass": lambda config, method: config.train.one_pass,
    "training.extensions.resampling:Resampling": lambda config, method: method.redraw or method.expansion,
    "training.extensions.constraints:Constraints":
        lambda config, method: any(rule.limit for rule in config.trained.values()),
    "training.extensions.hints:RewardHints": lambda config, method: True,
    "training.extensions.measured_credit:MeasuredCredit":
        lambda config, method: method.needs or method.judges_by_reference,
    "training.extensions.supervised:Supervised": lambda config, method: method.loss.data,
    "training.extensions.value_model:ValueModel": lambda config, method: method.credit.value or method.has_quality_head,
    "contrib.variants:Variants": lambda config, method: method.writes_prompts,
    "contrib.rehearsal:RehearsedSamples": lambda config, method: method.loss.rehearsal,
    "contrib.group_replay:ReplayedGroups": lambda config, method: method.replay,
    "contrib.step_size.extension:StepSize": lambda config, method: config.train.calibration,
    "contrib.frontier:KeepFrontier": lambda config, method:
        config.eval.best == "frontier" not in config.trained | config.watched and config.eval.every,
    # The last ones move the weights.
    "contrib.extrapolation:Extrapolation": lambda config, method: config.train.extrapolate,
    "contrib.guard:Guard": lambda config, method: config.guard.window,
}


def wanted(config: Config, method: Method) -> Iterator[type[Extension]]:
    """Yield the extensions that a run has."""
    for place, wants in TABLE.items():
        if wants(config, method):
            module, name = place.split(":")
            yield getattr(import_module(f"flowgrpo.{module}"), name)
    for point in packaged("flowgrpo.extensions").values():
        if (extension := point.load()).wanted(config, method):
            yield extension


def of(trainer: Run) -> Extensions:
    """Return the extensions of a trainer."""
    return Extensions([extension(trainer) for extension in wanted(trainer.config, trainer.method)])


def judged(config: Config, method: Method) -> list[str]:
    """Return the names of values by which weights can be chosen, beside rewards."""
    return [name for extension in wanted(config, method) for name in extension.judges]


def check(setup: Setup) -> None:
    """Raise UserError for an extension that does not go with the run."""
    for extension in wanted(setup.config, setup.method):
        require(extension, setup)


def require(extension: type[Extension], setup: Setup) -> None:
    """Raise UserError for a run that the extension does not go with."""
    extension.require(setup)
    if asked := extension.asked(setup):
        for reason in obstacles(extension, setup):
            raise UserError(f"{asked}, which does not go with {reason}: leave one of them out")


def obstacles(extension: type[Extension], setup: Setup) -> Iterator[str]:
    """Yield what the extension does not go with in a run, in words: what the run lacks for it comes last."""
    yield from (reason for reason, applies in extension.refused(setup).items() if applies)
    lacking = capabilities.lacking(setup)
    for other in wanted(setup.config, setup.method):
        for capability, reason in other.lacks(setup).items() if other is not extension else ():
            lacking.setdefault(capability, []).append(reason)
    for capability in (each for each in capabilities.ALL if each in extension.needs):
        yield from lacking.get(capability, ())
