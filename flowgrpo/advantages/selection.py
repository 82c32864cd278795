"""Selection of the trained samples: `selection(scores, context=None) -> keep`, scores [P, G] to bool [P, G].

scores rank the samples of a group: the total reward or the combined advantage, without NaN. Advantages are always
computed on the full group first; a selection only leaves rows out of the loss.

In a tree a selection ranks the leaves, and an edge is trained if a leaf below it is kept. One that prunes inner edges
too has a method `nodes(scores, siblings) -> keep` for the nodes of a depth, [P, N] to bool [P, N]. Other samples are
neither replayed nor counted. Which samples are siblings follows from the plan alone, by `context.groups.splits`. A part
with a method `before` leaves samples out of the comparison too (`downsampling`).
"""

import math
from collections.abc import Callable, Sequence
from typing import Annotated, Literal

import torch
from torch import Tensor

from flowgrpo.advantages.group import zero_variance
from flowgrpo.parts import Above, AtLeast, part
from flowgrpo.types import Context


@part("selection")
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


@part("selection")
class MaxVariance:
    """Keep the n samples of each group whose scores vary most (D3S, 2509.22115, its sample level).

    n moves linearly to `last` over the run, if given: with last = G the run ends on whole groups.
    """

    n: Annotated[int, AtLeast(2)]
    last: int | None = None

    def __post_init__(self) -> None:
        if self.last is not None and self.last < self.n:
            raise ValueError(f"MaxVariance: last is {self.last}, expected at least n, {self.n}, or none to keep n")

    def __call__(self, scores: Tensor, context: Context | None = None) -> Tensor:
        _require_ranked(scores)
        _require_at_most("MaxVariance", "n", self.n, scores)
        _require_at_most("MaxVariance", "last", self.last or self.n, scores)
        run, number = None if context is None else context.run, self.n
        if self.last is not None and run is not None and run.epochs > 1:
            number = round(self.n + (self.last - self.n) * run.epoch / (run.epochs - 1))
        return widest(scores, number)


@part("selection")
class Extremes:
    """Keep the best sample of every branch group, if its score is at least `high`, and the worst, if at most `low`.

    A branch group is the siblings of the plan's last split; without a listed split it is all samples of a prompt.
    Scores should be deviations from a prompt's usual reward, as `Advantage(scale="running")` gives them (B2-DiffuRL,
    2503.11240, released selection: thresholds 0.5 in its script, 0.7 by default).
    """

    low: float = -0.5
    high: float = 0.5

    def __post_init__(self) -> None:
        if not self.low <= self.high:
            raise ValueError(f"Extremes: low is {self.low} and high {self.high}, expected low <= high")

    def __call__(self, scores: Tensor, context: Context | None = None) -> Tensor:
        _require_ranked(scores)
        groups = _siblings(scores, context)
        best, worst = (_at(groups, end(dim=2, keepdim=True)) for end in (groups.argmax, groups.argmin))
        return ((best & (groups >= self.high)) | (worst & (groups <= self.low))).flatten(1)


@part("selection")
class WidthPruning:
    """Keep a share of the edges of a depth of a tree (BranchGRPO, 2509.06040, one half).

    of: "siblings", the best of the edges that leave one state; "depth", equally many of the best and the worst of all.
    depths: "last", only the edges behind the last split are pruned, and all others trained, as in the released code;
    "all", every depth is pruned separately.
    At least one of the siblings, or the two extremes, are kept; ties by position.
    """

    of: Literal["siblings", "depth"] = "siblings"
    share: Annotated[float, Above(0, to=1, words="above 0 and at most 1")] = 0.5
    depths: Literal["last", "all"] = "last"

    def __call__(self, scores: Tensor, context: Context | None = None) -> Tensor:
        _require_ranked(scores)
        return self._prune(_siblings(scores, context))

    def nodes(self, scores: Tensor, siblings: int | None) -> Tensor:
        """Kept inner nodes of one depth: scores [P, N] to bool [P, N].

        siblings: nodes that leave one state; None before the first split, where nothing has siblings.
        """
        if self.depths == "last" or siblings is None and self.of == "siblings":
            return torch.ones_like(scores, dtype=torch.bool)
        return self._prune(scores.unflatten(1, (-1, siblings or scores.shape[1])))

    def _prune(self, siblings: Tensor) -> Tensor:
        if self.of == "depth":
            scores = siblings.flatten(1)
            return BestWorst(2 * max(1, int(scores.shape[1] * self.share / 2)))(scores)
        kept = max(1, int(siblings.shape[2] * self.share))
        return _at(siblings, siblings.argsort(dim=2, descending=True, stable=True)[..., :kept]).flatten(1)


