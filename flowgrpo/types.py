"""The records that flow between sampling, scoring and training.

Shapes: P prompts, G samples per prompt, B = P*G rows ordered prompt-major, L tokens of a completion, N decisions per
row (1 for a transition, L for tokens), *D the shape of one latent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from flowgrpo.device import queued


def wide(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The tensors in the one dtype they all fit in, float32 at least (half becomes float32, float64 stays)."""
    dtype = reduce(torch.promote_types, (tensor.dtype for tensor in tensors), torch.float32)
    return tuple(tensor.to(dtype) for tensor in tensors)


# Records that hold tensors compare by identity: == on their fields would be ambiguous.


@dataclass(frozen=True, eq=False)
class Gaussian:
    """N(mean, std^2), one transition of a sampler.

    mean: [B, *D]; std: broadcastable to it (0-d allowed), the deviation of the whole step, never a diffusion
    coefficient. std 0 is a deterministic step, which can be sampled but has no density.
    """

    mean: Tensor
    std: Tensor

    def rows(self, at: Tensor) -> Gaussian:
        """The transitions of the rows `at`."""
        return Gaussian(self.mean[at], self.std if self.std.ndim < self.mean.ndim else self.std[at])


@dataclass(frozen=True, eq=False)
class Scored:
    """A policy's score of recorded decisions.

    logp: [B, N]; mask: bool [B, N], true where the decision counts; only where a method reads them, mean [B, N, *D]
    of each transition, std, [N] or [B, N], the deviation of the whole step, and, of a replay, slope [N], the
    derivative of the mean by the model's output; of a replay of tokens, entropy [B, N], that of the distribution each
    was drawn from, in nats.
    """

    logp: Tensor
    mask: Tensor
    mean: Tensor | None = None
    std: Tensor | None = None
    slope: Tensor | None = None
    entropy: Tensor | None = None

    def __post_init__(self) -> None:
        assert self.logp.ndim == 2 and self.logp.shape == self.mask.shape, (self.logp.shape, self.mask.shape)
        assert self.mean is None or self.mean.shape[:2] == self.logp.shape, (self.mean.shape, self.logp.shape)

    def rows(self, at: Tensor) -> Scored:
        """The rows `at` (indices or a mask) of all that is scored."""
        std = self.std if self.std is None or self.std.ndim < 2 else self.std[at]
        mean, entropy = (each if each is None else each[at] for each in (self.mean, self.entropy))
        return Scored(self.logp[at], self.mask[at], mean, std, self.slope, entropy)

    def to(self, device: torch.device) -> Scored:
        """The score with its large parts on the device; std and slope, a number or a few, stay where they are."""
        mean, entropy = (each if each is None else queued(each, device) for each in (self.mean, self.entropy))
        return Scored(queued(self.logp, device), queued(self.mask, device), mean, self.std, self.slope, entropy)


@dataclass(frozen=True, eq=False)
class Goal:
    """Where transitions are pulled to: mean [m, 1, *D], and how strongly, weight [m, 1]."""

    mean: Tensor
    weight: Tensor

    def rows(self, at: Tensor | slice) -> Goal:
        return Goal(self.mean[at], self.weight[at])

    def to(self, device: torch.device) -> Goal:
        return Goal(queued(self.mean, device), queued(self.weight, device))


@dataclass(frozen=True, eq=False)
class Transitions:
    """The recorded transitions of one step of a grid: m of them, that left n <= m states.

    step: the grid index; x: [n, *D], the states before it as the network saw them; prompts: int64 [n], the prompt of
    each; parent: int64 [m], ascending, the state that each transition left; x_next: [m, *D]; old: [m, 1], their score
    under the policy that drew them; goal: of a method that pulls to one.
    """

    step: int
    x: Tensor
    prompts: Tensor
    parent: Tensor
    x_next: Tensor
    old: Scored
    goal: Goal | None = None
    correction = None  # a sampler's own states need none

    def __post_init__(self) -> None:
        assert len(self.x) == len(self.prompts) and len(self.x_next) == len(self.parent) == len(self.old.logp)

    def kept(self, keep: Tensor) -> Transitions | None:
        """The transitions where `keep` (bool [m]) is true, with the states that they left; None if there are none."""
        if keep.all():
            return self
        if not keep.any():
            return None
        left, parent = self.parent[keep].unique_consecutive(return_inverse=True)
        at, of = keep.to(self.x_next.device), left.to(self.x.device)
        goal = self.goal and self.goal.rows(at)
        return Transitions(self.step, self.x[of], self.prompts[left], parent, self.x_next[at], self.old.rows(at), goal)


class Completion(str):
    """A text that a language model wrote, and how many tokens it took, its end included."""

    tokens: int

    def __new__(cls, text: str, tokens: int) -> Completion:
        self = super().__new__(cls, text)
        self.tokens = tokens
        return self


