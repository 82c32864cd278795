"""Token credit: spread a sample's advantage over its decisions, `spread(taken, advantages, totals) -> [m] or [m, L]`.

taken: the decisions of m samples, whole groups (of texts Completions, of pictures the Transitions of one step).
advantages: [m], of the whole samples.
totals: [n, G], the weighted sums of their rewards before any shaping, m = n G, NaN if none applies.

"""

from __future__ import annotations

import math
from typing import Annotated, Any

import torch
from torch import Tensor

from flowgrpo.advantages.segments import (
    anchors,
    chain,
    cut_points,
    merged,
    segments_of,
    shared_values,
    step_advantages,
    steps_of,
)
from flowgrpo.parts import Above, AtLeast, part
from flowgrpo.types import Completions, Segmented, required


class TokenCredit:
    """Spread of a sample's advantage over its decisions: base class.

    samples: continuations per segment that estimate the value of its first state; 0: none are drawn.
    causal: it needs tokens that are drawn one after the other.
    needs: as of an `AdvantageRule`.
    """

    samples: int = 0
    causal = False
    needs: tuple[str, ...] = ()

    def __call__(self, taken: Any, advantages: Tensor, totals: Tensor) -> Tensor:
        """Return the advantages [m] or [m, L]."""
        raise NotImplementedError

    def segments(self, logp: Tensor, mask: Tensor) -> Tensor:
        """Return the segment of every token, int64 [m, L], of one that draws continuations."""
        raise NotImplementedError


@part("spread", target="tokens", causal=True, jointly={"cut interval samples": "above 0 to 1, and 1 or more"})
class SegmentChain(TokenCredit):
    """Advantage of a token as the change of value over its segment, from Monte-Carlo continuations (SPO-chain,
    2505.23564): `segments.chain`.

    A segment begins at a token whose probability was below `cut` and holds `interval` such tokens. The value of its
    first state is the mean reward of `samples` continuations. The value of the prompt is the mean of the group, and
    that behind the last segment the reward. masked: only tokens at cut points are trained, the paper's probability
    mask.
    """

    cut: Annotated[float, Above(0, to=1)] = 0.9
    interval: Annotated[int, AtLeast(1)] = 5
    samples: Annotated[int, AtLeast(1)] = 9
    masked: bool = True

    def segments(self, logp: Tensor, mask: Tensor) -> Tensor:
        """Return the segment of each token, int64 [m, L], of log-probabilities [m, L] and the mask of drawn tokens [m,
        L]."""
        return segments_of(cut_points(logp, mask, self.cut), self.interval)

    def __call__(self, taken: Completions, advantages: Tensor, totals: Tensor) -> Tensor:
        assert isinstance(taken, Segmented), "its rollout records segments"
        values, old = taken.values.clone(), taken.old
        values[:, 0] = totals.nanmean(1, keepdim=True).expand_as(totals).flatten()
        token_advantages = chain(values, taken.segments, totals.flatten()).nan_to_num(0)
        return token_advantages * (cut_points(old.logp, old.mask, self.cut) if self.masked else old.mask)


@part("spread", target="tokens", causal=True, jointly={"every cut": "1 or more, and above 0 to 1"})
class SegmentTree(TokenCredit):
    """Advantage of a token as the change of value over its `every` tokens; a value is the mean reward of all samples of
    the group with the same tokens so far (SPO-tree, 2505.23564): `segments.shared_values`.

    With `draws: Tree` of the same number of tokens these are the leaves below a node of the tree. The credit of shared
    tokens is divided by the number of samples that share them, so an edge of the tree is trained once. cut: only tokens
    whose probability was below it are trained, the paper's probability mask (1: all but certain ones).
    """

    every: Annotated[int, AtLeast(1)] = 32
    cut: Annotated[float, Above(0, to=1)] = 0.9

    def __call__(self, taken: Completions, advantages: Tensor, totals: Tensor) -> Tensor:
        old, mask, rewards = taken.old, taken.old.mask.cpu(), totals.flatten()
        steps = steps_of(taken.ids, mask, self.every)
        states = anchors(taken.ids, steps, mask, torch.arange(len(totals)).repeat_interleave(totals.shape[1]))
        values, sharing = shared_values(states, rewards)
        token_advantages = chain(values, steps, rewards) / sharing[:, 1:].clamp(min=1).gather(1, steps)
        return token_advantages.nan_to_num(0) * cut_points(old.logp, old.mask, self.cut)


