"""Pairwise judges: the better of two outputs, as win rates within a group (Pref-GRPO, 2508.20751).

A judge is a function or object called as `judge(first, second, prompts, metadata) -> B values` (its signature may omit
`metadata`): 1 where the first is better, 0 where the second is, 0.5 at a tie or anything between, None (or a `Failed`,
which is counted) for no answer. `@flowgrpo.judge("name")`, or an attribute `pairwise` that is True or a `Pairing`,
marks one. As a reward it gives every sample the share of its comparisons that it won.

Win rates need whole groups. Any reward with an attribute `group = True` gets these: it is called as `reward(outputs,
prompts, metadata, group)` with the outputs of whole groups, `group` consecutive ones each.
"""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from flowgrpo.errors import UserError
from flowgrpo.rewards.about import Reward
from flowgrpo.rewards.failures import Failed

if TYPE_CHECKING:
    from torch import Tensor

T = TypeVar("T")

AT_ONCE = 64  # pairs in one call of a judge, to avoid copying pictures group by group


@dataclass(frozen=True)
class Pairing:
    """Comparisons within a group.

    both_orders: judge every pair twice, with each of the two first once, and average. This cancels a judge's position
    bias, at twice the calls.
    comparisons: pairs per group. None, or a number of at least all G (G-1) / 2: all; fewer are drawn so that every
    sample is compared equally often.
    seed: of that draw.
    """

    both_orders: bool = False
    comparisons: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if self.comparisons is not None and self.comparisons < 1:
            raise ValueError(f"comparisons is {self.comparisons}, expected 1 or more, or None for all pairs")

    def pairs(self, group: int, prompt: str = "") -> list[tuple[int, int]]:
        """Return (first, second) of every comparison in a group, a regular tournament that is fixed per prompt.

        The samples are shuffled into a ring. Each meets its nearest neighbours, as first on one side and as second on
        the other, so that position bias harms all equally. Only for an odd number of opponents, one across the ring is
        met in one position.
        Raises ValueError for `comparisons` that are not regular.
        """
        degree = 2 * self._count(group) // group
        ring = random.Random(f"{self.seed}/{prompt}").sample(range(group), group)
        pairs = [(ring[i], ring[(i + away) % group]) for away in range(1, degree // 2 + 1) for i in range(group)]
        return pairs + [(ring[i], ring[i + group // 2]) for i in range(group // 2 if degree % 2 else 0)]

    def _count(self, group: int) -> int:
        every, unit = group * (group - 1) // 2, group if group % 2 else group // 2
        count = every if self.comparisons is None else min(self.comparisons, every)
        if rest := count % unit:
            nearest = [n for n in (count - rest, count - rest + unit) if n]
            raise ValueError(f"comparisons is {count}, but every sample of a group of {group} is compared equally "
                             f"often: expected {' or '.join(map(str, nearest))}")
        return count


def judge(name: str, both_orders: bool = False, comparisons: int | None = None, seed: int = 0) -> Callable[[T], T]:
    """Decorator: register a function, object or class as the pairwise judge `name`, a reward; settings: see `Pairing`.
    """
    from flowgrpo.rewards.find import reward

    register, pairing = reward(name), Pairing(both_orders, comparisons, seed)

    def mark(thing: T) -> T:
        thing.pairwise = pairing  # type: ignore[attr-defined]  # functions and classes take attributes
        return register(thing)

    return mark


def pairing(reward: object) -> Pairing | None:
    """Return a judge's pairing; None for any other reward."""
    marked = getattr(reward, "pairwise", None)
    return Pairing() if marked is True else marked or None


def sees_groups(reward: object) -> bool:
    """True if a reward compares the samples of a group, two at a time or all of them."""
    return pairing(reward) is not None or bool(getattr(reward, "group", False))


def whole(name: str, function: Reward, group: int, lost: list[Failed]) -> Reward:
    """Return the reward as (outputs, prompts, metadata) -> B values, bound to the group size if it needs groups.

    lost: collects the comparisons without an answer.
    Raises UserError if it needs groups and there are none."""
    if not sees_groups(function):
        return function
    if group < 2:
        raise UserError(f"reward {name!r} compares the samples of a group, but here every picture is scored alone: "
                        "choose a reward that scores one picture at a time")
    how = pairing(function)
    grouped = function if how is None else WinRates(name, function, how, lost)
    return lambda outputs, prompts, metadata, **base: grouped(outputs, prompts, metadata, group, **base)


def require(rewards: Mapping[str, object], *groups: int) -> None:
    """Raise UserError if a judge's comparisons do not fit groups of one of these sizes."""
    for name, function in rewards.items():
        for group in groups:
            if how := pairing(function):
                _fitting(name, how, group)


def measured(trained: Mapping[str, T], further: Mapping[str, T]) -> dict[str, T]:
    """Return the rewards measured on held-out prompts, where every picture is scored alone: the further rewards, and
    the trained ones that need no groups. (Win rates of a model against itself average 1/2 before and after.)

    Raises UserError for a further reward that needs groups, or if nothing is left to measure.
    """
    alone = {name: function for name, function in trained.items() if not sees_groups(function)}
    wrong = [name for name, function in further.items() if sees_groups(function)]
    if wrong or not (alone or further):
        name = next(iter(wrong or trained))
        raise UserError(f"reward {name!r} compares the samples of a group, and a held-out evaluation has no groups: "
                        "expected a reward in eval.rewards that scores one picture at a time")
    return {**alone, **further}


@dataclass(frozen=True)
class WinRates:
    """Judge as a reward of whole groups: each sample's share of won comparisons, None for one never compared.

    Over all pairs of a group the rates sum to G/2.
    """

    name: str
    judge: Reward
    pairing: Pairing = Pairing()
    lost: list[Failed] = field(default_factory=list)
    group = True

    def __call__(self, outputs: Tensor | Sequence[str], prompts: Sequence[str], metadata: Sequence[dict[str, Any]],
                 group: int) -> list[float | None]:
        import torch

        from flowgrpo.advantages.shaping import win_rates

        assert len(prompts) % group == 0, (len(prompts), group)
        groups = range(0, len(prompts), group)
        wins = torch.stack([self._wins(outputs, prompts, metadata, at, group) for at in groups])
        return [None if rate != rate else rate for rate in win_rates(wins).flatten().tolist()]

    def _wins(self, outputs: Tensor | Sequence[str], prompts: Sequence[str], metadata: Sequence[dict[str, Any]],
              at: int, group: int) -> Tensor:
        """Return the wins among the samples `at` to `at + group`: [G, G], NaN where not compared."""
        import torch

        pairs = _fitting(self.name, self.pairing, group, prompts[at])
        orders = [pairs, [(second, first) for first, second in pairs]][:1 + self.pairing.both_orders]
        wins = torch.full((len(orders), group, group), torch.nan, dtype=torch.float64)
        for place, order in enumerate(orders):
            for start in range(0, len(order), AT_ONCE):
                some = order[start:start + AT_ONCE]
                answers = self._ask(outputs, prompts[at], metadata[at], [[at + i for i in side] for side in zip(*some)])
                for (first, second), answer in zip(some, answers):
                    wins[place, first, second], wins[place, second, first] = answer, 1 - answer
        return wins.nanmean(0)

    def _ask(self, outputs: Tensor | Sequence[str], prompt: str, metadata: dict[str, Any],
             sides: list[list[int]]) -> list[float]:
        """Return the judge's answers on the rows sides[0] against sides[1], NaN for none."""
        count = len(sides[0])
        pictures = [outputs[rows] if hasattr(outputs, "shape")  # type: ignore[call-overload]  # a tensor
                    else [outputs[row] for row in rows] for rows in sides]
        arguments = (*pictures, [prompt] * count, [metadata] * count)
        return _answers(self.name, self._told(self.judge(*arguments[:_arity(self.name, self.judge)])), count, prompt)

    def _told(self, values: Any) -> Any:
        """Return the values with None for each `Failed`, which is recorded."""
        if not isinstance(values, (list, tuple)):
            return values
        self.lost.extend(value for value in values if isinstance(value, Failed))
        return [None if isinstance(value, Failed) else value for value in values]


def _fitting(name: str, how: Pairing, group: int, prompt: str = "") -> list[tuple[int, int]]:
    try:
        return how.pairs(group, prompt)
    except ValueError as error:
        raise UserError(f"judge {name!r}: {error}") from None


def _arity(name: str, judge: Reward) -> int:
    """Return 4 if the judge takes (first, second, prompts, metadata), 3 if it takes (first, second, prompts)."""
    for count in (4, 3):
        try:
            inspect.signature(judge).bind(*range(count))
            return count
        except TypeError:
            continue
    raise UserError(f"judge {name!r} takes {inspect.signature(judge)}: expected (first, second, prompts, metadata) or "
                    "(first, second, prompts)")


def _answers(name: str, values: Any, count: int, prompt: str) -> list[float]:
    """Return `count` numbers from 0 to 1, NaN for None.
    Raises Failed if the judge returned anything else."""
    values = values.tolist() if hasattr(values, "tolist") else values
    if not isinstance(values, (list, tuple)) or len(values) != count:
        got = f"{len(values)} values" if isinstance(values, (list, tuple)) else repr(values)[:60]
        raise Failed(f"judge {name!r} returned {got}, expected {count}, one per pair (prompt: {prompt!r})")
    try:
        answers = [float("nan") if value is None else float(value) for value in values]
        wrong = [value for value, answer in zip(values, answers) if value is not None and not 0 <= answer <= 1]
    except (TypeError, ValueError):
        wrong = [next(value for value in values if not isinstance(value, (int, float, type(None))))]
    if wrong:
        raise Failed(f"judge {name!r} returned {repr(wrong[0])[:60]}, expected 1 (the first is better), 0 (the second "
                     f"is), 0.5 (a tie), a number between, or None (no answer) (prompt: {prompt!r})")
    return answers