@dataclass(frozen=True, eq=False)
class Completions:
    """Sampled completions, m of them: what `Transitions` are to pictures, with all decisions of a row at once.

    ids: int64 [m, L], L the most tokens that a completion may have; prompts: int64 [m], the prompt of each; old: Scored
    [m, L], its mask true where a token was drawn that counts, the end included, and its logp 0 where it is not;
    correction: [m, L], what the loss of a token is multiplied by, where another program drew it than is trained;
    expert: bool [m], which are answers that came with their prompts, None where a method asks for none.
    """

    ids: Tensor
    prompts: Tensor
    old: Scored
    correction: Tensor | None = field(default=None, kw_only=True)
    expert: Tensor | None = field(default=None, kw_only=True)
    step = 0  # all tokens are one step
    goal = None

    def __post_init__(self) -> None:
        assert self.ids.shape == self.old.logp.shape and len(self.ids) == len(self.prompts), self.ids.shape

    @property
    def parent(self) -> Tensor:
        """The state that each one left: its own."""
        return torch.arange(len(self.ids))

    def kept(self, keep: Tensor) -> Completions | None:
        """The completions where `keep` (bool [m]) is true and a token counts; None if there are none."""
        keep = keep.cpu() & self.old.mask.any(1).cpu()
        if not keep.any():
            return None
        return self if keep.all() else self.rows(keep)

    def rows(self, at: Tensor) -> Completions:
        """The completions `at` (indices or a mask)."""
        expert = self.expert if self.expert is None else self.expert[at]
        return Completions(self.ids[at], self.prompts[at], self.old.rows(at), correction=self._correction(at),
                           expert=expert)

    def _correction(self, at: Tensor) -> Tensor | None:
        return None if self.correction is None else self.correction[at]


@dataclass(frozen=True, eq=False)
class Traces(Completions):
    """Completions that were filled in step by step: steps int64 [m, L], at which each token was drawn, from 0."""

    steps: Tensor

    def rows(self, at: Tensor) -> Traces:
        return Traces(self.ids[at], self.prompts[at], self.old.rows(at), self.steps[at],
                      correction=self._correction(at))


@dataclass(frozen=True, eq=False)
class Segmented(Completions):
    """Completions in segments: segments int64 [m, L], of each token, from 0; values [m, S], of the state before each
    segment, NaN where none is known."""

    segments: Tensor
    values: Tensor

    def rows(self, at: Tensor) -> Segmented:
        return Segmented(self.ids[at], self.prompts[at], self.old.rows(at), self.segments[at], self.values[at],
                         correction=self._correction(at))


@dataclass(frozen=True, eq=False)
class Peers:
    """All samples at one time of a forward process, for a loss that compares those of a group: gap [m], what it
    compares, without a gradient; advantage [m]; group: int64 [m], equal where samples have the same prompt."""

    gap: Tensor
    advantage: Tensor
    group: Tensor

    def beside(self, rows: Tensor) -> Tensor:
        """Who is in the group of the samples `rows` [b], themselves included: bool [b, m]."""
        return self.group[rows][:, None] == self.group


@dataclass(frozen=True, eq=False)
class Noised:
    """What the loss of a forward process reads of b noised samples at one time.

    time: sigma; new, old, reference: Scored [b, 1], whose means, where the loss asks for them, are velocities; target:
    [b, *D], the noise less the data; rows: int64 [b], where the samples are among their `peers`. reference and peers:
    None where the loss does not ask for them.
    """

    time: float
    new: Scored
    old: Scored
    target: Tensor
    rows: Tensor
    reference: Scored | None = None
    peers: Peers | None = None


@dataclass(frozen=True, eq=False)
class Compared:
    """What a loss that compares completions reads of b of the m completions of some whole groups.

    new, old, reference: Scored [b, L], reference None where the loss does not ask for it; log_ratio: [b, L], the
    method's; rows: int64 [b], where they are among all; ids: int64 [m, L] and mask: bool [m, L], of all; peers: all of
    them, whose gap [m, ...] is what the loss compares, None where it compares nothing; expert: bool [m], which of all
    are answers that came with their prompts.
    """

    new: Scored
    old: Scored
    log_ratio: Tensor
    rows: Tensor
    ids: Tensor
    mask: Tensor
    reference: Scored | None = None
    peers: Peers | None = None
    expert: Tensor | None = None


@dataclass(eq=False)
class Context:
    """What the parts of a method may read beside rewards.

    prompts: the text of each group, P of them; logp: [P, G], a sample's old log-probability, the mean over its trained
    decisions, None where a method has none; lengths: int64 [P, G], how many trained decisions a sample has, of a text
    its tokens, and longest, how many it could have; epoch, counted from 0, and epochs, those of the run; memory: what
    parts remember from epoch to epoch, JSON-able and kept in the checkpoint; each uses one key of its own; win_rates:
    which of the R rewards are win rates within their group already, those of a judge (empty: none); deducted: [P, G],
    what every reward of a sample is lowered by before all else (None: nothing); weights: of the R rewards (empty: 1
    each).
    """

    prompts: Sequence[str] = ()
    logp: Tensor | None = None
    lengths: Tensor | None = None
    longest: int = 1
    epoch: int = 0
    epochs: int = 1
    memory: dict[str, Any] = field(default_factory=dict)
    win_rates: Sequence[bool] = ()
    deducted: Tensor | None = None
    weights: Sequence[float] = ()
