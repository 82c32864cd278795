"""Composition of a recipe's rewards: each with its rule, made once before a run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from flowgrpo.config.reward_rules import Limit, Transform, WatchRule
from flowgrpo.errors import UserError
from flowgrpo.rewards import transforms
from flowgrpo.rewards.about import Reward
from flowgrpo.rewards.cache import Scores
from flowgrpo.rewards.find import find
from flowgrpo.rewards.pairwise import sees_groups
from flowgrpo.rewards.placement import Placement, leave

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, eq=False)
class Composed:
    """Reward with its rule, in the form that `score` calls.

    kept: its cached scores, if cached. placement: where its weights are; None: loaded, where they stay.
    """

    function: Reward
    rule: WatchRule = WatchRule()
    kept: Scores | None = None
    placement: Placement | None = None

    def come(self) -> None:
        """Load the weights, or bring them back to their device, where they are not there."""
        if self.placement is not None:
            self.placement.come()

    def __getattr__(self, name: str) -> Any:
        """Return the reward's own attribute: `about`, `base`, `group`, `pairwise`, `scores`."""
        if name in ("about", "base", "group", "pairwise", "scores"):
            return getattr(self.function, name)
        raise AttributeError(name)


def compose(rules: Mapping[str, WatchRule], cache: str | None = None,
            given: Mapping[str, Reward] | None = None, away: bool = False) -> dict[str, Composed]:
    """Find and make the rewards of a recipe.

    rules: by label, which is the reward's name unless the rule has `use`. cache: the folder of cached scores. given:
    functions by label, which replace those the rules name. away: their weights leave the device between scorings.
    Raises UserError as `find` does, and for scores to be cached without a folder.
    """
    composed = {label: _composed(label, rule, cache, (given or {}).get(label)) for label, rule in rules.items()}
    composed = {label: replace(reward, placement=Placement(reward.function, away))
                for label, reward in composed.items()}
    leave(composed.values())
    return composed


def _composed(label: str, rule: WatchRule, cache: str | None, given: Reward | None) -> Composed:
    name = rule.use or label
    if given is not None and rule.args:
        raise UserError(f"reward {label!r} takes no args: it is given as an object")
    function = find(name, rule.args) if given is None else given
    if not rule.cache:
        return Composed(function, rule)
    parts = [part.function for _, part in inside(label, function)]
    if any(map(sees_groups, parts)):
        raise UserError(f"reward {label!r} compares the samples of a group, and its scores hold for that group alone: "
                        "set cache: false")
    if any(getattr(part, "reads_policy", False) for part in parts):
        raise UserError(f"reward {label!r} scores with the model that is trained, which changes: set cache: false")
    if any(hasattr(part, "begin") for part in parts):
        raise UserError(f"reward {label!r} scores by the epoch or by earlier ones: set cache: false")
    if cache is None:
        raise UserError(f"reward {label!r} keeps its scores (cache: true), but no folder is named: set the key cache "
                        "at the top of the recipe, such as cache: .cache")
    return Composed(function, rule, Scores(cache, name, function, rule.args))


def inside(name: str, reward: object) -> Iterator[tuple[str, Composed]]:
    """Yield a reward and all that it is made of, at any depth, each with its rule; parts are named NAME[0], NAME[1]."""
    composed = reward if isinstance(reward, Composed) else Composed(reward)  # type: ignore[arg-type]  # a reward
    yield name, composed
    for label, part in _parts(name, composed):
        yield from inside(label, part)


def _parts(name: str, reward: Composed) -> list[tuple[str, object]]:
    ruled = getattr(reward.function, "made", None)  # those of a `Combined` have rules
    parts = ruled.values() if isinstance(ruled, dict) else getattr(reward.function, "made_of", ())
    return [(f"{name}[{place}]", part) for place, part in enumerate(parts)]


def require_routes(rewards: Mapping[str, Composed], metadata: Iterable[dict[str, Any]]) -> None:
    """Raise UserError if the `when` of a reward, or of one that it is made of, matches no prompt's metadata (most
    likely a typo), or if no prompt has the key that it compares with (its attributes `keyed` and `key`)."""
    every = list(metadata)
    for label, reward in rewards.items():
        _require_route(label, reward, every)


