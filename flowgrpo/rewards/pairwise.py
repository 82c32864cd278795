"""Pairwise judges: the better of two outputs, as win rates within a group (Pref-GRPO, 2508.20751).

A judge is a function or object called as `judge(first, second, prompts, metadata) -> B values` (its signature may omit
`metadata`): 1 where the first is better, 0 where the second is, 0.5 at a tie or anything between, None (or a `Failed`,
which is counted) for no answer. `@flowgrpo.judge("name")`, or an attribute `pairwise` that is True or a `Pairing`,
marks one. As a reward it gives every sample the share of its comparisons that it won.

Win rates need whole groups. Any reward with an attribute `group = True` gets these: it is called as `reward(outputs,
prompts, metadata, group)` with the outputs of whole groups, `group` consecutive ones each.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from flowgrpo.errors import UserError
from flowgrpo.rewards.about import About, Pairing, built_in
from flowgrpo.rewards.failures import Failed
from flowgrpo.rewards.find import reward
from flowgrpo.rewards.reward import Batch, Function, Reward, Wrapped, as_reward

if TYPE_CHECKING:
    from torch import Tensor

T = TypeVar("T")

AT_ONCE = 64  # pairs in one call of a judge, to avoid copying images group by group


def judge(name: str, both_orders: bool = False, comparisons: int | None = None, seed: int = 0) -> Callable[[T], T]:
    """Decorator: register a function, object or class as the pairwise judge `name`, a reward. Settings: `Pairing`."""
    register, pairing = reward(name), Pairing(both_orders, comparisons, seed)

    def mark(thing: T) -> T:
        thing.pairwise = pairing  # type: ignore[attr-defined]  # functions and classes take attributes
        return register(thing)

    return mark


def pairing(reward: object) -> Pairing | None:
    """A judge's pairing; None for any other reward."""
    judge = as_reward(as_reward(reward).origin)
    how = judge.pairing if isinstance(judge, Function) else None
    return Pairing() if how is True else how or None


def sees_groups(reward: object) -> bool:
    return as_reward(reward).unit != "sample"


def require(rewards: Mapping[str, object], *groups: int) -> None:
    """Raise UserError if a judge's comparisons do not fit groups of one of these sizes."""
    for name, function in rewards.items():
        for group in groups:
            if how := pairing(function):
                _fitting(name, how, group)


def held_out_rewards(trained: Mapping[str, T], further: Mapping[str, T], group: int = 1) -> dict[str, T]:
    """Rewards measured on held-out prompts: the further rewards, and the trained ones that can be.

    group: samples of a prompt (`eval.samples`). With several a reward of groups scores them together; with one, and by
    judges of pairs, nothing is measured: win rates of a model against itself average 1/2 before and after.
    Raises UserError for a further reward that cannot be measured, or if nothing is left to measure.
    """
    def fits(reward: object) -> bool:
        return not sees_groups(reward) or group > 1 and not pairing(reward)

    alone = {name: function for name, function in trained.items() if fits(function)}
    wrong = [name for name, function in further.items() if not fits(function)]
    if wrong or not (alone or further):
        name = next(iter(wrong or trained))
        pairs = pairing({**trained, **further}[name])
        raise UserError(f"reward {name!r} compares the samples of a group, and a held-out evaluation has no groups: "
                        "expected a reward in eval.rewards that scores one image at a time"
                        + ("" if pairs else ", eval.samples of 2 or more, which are then a group, or eval.prompts: 0 "
                                            "for no evaluation"))
    return {**alone, **further}


class WinRates(Wrapped):
    """Judge as a reward of whole groups: each sample's share of won comparisons, None for one never compared.

    Over all pairs of a group the rates sum to G/2. A comparison without an answer is lost.
    """

    def __init__(self, name: str, judge: Reward, how: Pairing | None = None) -> None:
        super().__init__(name, judge)
        self.how, self.unit, self.differentiable = how or Pairing(), "group", False

    def __call__(self, batch: Batch) -> list[float | None]:
        import torch

        from flowgrpo.advantages.shaping import win_rates

        assert len(batch) % batch.group == 0, (len(batch), batch.group)
        wins = torch.stack([self._wins(batch, at) for at in range(0, len(batch), batch.group)])
        return [None if rate != rate else rate for rate in win_rates(wins).flatten().tolist()]

    def _wins(self, batch: Batch, at: int) -> Tensor:
        """Wins among the samples `at` to `at + group`: [G, G], NaN where not compared."""
        import torch

        pairs = _fitting(self.name, self.how, batch.group, batch.prompts[at])
        orders = [pairs, [(second, first) for first, second in pairs]][:1 + self.how.both_orders]
        wins = torch.full((len(orders), batch.group, batch.group), torch.nan, dtype=torch.float64)
        for place, order in enumerate(orders):
            for start in range(0, len(order), AT_ONCE):
                some = order[start:start + AT_ONCE]
                for (first, second), answer in zip(some, self._ask(batch, at, some)):
                    wins[place, first, second], wins[place, second, first] = answer, 1 - answer
        return wins.nanmean(0)

    def _ask(self, batch: Batch, at: int, pairs: list[tuple[int, int]]) -> list[float]:
        """The judge's answers on pairs of the group that begins at row `at`, NaN for none."""
        sides = [[at + pair[side] for pair in pairs] for side in (0, 1)]
        shown = [batch.samples[rows] if hasattr(batch.samples, "shape") else [batch.samples[row] for row in rows]
                 for rows in sides]
        prompt, count = batch.prompts[at], len(pairs)
        of_pairs = replace(batch, samples=shown, prompts=[prompt] * count, metadata=[batch.metadata[at]] * count)
        values = self.reward(of_pairs)
        if isinstance(values, (list, tuple)):
            batch.lost.extend(value for value in values if isinstance(value, Failed))
            values = [None if isinstance(value, Failed) else value for value in values]
        return _answers(self.name, values, count, prompt)


def _fitting(name: str, how: Pairing, group: int, prompt: str = "") -> list[tuple[int, int]]:
    try:
        return how.pairs(group, prompt)
    except ValueError as error:
        raise UserError(f"judge {name!r}: {error}") from None


def _answers(name: str, values: Any, count: int, prompt: str) -> list[float]:
    """`count` numbers from 0 to 1, NaN for None. Raises Failed if the judge returned anything else."""
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


@built_in("preferred", "dpo pairs votes", About(modality="image/text", range=(0, 1), needs="", licence="Apache-2.0"))
def preferred(outputs: Tensor | Sequence[str], prompts: Sequence[str], metadata: Sequence[dict[str, Any]],
              group: int) -> list[float]:
    """1 for the side of a recorded pair that its file prefers, 0 for the other: only with `preferences`.

    The pair is a group, the chosen side first; the metadata holds the verdict.
    Raises UserError for sampled outputs.
    """
    if group != 2 or any("preferred" not in entry for entry in metadata):
        raise UserError("reward 'preferred' is what a file says of recorded pairs, and these samples are none: set "
                        "preferences to the file, or choose another reward")
    return [entry["preferred"] if row % 2 == 0 else 1 - entry["preferred"] for row, entry in enumerate(metadata)]


preferred.group = True  # type: ignore[attr-defined]  # functions take attributes