@part("spread", target="tokens", causal=True, jointly={"every gamma weight": "1 or more, above 0 to 1, and 0 or more"})
class StepGroups(TokenCredit):
    """Sample's advantage plus `weight` times the step's advantage, compared with steps of the group that begin in the
    same state (GiGPO, 2505.10978): `step_advantages`.

    A state is the prompt and the tokens so far. A step is `every` tokens, or ends with one of the token ids `ends` if
    given. gamma and weight are the paper's, whose steps are turns of an agent; `every` is ours. divide: over the
    deviation (the paper's other choice does not).
    """

    every: Annotated[int, AtLeast(1)] = 8
    ends: tuple[int, ...] = ()
    gamma: Annotated[float, Above(0, to=1)] = 0.95
    weight: Annotated[float, AtLeast(0)] = 1.0
    divide: bool = True

    def __call__(self, taken: Completions, advantages: Tensor, totals: Tensor) -> Tensor:
        mask = taken.old.mask.cpu()
        groups = torch.arange(len(totals)).repeat_interleave(totals.shape[1])
        steps = steps_of(taken.ids, mask, self.every, self.ends)
        states = anchors(taken.ids, steps, mask, groups)[:, :-1]
        states = torch.where(torch.arange(states.shape[1]) <= steps.amax(1, keepdim=True), states, -1)
        relative = step_advantages(states, totals.flatten(), self.gamma, self.divide)
        return advantages[:, None] + self.weight * relative.gather(1, steps)


@part("spread", target="tokens", causal=True,
      jointly={"every history": "1 or more, and 0 or more, or -1 for all steps before"})
class MergedSteps(TokenCredit):
    """Advantage of a step: the mean over all completions of the group that take the same step, merged to one edge of
    their graph (SALT, 2510.20022: shared steps are neutral, divergent ones keep their outcome): `merged`.

    A step is `every` tokens, or ends with one of the token ids `ends` if given, such as a newline's. history: steps
    before it that have to be equal too; -1: all from the start. SALT's steps are turns of an agent, and its history is
    a reconstruction.
    """

    every: Annotated[int, AtLeast(1)] = 8
    ends: tuple[int, ...] = ()
    history: Annotated[int, AtLeast(-1)] = 1

    def __call__(self, taken: Completions, advantages: Tensor, totals: Tensor) -> Tensor:
        mask = taken.old.mask.cpu()
        groups = torch.arange(len(totals)).repeat_interleave(totals.shape[1])
        return merged(taken.ids, steps_of(taken.ids, mask, self.every, self.ends), mask, groups, advantages,
                      self.history)


@part("spread")
class Planning(TokenCredit):
    """Advantage A + alpha |A| on planning decisions, A on the others (HICRA, 2509.03646).

    Of texts these are tokens with one of the ids `ids`, and the `first` tokens of a completion. Of pictures they are
    the first `first` steps of the grid, of high noise, which lay out the picture; `ids` has no meaning there. HICRA
    finds phrases of planning in its texts beforehand.
    """

    alpha: float = 0.2
    first: int = 1
    ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not 0 <= self.alpha < math.inf or self.first < 0 or not (self.first or self.ids):
            raise ValueError(f"Planning: alpha is {self.alpha}, first {self.first} and ids {list(self.ids)}, expected "
                             "0 or more each, and a first decision or an id")

    def __call__(self, taken: Any, advantages: Tensor, totals: Tensor) -> Tensor:
        raised = advantages + self.alpha * advantages.abs()
        if not isinstance(taken, Completions):
            return raised if taken.step < self.first else advantages
        mask = taken.old.mask.to(advantages.device)
        planned = mask.cumsum(1).sub(1) < self.first
        if self.ids:
            planned = planned | torch.isin(taken.ids.to(planned.device), torch.tensor(self.ids, device=planned.device))
        return torch.where(planned & mask, raised[:, None], advantages[:, None])


@part("spread", target="tokens", needs=("entropy",),
      jointly={"alpha kappa": "0 or more, and above 1, so that no advantage changes its sign"})
class Exploring(TokenCredit):
    """Advantage A + min(alpha H, |A| / kappa) of a token whose distribution has the entropy H in nats: uncertain tokens
    are pulled up more and pushed down less, by at most |A| / kappa, so that no sign turns around.

    MSSR (2512.18215) shapes the advantages of single rollouts so (with `advantage: {type: ValueTracker}`); alpha is its
    lambda and kappa its gamma. "Exploring Superior Function Calls" shapes those of a group by entropy. Entropies are
    those of the policy that drew the tokens, by one more replay per epoch. The default numbers are ours.
    """

    alpha: Annotated[float, AtLeast(0)] = 0.4
    kappa: Annotated[float, Above(1)] = 2.0

    def __call__(self, taken: Completions, advantages: Tensor, totals: Tensor) -> Tensor:
        entropy = required(taken.old.entropy).to(advantages)
        bound = advantages.abs()[:, None] / self.kappa
        return advantages[:, None] + torch.minimum(self.alpha * entropy, bound)