def _require_route(label: str, reward: Composed, every: Sequence[dict[str, Any]]) -> None:
    if reward.rule.when and not any(reward.rule.applies(entry) for entry in every):
        keys = sorted({key for entry in every for key in entry})
        raise UserError(f"reward {label!r} applies to no prompt: its `when` is {reward.rule.when}, and the "
                        f"metadata of the {len(every)} prompts has {', '.join(keys) or 'no keys'}"
                        f"{_values(reward.rule.when, every)}")
    key = getattr(reward.function, "key", None) if getattr(reward.function, "keyed", False) else None
    applicable = [entry for entry in every if reward.rule.applies(entry)]
    if key is not None and applicable and all(entry.get(key) is None for entry in applicable):
        there = sorted({name for entry in applicable for name in entry})
        raise UserError(f"reward {label!r} compares with metadata.{key}, which none of the {len(applicable)} "
                        f"prompts has: their metadata has {', '.join(there) or 'no keys'}; write it into the "
                        "prompt file, or name another key, args: {key: NAME}")
    for part_label, part in _parts(label, reward) if applicable else ():
        _require_route(part_label, part if isinstance(part, Composed) else Composed(part), applicable)  # type: ignore[arg-type]


def _values(when: dict[str, Any], every: Sequence[dict[str, Any]]) -> str:
    """List some values that the first known key of a `when` has among the prompts."""
    key = next((key for key in when if any(key in entry for entry in every)), None)
    if key is None:
        return ""
    return f" ({key}: {', '.join(sorted({repr(entry[key]) for entry in every if key in entry})[:10])})"


def bind(rewards: Mapping[str, object], policy: object) -> None:
    """Give the policy that is trained to the rewards that score with it (their attribute `reads_policy`)."""
    for function in _functions(rewards).values():
        if getattr(function, "reads_policy", False):
            function.bind(policy)


def reads_sampler(reward: object) -> bool:
    """True if a reward, or one inside it, scores with the pipeline that is trained, which cannot sample meanwhile."""
    return any(getattr(function, "reads_policy", False) and getattr(function, "scores", None) == "latents"
               for function in _functions({"": reward}).values())


def begin(rewards: Mapping[str, object], memory: dict[str, Any], epoch: int, processes: int = 1) -> None:
    """Start an epoch of the rewards that have a method `begin`, with the run's memory.
    Raises UserError for several processes, each of which sees a share of the prompts, unless the reward's attribute
    `remembers` is false: it reads the epoch alone."""
    for name, function in _functions(rewards).items():
        if not hasattr(function, "begin"):
            continue
        if processes > 1 and getattr(function, "remembers", True):
            raise UserError(f"reward {name!r} remembers all prompts, and got {processes} processes: run it in one")
        function.begin(memory.setdefault("rewards", {}).setdefault(name, {}), epoch)


def end(rewards: Mapping[str, object]) -> None:
    """End an epoch's rollouts: what rewards score from here on is of no epoch, and they do not remember it."""
    for function in _functions(rewards).values():
        if hasattr(function, "begin"):
            function.end()


def _functions(rewards: Mapping[str, object]) -> dict[str, Any]:
    """Return rewards and all inside them by name, without their rules."""
    return {name: part.function for label, reward in rewards.items() for name, part in inside(label, reward)}


def transforms_of(reward: object) -> Sequence[Transform]:
    """Return the transforms of a reward's rule."""
    return getattr(reward.rule, "transform", ()) if isinstance(reward, Composed) else ()


def limits_of(rewards: Mapping[str, object]) -> dict[str, Limit]:
    """Return the constraints of rewards by name, of those that have one."""
    limits = {name: getattr(reward.rule, "limit", None) if isinstance(reward, Composed) else None
              for name, reward in rewards.items()}
    return {name: limit for name, limit in limits.items() if limit is not None}


def transformed(rewards: Mapping[str, object], scores: Tensor, progress: float = 0.0) -> Tensor:
    """Return scores [P, G, n*R] of R rewards, each after the transforms of its rule; the n granularities are
    concatenated.

    progress: share of the run, for transforms that move over it.
    Raises UserError, with the reward's name, if a transform rejects a score.
    """
    scores, named = scores.clone(), list(rewards.items())
    for column in range(scores.shape[-1]):
        label, reward = named[column % len(named)]
        try:
            for transform in transforms_of(reward):
                scores[..., column] = transforms.apply(transform, scores[..., column], progress)
        except ValueError as error:
            raise UserError(f"reward {label!r}: {error}") from None
    return scores
