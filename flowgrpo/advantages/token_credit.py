"""Credit of tokens and steps: spread a sample's advantage, `spread(taken, advantages, totals) -> [m] or [m, L]`.

taken: the decisions of m samples, whole groups (of texts Completions, of images the Transitions of one step).
advantages: [m], of the whole samples.
totals: [n, G], the weighted sums of their rewards before any shaping, m = n G, NaN if none applies.

Segments of a completion and their values are pure functions on tokens [m, L]. `Progress` is the credit of a denoising
step: what it adds to the reward of the predicted clean image.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Annotated, Any

import torch
from torch import Tensor

from flowgrpo.advantages.group import weighted_sum
from flowgrpo.parts import Above, AtLeast, part
from flowgrpo.types import Completions, Context, Segmented, unwrap, wide


def cut_points(logp: Tensor, mask: Tensor, below: float) -> Tensor:
    """Tokens drawn with a probability below `below`, where completions diverge: bool [m, L]."""
    return (logp.exp() < below) & mask


def segments_of(cuts: Tensor, interval: int) -> Tensor:
    """Segment of each token, int64 [m, L] from 0, of cut points bool [m, L].

    A segment begins with a cut point and holds `interval` of them, the last one fewer. Tokens before the first cut
    point belong to the first segment.
    """
    return (cuts.long().cumsum(1) - 1).clamp(min=0) // interval


def starts_of(segments: Tensor, mask: Tensor) -> list[tuple[int, int, int]]:
    """(row, segment, index of its first token) of all segments but the first of a row.

    segments: int64 [m, L]; mask: bool [m, L], true for drawn tokens.
    """
    new = (segments[:, 1:] > segments[:, :-1]) & mask[:, 1:]
    return [(row, int(segments[row, place + 1]), place + 1) for row, place in new.nonzero().tolist()]


def chain(values: Tensor, segments: Tensor, rewards: Tensor) -> Tensor:
    """Value that every token's segment added, [m, L]: that of the state behind it less that of the state before.

    values: [m, S], of the state before each segment, NaN beyond a row's last one.
    rewards: [m], the value behind the last segment.

    A row's segments add up to its reward less its first value.
    """
    behind = torch.cat([values[:, 1:], torch.full_like(values[:, :1], torch.nan)], 1)
    behind = torch.where(behind.isnan(), rewards[:, None].to(values), behind)
    return (behind - values).gather(1, segments.clamp(max=values.shape[1] - 1))


def steps_of(ids: Tensor, mask: Tensor, every: int, ends: Collection[int] = ()) -> Tensor:
    """Step of each token, int64 [m, L] from 0.

    A step is `every` tokens, or ends with a token of `ends` if any are given. Masked tokens belong to the last step
    before them.
    """
    if ends:
        ended = torch.isin(ids, torch.tensor(sorted(ends))) & mask
        steps = ended.long().cumsum(1) - ended.long()
    else:
        steps = (torch.arange(ids.shape[1]) // every).expand(ids.shape)
    return torch.where(mask, steps, steps.masked_fill(~mask, 0).amax(1, keepdim=True))


def anchors(ids: Tensor, steps: Tensor, mask: Tensor, groups: Tensor) -> Tensor:
    """State before each step and behind the last one, int64 [m, T + 1]; -1 beyond a row's end.

    Two rows share a state if they have the same prompt (`groups`, int64 [m]) and the same tokens so far.
    """
    states = torch.full((len(ids), int(steps.max()) + 2), -1)
    numbers: dict[tuple, int] = {}
    for row, (tokens, step, kept, group) in enumerate(zip(ids, steps, mask, groups.tolist())):
        state: tuple = (group,)
        for number in step[kept].unique().tolist():
            states[row, number] = numbers.setdefault(state, len(numbers))
            state = (numbers[state], tuple(tokens[kept & (step == number)].tolist()))
        states[row, int(step.max()) + 1] = numbers.setdefault(state, len(numbers))
    return states


def step_advantages(states: Tensor, rewards: Tensor, gamma: float, divide: bool = True) -> Tensor:
    """GiGPO's step-relative advantages (2505.10978, equations 6 to 9): [m, T].

    states: int64 [m, T], the state before each step, -1 for none.
    rewards: [m], at the end.

    The return of a step is gamma to the power of the steps behind it times the reward. Its advantage is that less the
    mean return of all steps that left the same state, over their deviation (ddof 1, eps 1e-6) with `divide`. 0 for a
    state that was left once, and for equal returns.
    """
    (rewards,) = wide(rewards)
    there = states >= 0
    flat = states.flatten()
    behind = there.sum(1, keepdim=True) - there.long().cumsum(1)
    returns = (gamma ** behind.to(rewards) * rewards[:, None]).flatten()
    known = (flat >= 0) & ~returns.isnan()
    at, kept = flat[known], returns[known]
    size = int(states.max()) + 1
    count = torch.zeros(size).to(kept).index_add(0, at, torch.ones_like(kept))
    mean = torch.zeros(size).to(kept).index_add(0, at, kept) / count.clamp(min=1)
    centred = kept - mean[at]
    spread = (torch.zeros(size).to(kept).index_add(0, at, centred.square()) / (count - 1).clamp(min=1)).sqrt()
    noise = spread <= 1e-6 * torch.zeros(size).to(kept).index_add(0, at, kept.abs()) / count.clamp(min=1)
    relative = centred / (spread + 1e-6)[at] if divide else centred
    return torch.zeros_like(returns).masked_scatter(known, relative.masked_fill(noise[at], 0)).view(states.shape)


def shared_values(states: Tensor, rewards: Tensor) -> tuple[Tensor, Tensor]:
    """Value of each state to the samples that pass through it, and their number: both [m, T].

    states: int64 [m, T], equal where samples share one, -1 for none.
    rewards: [m], NaN for none.

    The value of a state is the mean reward of its samples: in a tree, of the leaves below (SPO-tree, 2505.23564).
    """
    (rewards,) = wide(rewards)
    known = (states >= 0) & ~rewards.isnan()[:, None]
    at = states[known]
    kept = rewards[:, None].expand(states.shape)[known]
    size = int(states.max()) + 1
    count = torch.zeros(size).to(kept).index_add(0, at, torch.ones_like(kept))
    mean = torch.zeros(size).to(kept).index_add(0, at, kept) / count.clamp(min=1)
    missing = torch.full(states.shape, torch.nan, dtype=rewards.dtype)
    return missing.masked_scatter(known, mean[at]), torch.zeros_like(missing).masked_scatter(known, count[at])


def mean_step_advantage(ids: Tensor, steps: Tensor, mask: Tensor, groups: Tensor, advantages: Tensor,
                        history: int) -> Tensor:
    """Mean advantage of all rows that take the same step, of each token: [m, L].

    steps: int64 [m, L], of each token; groups: int64 [m]; advantages: [m].

    Steps are the same if their groups, their tokens and those of the `history` steps before are equal; -1: of all steps
    before. A row that takes a step twice counts twice.
    """
    edges: dict[tuple, list[tuple[int, Tensor]]] = {}
    for row, (tokens, step, kept, group) in enumerate(zip(ids, steps, mask, groups.tolist())):
        path: list[tuple[int, ...]] = []
        for number in step[kept].unique().tolist():
            at = kept & (step == number)
            path.append(tuple(tokens[at].tolist()))
            known = path if history < 0 else path[-history - 1:]
            edges.setdefault((group, len(path) <= history, *known), []).append((row, at))
    result = torch.zeros(ids.shape).to(advantages)
    for taken in edges.values():
        mean = torch.stack([advantages[row] for row, _ in taken]).mean()
        for row, at in taken:
            result[row] = torch.where(at.to(result.device), mean, result[row])
    return result


@part("progress", jointly={"weight outcome discount": "0 or more, 0 or more, and 0 to 1"})
class Progress:
    """Bonus of a trained step: the change of the clean prediction's reward over it (MRT, 2503.07572; IRCoCo,
    2401.16637): `progress`.

    Before every trained step the predicted clean image is decoded and scored. A step's reward is `outcome` times the
    sample's reward plus `weight` times its progress, and is compared by the method's advantage at that step. Papers
    score blocks of text; the denoising form is a reconstruction.

    discount: share of the later steps' progress that counts too. 0 is the step's progress alone; 1 is the sample's
        reward less that of the prediction, which is potential-based shaping with Phi = V and Phi(end) = 0 (GRPO-R).
    rewards: names of the run's rewards that score predictions; empty: all. One of weight 0 counts with weight 1.
    """

    weight: Annotated[float, AtLeast(0)] = 1.0
    outcome: Annotated[float, AtLeast(0)] = 1.0
    discount: Annotated[float, AtLeast(0, to=1)] = 0.0
    rewards: tuple[str, ...] = ()

    def bonuses(self, rewards: Tensor, context: Context) -> Tensor:
        """Bonus of every trained step, [P, G, K]. rewards: [P, G, R], of the samples."""
        weights = select_weights(dict(zip(context.rewards.names, context.rewards.weights)), self.rewards)
        columns = [number for number, name in enumerate(context.rewards.names) if name in weights]
        final = weighted_sum(rewards[..., columns], list(weights.values()))
        return progress(unwrap(context.samples.predicted).to(final), final, self.discount)


def progress(values: Tensor, final: Tensor, discount: float = 0.0) -> Tensor:
    """Progress of K steps, [P, G, K]: the value behind a step less that before it.

    values: [P, G, K], of the states before the steps. final: [P, G], behind the last one.
    discount: a step's result is its progress plus `discount` times the result of the next step.

    Undiscounted progress of a sample's steps adds up to its final value less its first one.
    """
    steps = torch.cat([values[..., 1:], final[..., None]], 2) - values
    results = [steps[..., -1]]
    for step in range(steps.shape[2] - 2, -1, -1):
        results.append(steps[..., step] + discount * results[-1] if discount else steps[..., step])
    return torch.stack(results[::-1], 2)


def select_weights(weights: Mapping[str, float], names: Sequence[str] = ()) -> dict[str, float]:
    """Weights of the rewards `names`, 1 in place of 0; without names all of them, unchanged."""
    return {name: weight or 1.0 for name, weight in weights.items() if name in names} if names else dict(weights)


class TokenCredit:
    """Spread of a sample's advantage over its decisions: base class.

    samples: continuations per segment that estimate the value of its first state; 0: none are drawn.
    causal: it needs tokens that are drawn one after the other.
    needs, teaches: as of an `AdvantageRule`.
    """

    samples: int = 0
    causal = teaches = False
    needs: tuple[str, ...] = ()

    def __call__(self, taken: Any, advantages: Tensor, totals: Tensor) -> Tensor:
        """Advantages [m] or [m, L]."""
        raise NotImplementedError

    def segments(self, logp: Tensor, mask: Tensor) -> Tensor:
        """Segment of every token, int64 [m, L], of one that draws continuations."""
        raise NotImplementedError


@part("spread", target="texts", causal=True, teaches=True,
      jointly={"cut interval samples": "above 0 to 1, and 1 or more"})
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
        """Segment of each token, int64 [m, L], of log-probabilities [m, L] and the mask of drawn tokens [m, L]."""
        return segments_of(cut_points(logp, mask, self.cut), self.interval)

    def __call__(self, taken: Completions, advantages: Tensor, totals: Tensor) -> Tensor:
        assert isinstance(taken, Segmented), "its rollout records segments"
        values, old = taken.values.clone(), taken.old
        values[:, 0] = totals.nanmean(1, keepdim=True).expand_as(totals).flatten()
        token_advantages = chain(values, taken.segments, totals.flatten()).nan_to_num(0)
        return token_advantages * (cut_points(old.logp, old.mask, self.cut) if self.masked else old.mask)


@part("spread", target="texts", causal=True, jointly={"every cut": "1 or more, and above 0 to 1"})
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
    """Advantage of a step as the mean over all completions of the group that take it, merged to one edge of
    their graph (SALT, 2510.20022: shared steps are neutral, divergent ones keep their outcome): `mean_step_advantage`.

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
        return mean_step_advantage(taken.ids, steps_of(taken.ids, mask, self.every, self.ends), mask, groups,
                                   advantages, self.history)


@part("spread")
class Planning(TokenCredit):
    """Advantage A + alpha |A| on planning decisions, A on the others (HICRA, 2509.03646).

    Of texts these are tokens with one of the ids `ids`, and the `first` tokens of a completion. Of images they are
    the first `first` steps of the grid, of high noise, which lay out the image; `ids` has no meaning there. HICRA
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
        entropy = unwrap(taken.old.entropy).to(advantages)
        bound = advantages.abs()[:, None] / self.kappa
        return advantages[:, None] + torch.minimum(self.alpha * entropy, bound)
