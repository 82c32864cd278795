"""Features: what most runs lack. A record says all of each: its keys, what switches it on, and what it adds where.

The core asks for all features in four places: the configuration has their keys, the loop their extensions
(`training.extensions`), `check` their memory, and a dry run what it counts of them. It names none of them.

`contrib.features` has those of the package. Another package adds its own by an entry point in the group
`flowgrpo.features`: a module that calls `add`. One file is enough for a feature with all that belongs to it.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, ClassVar, TypeAlias

from pydantic.fields import FieldInfo

from flowgrpo import packages
from flowgrpo.config.base import FeatureKeys, facts
from flowgrpo.config.schema import Config, fields
from flowgrpo.errors import UserError
from flowgrpo.user_code import call_user_code, group_entry_points

GROUP = "flowgrpo.features"
MODULES = ("flowgrpo.contrib.features",)  # which add the package's own; light, since every command imports them
# An object, or "module:name", which is imported where it is used.
Place: TypeAlias = Any


@dataclass(frozen=True, eq=False, kw_only=True)
class Feature:
    """Feature that most runs lack. What it does not have is empty.

    name: by which the order of extensions lists it.
    wanted: truth of a configuration and its method that switch it on.
    keys: classes of its keys, one a section. Their validators are not taken.
    extension: place of its `training.extension.Extension`.
    memory: place of a function (phases, measured) that adds what it keeps to the memory of `check`, by phase and part;
    measured: a `training.memory.Measured`.
    dry_run: place of its `DryRun`.
    rollout_ranks: place of a function (configuration, processes) that tells how many of the processes only sample;
    it raises UserError for a number that does not go.
    charts: of its metrics in the report, by key: title and note.
    page: of the documentation, which has its keys.
    """

    name: str
    wanted: Callable[[Config, Any], Any]
    keys: tuple[type[FeatureKeys], ...] = ()
    extension: Place = None
    memory: Place = None
    dry_run: Place = None
    rollout_ranks: Place = None
    charts: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    page: str = ""


class DryRun:
    """Work of a dry run (`flowgrpo check --gpu`) for a feature. Each does nothing unless it is overridden.

    options: changes that make a recipe need less memory, as (key, from, to); tried before all others.
    reported: keys whose values the report shows.
    """

    options: ClassVar[tuple[tuple[str, Any, Any], ...]] = ()
    reported: ClassVar[tuple[str, ...]] = ()

    def resolve_auto(self, config: Config, processes: int, fits: Callable[[Config], bool]) -> Config:
        """Recipe with a value in place of `auto`. fits: True for a recipe that the GPU holds."""
        return config

    def require(self, config: Config, processes: int) -> None:
        """Raise UserError for a recipe that does not go with it."""

    def run(self, config: Config) -> Config:
        """Recipe whose epoch is run and counted."""
        return config

    def begin(self, trainer: Any) -> None:
        """Change the trainer of that epoch."""

    def waiting(self, config: Config) -> int:
        """Number of epochs whose samples wait beside the present one."""
        return 0

    def count(self, phases: dict[str, Any], calls: Any, times: float) -> None:
        """Change the phases of the whole epoch (`dry_run.meta_gpu.Phase`). calls: those of the epoch that was run
        (`dry_run.repeats.Repeats`). times: the whole epoch over that one."""


KNOWN: dict[str, Feature] = {}
FAILED: list[UserError] = []


def add(*features: Feature) -> None:
    """Add features, and their keys to the configuration. Raises ValueError for a key that there is."""
    grown = {keys.section for feature in features for keys in feature.keys if _grow(keys)}
    KNOWN.update({feature.name: feature for feature in features})
    for name in grown - {""}:
        section: Any = Config.model_fields[name].annotation
        section.model_rebuild(force=True)
        Config.model_fields[name].default = section()
    if any(feature.keys for feature in features):
        Config.model_rebuild(force=True)
        fields.cache_clear()


def all() -> list[Feature]:
    return list(KNOWN.values())


def active_features(config: Config, method: Any) -> Iterator[Feature]:
    """Yield the features that a run has."""
    return (feature for feature in all() if feature.wanted(config, method))


def at(place: Place) -> Any:
    return packages.load(place) if isinstance(place, str) else place


def dry_runs(features: Iterable[Feature]) -> list[DryRun]:
    """Import and make the dry runs of those features that have one."""
    return [at(feature.dry_run)() for feature in features if feature.dry_run]


def load() -> None:
    """Import the modules that add features: those of the package, and of other packages that declare theirs."""
    for module in MODULES:
        import_module(module)
    for name, point in group_entry_points(GROUP).items():
        try:
            call_user_code(f"feature {name!r} of another package does not import", import_module, point.value)
        except UserError as error:  # raised where a recipe is read: no caller of this import handles it
            FAILED.append(error)


def require() -> None:
    """Raise UserError for a feature of another package that did not import."""
    for error in FAILED:
        raise error


def _grow(keys: type[FeatureKeys]) -> bool:
    """Put keys into their section, each where its `after` says; False for a section of their own."""
    name = keys.section
    if name and name not in Config.model_fields:
        Config.model_fields[name] = FieldInfo(annotation=keys, default=keys())
        return False
    section: Any = Config.model_fields[name].annotation if name else Config
    for key in (key for key in keys.model_fields if key in section.model_fields):
        raise ValueError(f"a feature's key {f'{name}.{key}'.lstrip('.')!r} is there already: use another name")
    order = list(section.model_fields.items())
    place = len(order)
    for key, each in keys.model_fields.items():
        after = facts(each).after
        if after is not None:
            place = [other for other, _ in order].index(after) + 1 if after else 0
        order.insert(place, (key, each))
        place += 1
    section.model_fields.clear()
    section.model_fields.update(order)
    return True
