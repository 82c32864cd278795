"""Composition of a recipe's rewards: each with its rule, made once before a run; and transforms of one reward's scores
before comparison: [P, G] to [P, G], P groups of G samples.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from flowgrpo.config.reward_rules import (
    Band,
    Budget,
    Change,
    Clip,
    Limit,
    Retry,
    Stretch,
    Threshold,
    Transform,
    WatchRule,
    value_at,
)
from flowgrpo.errors import UserError, nearest
from flowgrpo.nouns import quantity
from flowgrpo.rewards.about import SERVER, RewardFunction
from flowgrpo.rewards.cached_scores import Scores
from flowgrpo.rewards.failures import Failed, relabel_errors, score_with_policy, with_label, within
from flowgrpo.rewards.find import find
from flowgrpo.rewards.pairwise import WinRates, pairing, sees_groups
from flowgrpo.rewards.placement import Placement, leave, local_models
from flowgrpo.rewards.reward import (
    BASE,
    EPOCH,
    FPS,
    MEMORY,
    POLICY,
    Batch,
    Checked,
    Function,
    Reward,
    as_reward,
    inside,
    named_parts,
)

if TYPE_CHECKING:
    from torch import Tensor


def apply_transform(transform: str | Clip | Threshold | Stretch | Band | Budget, scores: Tensor,
                    progress: float = 0.0) -> Tensor:
    """Apply one transform of a recipe. progress: share of the run, 0 in the first epoch and 1 in the last."""
    def bounds(pair: tuple[float | Change, float | Change]) -> tuple[float, float]:
        return value_at(pair[0], progress), value_at(pair[1], progress)

    if isinstance(transform, Clip):
        return scores.clamp(*bounds(transform.clip))
    if isinstance(transform, Threshold):
        least = value_at(transform.threshold, progress)
        return (scores >= least).to(scores).masked_fill(scores.isnan(), float("nan"))
    if isinstance(transform, Stretch):  # 0 up to the first bound, 1 from the second on, linear between
        low, high = bounds(transform.stretch)
        return ((scores - low) / (high - low)).clamp(0, 1)
    if isinstance(transform, Band):
        return band(scores, *bounds(transform.band), transform.margin)
    if isinstance(transform, Budget):
        most = value_at(transform.budget, progress)
        return band(scores, -float("inf"), most, most)
    return {"log": log, "rank": rank}[transform](scores)


def log(scores: Tensor) -> Tensor:
    """Raises ValueError for a score that is not above 0."""
    if (scores <= 0).any():
        raise ValueError(f"log of the score {scores[scores <= 0].min().item():g}, expected above 0: put a clip such as "
                         "{clip: [0.001, 1]} before it")
    return scores.log()


def band(scores: Tensor, low: float, high: float, margin: float) -> Tensor:
    """1 within [low, high], falling linearly to 0 at a distance of `margin`; a margin of 0 is a step."""
    beyond = (low - scores).maximum(scores - high).clamp(min=0)
    return (1 - beyond / margin).clamp(min=0) if margin else (beyond == 0).to(scores).masked_fill(
        scores.isnan(), float("nan"))


def rank(scores: Tensor) -> Tensor:
    """Each sample's rank in its group: 0 the lowest, 1 the highest, evenly spaced, ties at their mean rank.

    A sample that is alone with a score gets 1/2, and so does one in a group of equal scores.
    """
    value, other = scores[..., :, None], scores[..., None, :]
    below, equal = (other < value).sum(-1), (other == value).sum(-1) - 1
    others = (~scores.isnan()).sum(-1, keepdim=True) - 1
    places = (below + equal / 2).to(scores) / others.clamp(min=1)
    return places.masked_fill(others == 0, 0.5).masked_fill(scores.isnan(), float("nan"))


@dataclass(frozen=True, eq=False)
class Composed(Reward):
    """Reward with its rule, in the form that `score` calls.

    Its rule: `when`, then cached scores, weights on their device, attempts, the time-out, and the label in errors, in
    this order.
    kept: its cached scores, if cached. placement: where its weights are; None: loaded, where they stay. name: its
    label. made: the reward. checked: the same with the check of its answer. plain: the rule adds nothing.
    """

    function: RewardFunction
    rule: WatchRule = WatchRule()
    kept: Scores | None = None
    placement: Placement | None = None
    name: str = ""
    made: Reward = field(init=False, repr=False)
    checked: Checked = field(init=False, repr=False)
    plain: bool = field(init=False, repr=False)

    def __post_init__(self) -> None:
        made, rule = as_reward(self.function, self.name), self.rule
        checked = Checked(self.name, WinRates(self.name, made, pairing(made)) if made.unit == "pair" else made)
        placed = self.placement and (self.placement.away or local_models(self.function))  # weights to load or to move
        plain = not (rule.when or rule.timeout or rule.on_error != "raise" or rule.use not in (None, self.name)
                     or self.kept or placed)
        vars(self).update(made.facts(), made=made, checked=checked, plain=plain)

    @property
    def origin(self) -> Any:
        return self.made.origin

    def __call__(self, batch: Batch) -> list[float | Failed]:
        """Scores for the prompts that the rule applies to; NaN for all others."""
        rows = [i for i, entry in enumerate(batch.metadata) if self.rule.applies(entry)]
        found = dict(zip(rows, self._unless_cached(batch.rows(rows)))) if rows else {}
        return [found.get(i, math.nan) for i in range(len(batch))]

    def _unless_cached(self, batch: Batch) -> list[float | Failed]:
        if self.kept is None:
            return self._ask(batch)
        bases = batch.base if BASE in self.reads and batch.base is not None else [None] * len(batch)
        fps = batch.fps if FPS in self.reads else None
        keys = [self.kept.key(*sample, fps) for sample in zip(batch.samples, batch.prompts, batch.metadata, bases)]
        known: dict[str, Any] = {**self.kept.read(keys)}
        if missing := [i for i, key in enumerate(keys) if key not in known]:
            fresh = list(zip((keys[i] for i in missing), self._ask(batch.rows(missing))))
            self.kept.write({key: value for key, value in fresh if not isinstance(value, Failed)})
            known |= fresh
        return [known[key] for key in keys]

    def _ask(self, batch: Batch) -> list[float | Failed]:
        self.bring()
        return score_with_policy(lambda rows: self._answer(batch.rows(rows)), range(len(batch)), self.rule.on_error,
                                 batch.group if self.checked.unit == "group" else 1)

    def _answer(self, batch: Batch) -> list[float | Failed]:
        """Answer within the rule's time. Raises TimedOut."""
        message = (f"reward {self.name!r} hangs on {quantity(len(batch), 'sample')} (first prompt of the batch: "
                   f"{batch.prompts[0]!r})")
        return within(self.rule.timeout, message, lambda: self._named(batch))

    def _named(self, batch: Batch) -> list[float | Failed]:
        """Answer whose errors and failures have the label and the name of a reward that has both."""
        use = self.rule.use
        if use in (None, self.name):
            return self.checked(batch)
        with relabel_errors(self.name, use):
            values = self.checked(batch)
        for value in (*values, *batch.lost):
            if isinstance(value, Failed):
                value.args = (with_label(str(value), self.name, use),)
        return values

    def bring(self) -> None:
        """Load the weights, or bring them back to their device, where they are not there."""
        if self.placement is not None:
            self.placement.bring()


