"""Selection of the trained samples: `selection(scores, context=None) -> keep`, scores [P, G] to bool [P, G].

scores rank the samples of a group: the total reward or the combined advantage, without NaN. Advantages are always
computed on the full group first; a selection only leaves rows out of the loss.

In a tree a selection ranks the leaves, and an edge is trained if a leaf below it is kept. One that prunes inner edges
too has a method `nodes(scores) -> keep` for the nodes of a depth, [P, N] to bool [P, N]. Other samples are neither
replayed nor counted. A part with a method `before` leaves samples out of the comparison too (`downsampling`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from flowgrpo.advantages.group import zero_variance
from flowgrpo.types import Context


@dataclass(frozen=True)
class BestWorst:
    """Keep the n/2 best and the n/2 worst of each group (DanceGRPO's best-of-N, 2505.07818; 8 of 24 there).

    n is even and at most G. Ties go by position, so that exactly n are kept.
    """

    n: int

    def __post_init__(self) -> None:
        if self.n < 2 or self.n % 2:
            raise ValueError(f"BestWorst: n is {self.n}, expected an even number from 2 up")

    def __call__(self, scores: Tensor, context: Context | None = None) -> Tensor:
        _require_ranked(scores)
        _require_at_most("BestWorst", "n", self.n, scores)
        size = scores.shape[1]
        ranked = scores.argsort(dim=1, stable=True)
        ends = torch.cat([ranked[:, : self.n // 2], ranked[:, size - self.n // 2 :]], dim=1)
        return _at(scores, ends)


@dataclass(frozen=True)
class MaxVariance:
    """Keep the n samples of each group whose scores vary most (D3S, 2509.22115, its sample level).

    n moves linearly to `last` over the run, if given: with last = G the run ends on whole groups.
    """

    n: int
    last: int | None = None

    def __post_init__(self) -> None:
        if self.n < 2:
            raise ValueError(f"MaxVariance: n is {self.n}, expected 2 or more")
        if self.last is not None and self.last < self.n:
            raise ValueError(f"MaxVariance: last is {self.last}, expected at least n, {self.n}, or none to keep n")

    def __call__(self, scores: Tensor, context: Context | None = None) -> Tensor:
        _require_ranked(scores)
        _require_at_most("MaxVariance", "n", self.n, scores)
        _require_at_most("MaxVariance", "last", self.last or self.n, scores)
        return widest(scores, self._count(context))

    def _count(self, context: Context | None) -> int:
        if self.last is None or context is None or context.epochs < 2:
            return self.n
        return round(self.n + (self.last - self.n) * context.epoch / (context.epochs - 1))


@dataclass(frozen=True)
class Extremes:
    """Keep the best sample of every branch group, if its score is at least `high`, and the worst, if at most `low`.

    A branch group is `branch` consecutive samples, those that share a trunk (None: all of a prompt's). Scores should be
    deviations from a prompt's usual reward, as `Advantage(scale="running")` gives them (B2-DiffuRL, 2503.11240,
    released selection: thresholds 0.5 in its script, 0.7 by default).
    """

    low: float = -0.5
    high: float = 0.5
    branch: int | None = None

    def __post_init__(self) -> None:
        if not self.low <= self.high or (self.branch is not None and self.branch < 1):
            raise ValueError(f"Extremes: low is {self.low}, high {self.high} and branch {self.branch}, expected "
                             "low <= high and branch 1 or more")

    def __call__(self, scores: Tensor, context: Context | None = None) -> Tensor:
        _require_ranked(scores)
        branch = self.branch or scores.shape[1]
        if scores.shape[1] % branch:
            raise ValueError(f"Extremes: branch is {branch}, expected a divisor of the {scores.shape[1]} samples of a "
                             "group")
        groups = scores.unflatten(1, (-1, branch))
        best, worst = (_at(groups, end(dim=2, keepdim=True)) for end in (groups.argmax, groups.argmin))
        return ((best & (groups >= self.high)) | (worst & (groups <= self.low))).flatten(1)


@dataclass(frozen=True)
class WidthPruning:
    """Keep a share of the edges of a depth of a tree (BranchGRPO, 2509.06040, one half).

    of: "siblings", the best of the `branch` edges that leave one state; "depth", equally many of the best and the worst
    of all.
    depths: "last", only the edges behind the last split are pruned, and all others trained, as in the released code;
    "all", every depth is pruned separately.
    At least one of the siblings, or the two extremes, are kept; ties by position.
    """

    of: str = "siblings"
    share: float = 0.5
    depths: str = "last"
    branch: int = 2

    def __post_init__(self) -> None:
        for name, known in (("of", ("siblings", "depth")), ("depths", ("last", "all"))):
            if getattr(self, name) not in known:
                raise ValueError(f"WidthPruning: {name} is {getattr(self, name)!r}, expected {' or '.join(known)}")
        if not 0 < self.share <= 1 or self.branch < 2:
            raise ValueError(f"WidthPruning: share is {self.share} and branch {self.branch}, expected above 0 and at "
                             "most 1, and 2 or more")

    def __call__(self, scores: Tensor, context: Context | None = None) -> Tensor:
        _require_ranked(scores)
        if self.of == "siblings" and scores.shape[1] % self.branch:
            raise ValueError(f"WidthPruning: branch is {self.branch}, expected a divisor of the {scores.shape[1]} "
                             "samples of a group")
        return self._pruned(scores)

    def nodes(self, scores: Tensor) -> Tensor:
        """Return the kept inner nodes of one depth: scores [P, N] to bool [P, N]."""
        alone = self.of == "siblings" and scores.shape[1] % self.branch  # before the first split nothing has siblings
        return torch.ones_like(scores, dtype=torch.bool) if self.depths == "last" or alone else self._pruned(scores)

    def _pruned(self, scores: Tensor) -> Tensor:
        if self.of == "depth":
            return BestWorst(2 * max(1, int(scores.shape[1] * self.share / 2)))(scores)
        siblings = scores.unflatten(1, (-1, self.branch))
        best = siblings.argsort(dim=2, descending=True, stable=True)[..., :max(1, int(self.branch * self.share))]
        return _at(siblings, best).flatten(1)


@dataclass(frozen=True)
class Beyond:
    """Keep the samples whose score is at least as far from 0 as the given quantile of the whole batch: 0 keeps all, 0.5
    the half with the larger |advantage|, ties included."""

    quantile: float

    def __post_init__(self) -> None:
        if not 0 <= self.quantile < 1:
            raise ValueError(f"Beyond: quantile is {self.quantile}, expected 0 (keep all) or more, and below 1")

    def __call__(self, scores: Tensor, context: Context | None = None) -> Tensor:
        _require_ranked(scores)
        far = scores.abs()
        return far >= far.quantile(self.quantile)


@dataclass(frozen=True)
class ButFirst:
    """Keep all but the first sample of each group, the baseline of the others (`baselines.First`)."""

    def __call__(self, scores: Tensor, context: Context | None = None) -> Tensor:
        _require_at_most("ButFirst", "the least group", 2, scores)
        return torch.arange(scores.shape[1], device=scores.device).expand(scores.shape) > 0


@dataclass(frozen=True)
class DropZeroVariance:
    """Keep whole groups whose samples differ; the others have advantage 0 and would only cost evaluations
    (Flow-GRPO)."""

    def __call__(self, scores: Tensor, context: Context | None = None) -> Tensor:
        return (~zero_variance(scores))[:, None].expand(scores.shape)


def of_nodes(part: Callable[..., Tensor] | None, leaves: Tensor, scores: Tensor) -> Tensor:
    """Return the trained inner nodes of one depth: bool [P, N].

    A selection with `nodes` decides by their scores [P, N]; otherwise nodes with a kept leaf below are trained, leaves
    bool [P, G].
    """
    if hasattr(part, "nodes"):
        return part.nodes(scores)
    return leaves.unflatten(1, (scores.shape[1], -1)).any(dim=2)


def widest(scores: Tensor, n: int) -> Tensor:
    """Return the n samples of each group of scores [P, G] with the largest variance: bool [P, G].

    They are always some of the lowest, at least one, and some of the highest, at least one: n - 1 subsets are tried.
    """
    values, ranked = scores.sort(dim=1, stable=True)
    size = scores.shape[1]
    ends = torch.stack([torch.cat([torch.arange(low), torch.arange(size - n + low, size)]) for low in range(1, n)])
    best = values[:, ends].var(dim=2, correction=0).argmax(dim=1)
    return _at(scores, ranked.gather(1, ends.to(ranked.device)[best]))


def _at(scores: Tensor, positions: Tensor) -> Tensor:
    """Return a mask, true at the positions along the last dimension: bool, shaped as scores."""
    return torch.zeros_like(scores, dtype=torch.bool).scatter(-1, positions, True)


def _require_ranked(scores: Tensor) -> None:
    assert not scores.isnan().any(), "scores to rank by must not contain NaN"


def _require_at_most(part: str, name: str, n: int, scores: Tensor) -> None:
    if n > scores.shape[1]:
        raise ValueError(f"{part}: {name} is {n}, expected at most the {scores.shape[1]} samples of a group")