@part("selection")
class Beyond:
    """Keep scores at least as far from 0 as the batch's quantile: 0 keeps all, 0.5 the half with the larger
    |advantage|, ties included."""

    quantile: Annotated[float, AtLeast(0, below=1, words="0 (keep all) or more, and below 1")]

    def __call__(self, scores: Tensor, context: Context | None = None) -> Tensor:
        _require_ranked(scores)
        far = scores.abs()
        return far >= far.quantile(self.quantile)


@part("selection")
class ButFirst:
    """Keep all but the first sample of each group, the baseline of the others (`baselines.First`)."""

    def __call__(self, scores: Tensor, context: Context | None = None) -> Tensor:
        _require_at_most("ButFirst", "the least group", 2, scores)
        return torch.arange(scores.shape[1], device=scores.device).expand(scores.shape) > 0


@part("selection")
class DropZeroVariance:
    """Keep whole groups whose samples differ; the others have advantage 0 and would only cost evaluations
    (Flow-GRPO)."""

    def __call__(self, scores: Tensor, context: Context | None = None) -> Tensor:
        return (~zero_variance(scores))[:, None].expand(scores.shape)


@part("selection")
class PairedGroups:
    """Keep as many hard groups as easy ones, in pairs (the bidirectional pairing of "Beyond Variance").

    A group is hard if fewer of its samples have a score above 0 than below, easy if fewer have one below. Hard groups
    are ranked from the fewest successes on, easy ones from the fewest failures on, ties by position, and the longer
    list is cut. All others are left out; if there are no pairs, all groups with variance are kept.

    Rare events count most with an advantage that divides by the deviation. In the paper the pairs are drawn as prompts;
    here they are chosen of what an epoch drew.
    """

    def __call__(self, scores: Tensor, context: Context | None = None) -> Tensor:
        _require_ranked(scores)
        differ = ~zero_variance(scores)
        right = (scores > 0).sum(1)
        wrong = (scores < 0).sum(1)
        hard, easy = (right < wrong) & differ, (wrong < right) & differ
        count = int(min(hard.sum(), easy.sum()))
        if not count:
            return differ[:, None].expand(scores.shape)
        keep = torch.zeros_like(differ)
        for chosen, rare in ((hard, right), (easy, wrong)):
            keep[rare.masked_fill(~chosen, scores.shape[1] + 1).argsort(stable=True)[:count]] = True
        return keep[:, None].expand(scores.shape)


def of_nodes(part: Callable[..., Tensor] | None, leaves: Tensor, scores: Tensor, splits: Sequence[int]) -> Tensor:
    """Trained inner nodes of one depth, bool [P, N]: those that a selection with `nodes` keeps by their scores [P, N],
    else those with a kept leaf below. leaves: bool [P, G]; splits: as of `siblings`."""
    if hasattr(part, "nodes"):
        return part.nodes(scores, siblings(scores.shape[1], leaves.shape[1], splits))
    return leaves.unflatten(1, (scores.shape[1], -1)).any(dim=2)


def siblings(nodes: int, leaves: int, splits: Sequence[int]) -> int | None:
    """Number of a depth's nodes that leave one state; None if the depth has as many nodes as roots.

    nodes, leaves: per prompt. splits: children per state of the tree's splits, in order.
    """
    count = leaves // math.prod(splits)
    for children in splits:
        count *= children
        if count == nodes:
            return children
    return None


def widest(scores: Tensor, n: int) -> Tensor:
    """The n samples of each group of scores [P, G] with the largest variance: bool [P, G].

    They are always some of the lowest, at least one, and some of the highest, at least one: n - 1 subsets are tried.
    """
    values, ranked = scores.sort(dim=1, stable=True)
    size = scores.shape[1]
    ends = torch.stack([torch.cat([torch.arange(low), torch.arange(size - n + low, size)]) for low in range(1, n)])
    best = values[:, ends].var(dim=2, correction=0).argmax(dim=1)
    return _at(scores, ranked.gather(1, ends.to(ranked.device)[best]))


def _siblings(scores: Tensor, context: Context | None) -> Tensor:
    # Leaf scores [P, G] by the state that they leave at the last split, all of a group without one: [P, n, siblings].
    last = context.groups.splits[-1] if context and context.groups.splits else scores.shape[1]
    return scores.unflatten(1, (-1, last))


def _at(scores: Tensor, positions: Tensor) -> Tensor:
    return torch.zeros_like(scores, dtype=torch.bool).scatter(-1, positions, True)


def _require_ranked(scores: Tensor) -> None:
    assert not scores.isnan().any(), "scores to rank by must not contain NaN"


def _require_at_most(part: str, name: str, n: int, scores: Tensor) -> None:
    if n > scores.shape[1]:
        raise ValueError(f"{part}: {name} is {n}, expected at most the {scores.shape[1]} samples of a group")
