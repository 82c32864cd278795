"""Extensions of the training loop, in the order in which a run calls them. Each is of a feature (`config.features`).

A package adds its own with a feature, or alone by an entry point in the group `flowgrpo.extensions`: a class with a
`wanted`. A reward that has to draw or to wait by itself brings its own: a class in the attribute `brings`, made of the
trainer and the reward.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from flowgrpo.config import features
from flowgrpo.config.features import Feature
from flowgrpo.config.schema import Config
from flowgrpo.errors import UserError
from flowgrpo.methods import capabilities
from flowgrpo.methods.method import Method
from flowgrpo.methods.setup import Setup
from flowgrpo.rewards import inside
from flowgrpo.training.best import BestWeights
from flowgrpo.training.extension import Extension, Extensions, Run
from flowgrpo.user_code import group_entry_points

# Features in the order in which their extensions are called. Others come behind them; the last ones move the weights.
ORDER = ("phases", "engine", "feature_cache", "staleness", "one_pass", "resampling", "constraints", "hints",
         "measured_credit", "supervised", "value_model", "held_out_answers", "variants", "rehearsal", "distillation",
         "consistency", "group_replay", "step_size", "frontier", "sibling", "extrapolation", "guard")

HERE = "flowgrpo.training.extensions"
features.add(
    Feature(name="resampling", wanted=lambda config, method: method.redraw or method.expansion,
            extension=f"{HERE}.resampling:Resampling"),
    Feature(name="constraints", wanted=lambda config, method: any(rule.limit for rule in config.trained.values()),
            extension=f"{HERE}.rewards:Constraints"),
    Feature(name="hints", wanted=lambda config, method: True, extension=f"{HERE}.rewards:RewardHints"),
    Feature(name="measured_credit", wanted=lambda config, method: method.needs or method.judges_by_reference,
            extension=f"{HERE}.credit:MeasuredCredit"),
    Feature(name="supervised", wanted=lambda config, method: method.loss.data,
            extension=f"{HERE}.supervised:Supervised"),
    # Draws may be pruned by a head that the run trains.
    Feature(name="value_model", wanted=lambda config, method: method.credit.value or method.for_tokens and getattr(
        method.generation.draws, "trains_head", False), extension=f"{HERE}.credit:ValueModel"))


def list_extensions() -> list[Feature]:
    """The features that have an extension, in the order in which these are called."""
    return sorted((feature for feature in features.all() if feature.extension),
                  key=lambda feature: [*ORDER, feature.name].index(feature.name))


def active_extensions(config: Config, method: Method) -> Iterator[type[Extension]]:
    """Yield the extensions that a run has. A class is imported where it is wanted."""
    for feature in list_extensions():
        if feature.wanted(config, method):
            yield features.at(feature.extension)
    for point in group_entry_points("flowgrpo.extensions").values():
        if (extension := point.load()).wanted(config, method):
            yield extension


def extensions_of_rewards(functions: Mapping[str, Any]) -> list[tuple[Any, Any]]:
    """The extensions that trained rewards bring, each with its reward. functions: by name."""
    origins = [part.origin for reward in functions.values() for part in inside(reward)]
    return [(origin.brings, origin) for origin in origins if getattr(origin, "brings", None) is not None]


def make_extensions(trainer: Run) -> Extensions:
    first = [extension(trainer, reward) for extension, reward in extensions_of_rewards(trainer.scoring.functions)]
    return Extensions(first + [extension(trainer) for extension in active_extensions(trainer.config, trainer.method)])


def selector_names(config: Config, method: Method) -> list[str]:
    """The names of values by which weights can be chosen, beside rewards."""
    return [name for extension in active_extensions(config, method) for name in extension.judges]


def best_weights(config: Config, method: Method) -> BestWeights:
    """Best weights of a run that has measured none: by `eval.best`, or as the first extension asks that does."""
    active, settings = [*active_extensions(config, method)], config.eval
    by = settings.best or next((by for extension in active if (by := extension.best_by(config))), None)
    chosen = bool(settings.best or settings.stop) or any(extension.chooses(config) for extension in active)
    return BestWeights(settings, by, anew=bool(settings.every) and chosen)


def check(setup: Setup) -> None:
    """Raise UserError for an extension that does not go with the run."""
    for extension in _all(setup):
        require(extension, setup)


def check_model(setup: Setup) -> None:
    """Raise UserError for an extension that does not go with the model, as far as it is known."""
    for extension in _all(setup):
        extension.require_model(setup)


def _all(setup: Setup) -> list[type[Extension]]:
    first = [extension for extension, _ in extensions_of_rewards(setup.trained)]
    return [*first, *active_extensions(setup.config, setup.method)]


def require(extension: type[Extension], setup: Setup) -> None:
    """Raise UserError for a run that the extension does not go with."""
    extension.require(setup)
    if asked := extension.enabled_by(setup):
        for reason in obstacles(extension, setup):
            raise UserError(f"{asked}, which does not go with {reason}: leave one of them out")


def obstacles(extension: type[Extension], setup: Setup) -> Iterator[str]:
    """Yield what the extension does not go with in a run, in words: what the run lacks for it comes last."""
    yield from (reason for reason, applies in extension.conflicts(setup).items() if applies)
    lacking = capabilities.lacking(setup)
    for other in _all(setup):
        for capability, reason in other.missing(setup).items() if other is not extension else ():
            lacking.setdefault(capability, []).append(reason)
    for capability in (each for each in capabilities.ALL if each in extension.requirements(setup)):
        yield from lacking.get(capability, ())