def compose(rules: Mapping[str, WatchRule], cache: str | None = None,
            given: Mapping[str, RewardFunction] | None = None, away: bool = False) -> dict[str, Composed]:
    """Find and make the rewards of a recipe.

    rules: by label, which is the reward's name unless the rule has `use`. cache: the folder of cached scores. given:
    functions by label, which replace those the rules name. away: their weights leave the device between scorings.
    Raises UserError as `find` does, and for scores to be cached without a folder.
    """
    made = {label: _compose(label, rule, cache, (given or {}).get(label)) for label, rule in rules.items()}
    composed = {label: replace(reward, placement=Placement(reward.function, away)) for label, reward in made.items()}
    leave(composed.values())
    return composed


def _compose(label: str, rule: WatchRule, cache: str | None, given: RewardFunction | None) -> Composed:
    name = rule.use or label
    if given is not None and rule.args:
        raise UserError(f"reward {label!r} takes no args: it is given as an object")
    with relabel_errors(label, rule.use):
        function = find(name, rule.args) if given is None else given
    made = as_reward(function, label)
    if isinstance(made, Function):
        made.require_signature()
    if not rule.cache:
        return Composed(function, rule, name=label)
    parts = inside(function)
    if any(map(sees_groups, parts)):
        raise UserError(f"reward {label!r} compares the samples of a group, and its scores hold only for that group: "
                        "set cache: false")
    if any(POLICY in part.reads for part in parts):
        raise UserError(f"reward {label!r} scores with the model that is trained, which changes: set cache: false")
    if any({MEMORY, EPOCH} & part.reads for part in parts):
        raise UserError(f"reward {label!r} scores by the epoch or by earlier ones: set cache: false")
    if cache is None:
        raise UserError(f"reward {label!r} keeps its scores (cache: true), but no folder is named: set the key cache "
                        "at the top of the recipe, such as cache: .cache")
    return Composed(function, rule, Scores(cache, name, function, rule.args), name=label)


