"""Rules of a recipe as rewards around a reward, with the same facts; `ready` alone knows their order.

Before all of them a batch of several sizes is split, by `by_size`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from flowgrpo.config.reward_rules import WatchRule
from flowgrpo.errors import UserError
from flowgrpo.rewards.failures import Failed, settled, within
from flowgrpo.rewards.pairwise import WinRates, pairing
from flowgrpo.rewards.reward import BASE, Batch, Checked, Reward, Wrapped

if TYPE_CHECKING:
    from flowgrpo.rewards.cache import Scores
    from flowgrpo.rewards.placement import Placement


def ready(name: str, reward: Reward, rule: WatchRule = WatchRule(), kept: Scores | None = None,
          placement: Placement | None = None) -> Reward:
    """Return a reward of that label under its rule: `when`, then cached scores, weights on their device, attempts, the
    time-out, and the check of its answer."""
    made: Reward = Checked(name, WinRates(name, reward, pairing(reward)) if reward.unit == "pair" else reward)
    if rule.timeout is not None:
        made = Timed(name, made, rule.timeout)
    if rule.on_error != "raise":
        made = Persistent(name, made, rule.on_error)
    if placement is not None:
        made = Placed(name, made, placement)
    if kept is not None:
        made = Cached(name, made, kept)
    return Where(name, made, rule) if rule.when else made


class Timed(Wrapped):
    """Reward that has to answer within some seconds."""

    def __init__(self, name: str, reward: Reward, seconds: float) -> None:
        super().__init__(name, reward)
        self.seconds = seconds

    def __call__(self, batch: Batch) -> Any:
        """Raises TimedOut."""
        return within(self.seconds, f"reward {self.name!r} hangs on {len(batch)} samples (first prompt of the batch: "
                                    f"{batch.prompts[0]!r})", lambda: self.reward(batch))


class Persistent(Wrapped):
    """Reward that is asked again after a failure, or whose failing samples are skipped: see `settled`."""

    def __init__(self, name: str, reward: Reward, policy: Any) -> None:
        super().__init__(name, reward)
        self.policy = policy

    def __call__(self, batch: Batch) -> list[float | Failed]:
        return settled(lambda rows: self.reward(batch.rows(rows)), range(len(batch)), self.policy,
                       batch.group if self.unit == "group" else 1)


class Placed(Wrapped):
    """Reward whose weights come to their device before it scores."""

    def __init__(self, name: str, reward: Reward, placement: Placement) -> None:
        super().__init__(name, reward)
        self.placement = placement

    def __call__(self, batch: Batch) -> Any:
        self.placement.come()
        return self.reward(batch)


class Cached(Wrapped):
    """Reward that is asked only for samples without a cached score."""

    def __init__(self, name: str, reward: Reward, kept: Scores) -> None:
        super().__init__(name, reward)
        self.kept = kept

    def __call__(self, batch: Batch) -> list[float | Failed]:
        bases = batch.base if BASE in self.reads and batch.base is not None else [None] * len(batch)
        keys = [self.kept.key(batch.samples[i], batch.prompts[i], batch.metadata[i], bases[i])
                for i in range(len(batch))]
        known: dict[str, Any] = {**self.kept.read(keys)}
        if missing := [i for i, key in enumerate(keys) if key not in known]:
            fresh = list(zip((keys[i] for i in missing), self.reward(batch.rows(missing))))
            self.kept.write({key: value for key, value in fresh if not isinstance(value, Failed)})
            known |= fresh
        return [known[key] for key in keys]


class Where(Wrapped):
    """Reward of the prompts that its rule applies to; NaN for all others."""

    def __init__(self, name: str, reward: Reward, rule: WatchRule) -> None:
        super().__init__(name, reward)
        self.rule = rule

    def __call__(self, batch: Batch) -> list[float | Failed]:
        rows = [i for i, entry in enumerate(batch.metadata) if self.rule.applies(entry)]
        found = dict(zip(rows, self.reward(batch.rows(rows)))) if rows else {}
        return [found.get(i, math.nan) for i in range(len(batch))]


def by_size(batch: Batch, columns: Callable[[Batch], list[list[float | Failed]]]) -> list[list[float | Failed]]:
    """Return `columns` of pictures of several sizes: those of one size are scored together, in the order of the batch.

    Raises UserError for a group whose samples differ in size.
    """
    alike: dict[tuple[int, ...], list[int]] = {}
    for row, output in enumerate(batch.samples):
        alike.setdefault(tuple(output.shape), []).append(row)
    if any(output.shape != batch.samples[row - row % batch.group].shape for row, output in enumerate(batch.samples)):
        raise UserError(f"the samples of a group of {batch.group} differ in size ({', '.join(map(str, alike))}): "
                        "expected one size in each group")
    scored = {row: scores for rows in alike.values() for row, scores in zip(rows, zip(*columns(batch.of_size(rows))))}
    return [list(column) for column in zip(*(scored.get(row, ()) for row in range(len(batch))))]