def require_routes(rewards: Mapping[str, Composed], metadata: Iterable[dict[str, Any]]) -> None:
    """Raise UserError if the `when` of a reward, or of one that it is made of, matches no prompt's metadata (most
    likely a typo), or if no prompt has the key that it compares with (its attributes `keyed` and `key`)."""
    every = list(metadata)
    for label, reward in rewards.items():
        _require_route(label, reward, every)


def _require_route(label: str, reward: Reward, every: Sequence[dict[str, Any]]) -> None:
    rule = reward.rule if isinstance(reward, Composed) else WatchRule()
    applicable = [entry for entry in every if rule.applies(entry)]
    if rule.when and not applicable:
        keys = sorted({key for entry in every for key in entry})
        known = next((key for key in rule.when if key in keys), None)  # of which some values are listed
        values = sorted({repr(entry[known]) for entry in every if known in entry})[:10]
        raise UserError(f"reward {label!r} applies to no prompt: its `when` is {rule.when}, and the metadata of "
                        f"{quantity(len(every), 'prompt')} has {', '.join(keys) or 'no keys'}"
                        + (f" ({known}: {', '.join(values)})" if known is not None else ""))
    for read in reward.reads if applicable else ():
        key = read.partition(".")[2]
        if key and all(entry.get(key) is None for entry in applicable):
            there = sorted({name for entry in applicable for name in entry})
            raise UserError(f"reward {label!r} compares with metadata.{key}, which none of the {len(applicable)} "
                            f"prompts has: their metadata has {', '.join(there) or 'no keys'}; write it into the "
                            "prompt file, or name another key, args: {key: NAME}")
    for place, part in enumerate(reward.parts if applicable else ()):
        _require_route(f"{label}[{place}]", part, applicable)


def require_values(where: str, when: Mapping[str, Any], metadata: Iterable[Mapping[str, Any]]) -> None:
    """Raise UserError for a value in a list of `when` that no prompt's metadata has. where: its place in the recipe."""
    every = list(metadata)
    for key, values in when.items():
        known = [entry[key] for entry in every if key in entry]
        for value in values if isinstance(values, list) else ():
            if known and value not in known:
                raise UserError(f"{where}: no prompt has {key} {value!r}" +
                                nearest(str(value), sorted({str(each) for each in known})))


def for_trial(reward: Composed) -> Composed:
    """Reward without a cache and with at most one immediate retry."""
    policy = reward.rule.on_error
    if isinstance(policy, Retry):
        policy = policy.model_copy(update={"retry": 1, "wait": 0.0})
    return replace(reward, rule=reward.rule.model_copy(update={"on_error": policy}), kept=None)


def slow(reward: object) -> bool:
    """True if a server answers for a reward, or for one that it is made of: a call may take long, or cost money."""
    needs = [part.about.needs or "" for part in inside(reward)]
    return any(SERVER in map(str.strip, need.split(",")) for need in needs)


def reads_sampler(reward: object) -> bool:
    """True if a reward of images or videos, or one in it, scores with the trained model, which cannot draw then."""
    return any(POLICY in part.reads and part.about.modality in ("image", "video") for part in inside(reward))


def require_memory(rewards: Mapping[str, object], processes: int) -> None:
    """Raise UserError for a reward with a memory and several processes, each of which sees a share of the prompts."""
    for label, reward in rewards.items():
        for name, part in named_parts(label, reward):
            if processes > 1 and MEMORY in part.reads:
                raise UserError(f"reward {name!r} remembers all prompts, and got {processes} processes: run it in one")


def remembers(rewards: Mapping[str, object]) -> bool:
    return any(MEMORY in part.reads for reward in rewards.values() for part in inside(reward))


def transforms_of(reward: object) -> Sequence[Transform]:
    return getattr(reward.rule, "transform", ()) if isinstance(reward, Composed) else ()


def limits_of(rewards: Mapping[str, object]) -> dict[str, Limit]:
    return {name: limit for name, reward in rewards.items() if isinstance(reward, Composed)
            and (limit := getattr(reward.rule, "limit", None)) is not None}


def transform_scores(rewards: Mapping[str, object], scores: Tensor, progress: float = 0.0) -> Tensor:
    """Scores [P, G, n*R] of R rewards, each after the transforms of its rule; the n granularities are concatenated.

    progress: share of the run, for transforms that move over it.
    Raises UserError, with the reward's name, if a transform rejects a score.
    """
    scores, named = scores.clone(), list(rewards.items())
    for column in range(scores.shape[-1]):
        label, reward = named[column % len(named)]
        try:
            for transform in transforms_of(reward):
                scores[..., column] = apply_transform(transform, scores[..., column], progress)
        except ValueError as error:
            raise UserError(f"reward {label!r}: {error}") from None
    return scores
