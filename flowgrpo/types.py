"""Records that flow between sampling, scoring and training.

Shapes: P prompts, G samples per prompt, B = P*G rows ordered prompt-major, L tokens of a completion, N decisions per
row (1 for a transition, L for tokens), *D the shape of one latent.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import reduce, wraps
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import torch
from torch import Tensor

from flowgrpo.device import to_device

T = TypeVar("T")
C = TypeVar("C", bound="Completions")


def wide(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Tensors in their common dtype, float32 at least (half becomes float32, float64 stays)."""
    dtype = reduce(torch.promote_types, (tensor.dtype for tensor in tensors), torch.float32)
    return tuple(tensor.to(dtype) for tensor in tensors)


class InDouble:
    """Base class of parts that are called with rewards: they compute in float64, where squares and sums of all float32
    numbers are finite, and answer in the rewards' dtype, float32 at least."""

    def __init_subclass__(cls, **named: Any) -> None:
        super().__init_subclass__(**named)
        if call := vars(cls).get("__call__"):
            @wraps(call)
            def in_double(self: Any, rewards: Tensor, *given: Any, **keywords: Any) -> Tensor:
                (rewards,) = wide(rewards)
                return call(self, rewards.double(), *given, **keywords).to(rewards.dtype)

            cls.__call__ = in_double  # type: ignore[attr-defined, method-assign]


# Records that hold tensors compare by identity: == on their fields would be ambiguous.


@dataclass(frozen=True, eq=False)
class Gaussian:
    """N(mean, std^2), one transition of a sampler.

    mean: [B, *D].
    std: broadcastable to it (0-d allowed), the deviation of the whole step, never a diffusion coefficient. std 0 is a
        deterministic step, which can be sampled but has no density.
    """

    mean: Tensor
    std: Tensor

    def rows(self, at: Tensor) -> Gaussian:
        """The rows `at`: an index, a slice or bool [B]. A standard deviation that all rows share stays whole."""
        return Gaussian(self.mean[at], self.std if self.std.ndim < self.mean.ndim else self.std[at])


@dataclass(frozen=True, eq=False)
class Scored:
    """Score of recorded decisions. Optional fields are None if the method does not read them.

    logp: [B, N]. mask: bool [B, N], true where the decision counts.
    mean: [B, N, *D], of each transition. std: [N] or [B, N], the deviation of the whole step.
    slope: [N], of a replay, the derivative of the mean by the model's output.
    entropy: [B, N], of a replay of tokens, that of each token's distribution, in nats; the mean log-probability of all
        tokens for a surrogate that reads the uniform policy's.
    guided: bool [B], of an old score, true for decisions drawn under another input than the one that is learned.
    """

    logp: Tensor
    mask: Tensor
    mean: Tensor | None = None
    std: Tensor | None = None
    slope: Tensor | None = None
    entropy: Tensor | None = None
    guided: Tensor | None = None

    def __post_init__(self) -> None:
        assert self.logp.ndim == 2 and self.logp.shape == self.mask.shape, (self.logp.shape, self.mask.shape)
        assert self.mean is None or self.mean.shape[:2] == self.logp.shape, (self.mean.shape, self.logp.shape)
        assert self.entropy is None or len(self.entropy) == len(self.logp), (self.entropy.shape, self.logp.shape)
        assert self.guided is None or len(self.guided) == len(self.logp), (self.guided.shape, self.logp.shape)

    def rows(self, at: Tensor | slice) -> Scored:
        """Rows `at` (indices, a mask or a slice) of all fields."""
        chosen = self._each(lambda value: value[at])
        return chosen if self.std is None or self.std.ndim < 2 else replace(chosen, std=self.std[at])

    def to(self, device: torch.device) -> Scored:
        """Score with its large parts on the device; std and slope, a few numbers, stay in place."""
        return self._each(lambda value: to_device(value, device))

    def _each(self, of: Callable[[Tensor], Tensor]) -> Scored:
        held: dict[str, Any] = {name: getattr(self, name) for name in ("logp", "mask", "mean", "entropy", "guided")}
        return replace(self, **{name: of(value) for name, value in held.items() if value is not None})


@dataclass(frozen=True, eq=False)
class RegressionTarget:
    """Goal of transitions: mean [m, 1, *D], the target of the mean; weight [m, 1], the strength of the pull."""

    mean: Tensor
    weight: Tensor

    def rows(self, at: Tensor | slice) -> RegressionTarget:
        return RegressionTarget(self.mean[at], self.weight[at])

    def to(self, device: torch.device) -> RegressionTarget:
        return RegressionTarget(to_device(self.mean, device), to_device(self.weight, device))


@dataclass(frozen=True, eq=False)
class Transitions:
    """Recorded transitions of one step of a grid: m of them, from n <= m states.

    step: the grid index.
    x: [n, *D], the states before it as the network saw them.
    prompts: int64 [n], the prompt of each.
    parent: int64 [m], ascending, the state that each transition left.
    x_next: [m, *D].
    old: [m, 1], their score under the policy that drew them.
    goal: of a method with a supervised term.
    clean: [n, *D], the data that the policy predicted at each state, of a method that scores it.
    importance: [m, 1], factor on the loss of a transition, if older weights drew it than its update begins with.
    """

    step: int
    x: Tensor
    prompts: Tensor
    parent: Tensor
    x_next: Tensor
    old: Scored
    regression_target: RegressionTarget | None = None
    clean: Tensor | None = None
    importance: Tensor | None = None
    expert = left_out = None  # all are drawn and trained

    def __post_init__(self) -> None:
        assert len(self.x) == len(self.prompts) and len(self.x_next) == len(self.parent) == len(self.old.logp)
        assert self.clean is None or len(self.clean) == len(self.x), (self.clean.shape, self.x.shape)
        target = self.regression_target
        assert target is None or len(target.mean) == len(self.parent), (target.mean.shape, self.parent.shape)
        assert self.importance is None or len(self.importance) == len(self.parent), self.importance.shape

    @property
    def counts(self) -> Tensor:
        """True where a transition counts, bool [m] on the CPU: everywhere."""
        return torch.ones(len(self.parent), dtype=torch.bool)

    def select(self, keep: Tensor) -> Transitions | None:
        """Transitions where `keep` (bool [m]) is true, with the states that they left; None if no one is."""
        if keep.all():
            return self
        if not keep.any():
            return None
        left, parent = self.parent[keep].unique_consecutive(return_inverse=True)
        at, of = keep.to(self.x_next.device), left.to(self.x.device)
        target = self.regression_target and self.regression_target.rows(at)
        clean = None if self.clean is None else self.clean[of]
        importance = None if self.importance is None else self.importance[keep.to(self.importance.device)]
        return Transitions(self.step, self.x[of], self.prompts[left], parent, self.x_next[at], self.old.rows(at),
                           target, clean, importance)


_TAG_AT_END = re.compile(r"<[A-Za-z][\w-]*>\s*\Z")


def opening_tag(prompt: str) -> str:
    """The tag, such as <think>, that a prompt ends with; "" for none."""
    match = _TAG_AT_END.search(prompt[-100:])
    return match[0].strip() if match else ""


class Completion(str):
    """Text that a language model wrote, its number of tokens with its end, and what `pictured` drew from it.

    tokens: None if unknown.
    ids: the tokens; empty for a text that was read from a file.
    opened: the tag that its prompt ends with as the model read it, such as a chat template's <think>; "" for none.
    """

    tokens: int | None
    ids: tuple[int, ...]
    opened: str
    image: Tensor | None = None  # [3, H, W] in [0, 1], for display

    def __new__(cls, text: str, tokens: int | None, ids: tuple[int, ...] = (), opened: str = "") -> Completion:
        self = super().__new__(cls, text)
        self.tokens, self.ids, self.opened = tokens, ids, opened
        return self

    def __getnewargs__(self) -> tuple[str, int | None, tuple[int, ...], str]:  # type: ignore[override]
        return str(self), self.tokens, self.ids, self.opened


@dataclass(frozen=True, eq=False)
class Completions:
    """Sampled completions, m of them: the `Transitions` of texts, with all decisions of a row at once.

    ids: int64 [m, L], L the most tokens that a completion may have.
    prompts: int64 [m], the prompt of each.
    old: Scored [m, L]; its mask is true for drawn tokens, the end included; its logp is 0 elsewhere.
    importance: [m, L], factor on the loss of a token, if another program or arithmetic drew it than is trained.
    expert: bool [m], answers that came with their prompts; None if the method asks for none.
    greedy: bool [m], rows of most likely tokens, which were not drawn; None if the method asks for none.
    left_out: bool [m], cut-off completions that the loss leaves out (`text.truncated: mask`); None: it leaves out none.
        Up to there they are samples like all others, as in TRL and DAPO's released code: measured (length,
        log-probability, entropy), rewarded, punished and compared, so that they move their group's mean and deviation.
        Then they are dropped (`counts`), and what a loss compares itself is of the others. A loss of rows still divides
        by them (`Part.left_out`).
    """

    ids: Tensor
    prompts: Tensor
    old: Scored
    importance: Tensor | None = field(default=None, kw_only=True)
    expert: Tensor | None = field(default=None, kw_only=True)
    greedy: Tensor | None = field(default=None, kw_only=True)
    left_out: Tensor | None = field(default=None, kw_only=True)
    step = 0  # all tokens form one step
    regression_target = None

    def __post_init__(self) -> None:
        assert self.ids.shape == self.old.logp.shape, (self.ids.shape, self.old.logp.shape)
        for part in fields(self):
            value = getattr(self, part.name)
            assert not isinstance(value, Tensor) or len(value) == len(self.ids), (part.name, value.shape)

    @property
    def parent(self) -> Tensor:
        """State that each completion left: its own."""
        return torch.arange(len(self.ids))

    @property
    def not_sampled(self) -> Tensor:
        """True where a completion was not drawn, bool [m] on the CPU: its prompt's answer, or most likely tokens."""
        rows = torch.zeros(len(self.ids), dtype=torch.bool)
        for of in (self.expert, self.greedy):
            rows = rows if of is None else rows | of.cpu()
        return rows

    @property
    def counts(self) -> Tensor:
        """True for completions that the loss trains, bool [m] on the CPU: those with a token that are not left out."""
        some = self.old.mask.any(1).cpu()
        return some if self.left_out is None else some & ~self.left_out.cpu()

    def select(self, keep: Tensor) -> Completions | None:
        """Completions where `keep` (bool [m]) is true; None if there are none."""
        if not keep.any():
            return None
        return self if keep.all() else self.rows(keep)

    def rows(self: C, at: Tensor) -> C:
        """Completions `at` (indices or a mask), with every field of theirs."""
        chosen: dict[str, Any] = {name: value.rows(at) if isinstance(value, Scored) else value[at]
                                  for name, value in vars(self).items() if value is not None}
        return replace(self, **chosen)


@dataclass(frozen=True, eq=False)
class Traces(Completions):
    """Completions that were filled in step by step.

    steps: int64 [m, L], the step at which each token was drawn, from 0.
    """

    steps: Tensor


@dataclass(frozen=True, eq=False)
class Segmented(Completions):
    """Completions in segments.

    segments: int64 [m, L], of each token, from 0.
    values: [m, S], of the state before each segment, NaN if unknown.
    """

    segments: Tensor
    values: Tensor


@dataclass(frozen=True, eq=False)
class GroupStatistics:
    """All samples at one time of a forward process, for a loss that compares those of a group.

    statistic: [m], the compared quantity, without a gradient.
    advantage: [m].
    group: int64 [m], equal for samples of the same prompt.
    """

    statistic: Tensor
    advantage: Tensor
    group: Tensor

    def members(self, rows: Tensor) -> Tensor:
        """Group members of the samples `rows` [b], themselves included: bool [b, m]."""
        return self.group[rows][:, None] == self.group


def unwrap(value: T | None) -> T:
    """Value that only some methods have, where the method has it."""
    assert value is not None, "this part of the method reads what the target does not record"
    return value


@dataclass(frozen=True, eq=False)
class NoisedBatch:
    """Inputs of a forward-process loss: b noised samples at one time.

    time: sigma.
    new, old, reference: Scored [b, 1]; their means, if the loss reads them, are velocities.
    target: [b, *D], the noise less the data.
    rows: int64 [b], the indices of the samples among their `peers`.
    measure: the method's log-ratio of two scores, [b, 1].
    reference and peers are None if the loss does not read them.
    """

    time: float
    new: Scored
    old: Scored
    target: Tensor
    rows: Tensor
    reference: Scored | None = None
    peers: GroupStatistics | None = None
    measure: Callable[[Scored, Scored], Tensor] | None = None

    @property
    def log_ratio(self) -> Tensor:
        """The method's log-ratio to the old policy, [b, 1]."""
        return unwrap(self.measure)(self.new, self.old)


@dataclass(frozen=True, eq=False)
class CompletionBatch:
    """Inputs of a loss that compares completions: b of the m completions of some whole groups.

    new, old, reference: Scored [b, L]; reference is None if the loss does not read it.
    log_ratio: [b, L], the method's.
    rows: int64 [b], their indices among all.
    ids: int64 [m, L], mask: bool [m, L], of all.
    peers: all of them, with the compared statistic [m, ...]; None if the loss compares nothing.
    expert: bool [m], the answers among all that came with their prompts.
    measure: the method's log-ratio of two scores, [b, L].
    progress: share of the run's epochs that are over, 0 in the first and 1 in the last one.
    """

    new: Scored
    old: Scored
    log_ratio: Tensor
    rows: Tensor
    ids: Tensor
    mask: Tensor
    reference: Scored | None = None
    peers: GroupStatistics | None = None
    expert: Tensor | None = None
    measure: Callable[[Scored, Scored], Tensor] | None = None
    progress: float = 0.0


@dataclass(frozen=True, eq=False)
class RunState:
    """Place of an epoch in its run, and what parts keep and report.

    epoch: of the run, from 0.
    epochs: their number in the run.
    memory: the parts' state from epoch to epoch, JSON-able and kept in the checkpoint; each part uses one key.
    metrics: numbers that parts report of the epoch, by names of their own, for its line of metrics.jsonl.
    """

    epoch: int = 0
    epochs: int = 1
    memory: dict[str, Any] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class RewardColumns:
    """The R columns of rewards [P, G, R].

    names: R names.
    weights: R weights (empty: 1 each).
    win_rates: R flags, true for a reward that is already a win rate within its group, as a judge's (empty: none).
    """

    names: Sequence[str] = ()
    weights: Sequence[float] = ()
    win_rates: Sequence[bool] = ()


@dataclass(frozen=True, eq=False)
class PromptGroups:
    """The P groups of an epoch.

    prompts: P texts, one per group.
    metadata: P dictionaries, of the prompts of the groups (empty: none).
    splits: children of a state at each split of the plan's tree, in order (empty: the plan lists no split).
    """

    prompts: Sequence[str] = ()
    metadata: Sequence[dict[str, Any]] = ()
    splits: Sequence[int] = ()


@dataclass(frozen=True, eq=False)
class SampleMeasures:
    """Measurements of the G samples of P groups; None where nothing is measured.

    logp: [P, G], old log-probability, the mean over the trained decisions.
    reference: [P, G], log-probability under the reference, in the unit of logp.
    likelihood: [P, G], of a completion's answer under the reference, in the unit of logp.
    lengths: int64 [P, G], number of trained decisions, for a text its tokens.
    longest: largest possible length.
    entropy: [P, G], mean entropy of a completion's tokens, in nats.
    expert: bool [P, G], true for an answer that came with its prompt.
    penalty: [P, G], subtracted from each reward first.
    predicted: [P, G, K], rewards of the clean predictions before the K trained steps.
    baseline: [P, G], reward of the deterministic sample from the same initial noise.
    """

    logp: Tensor | None = None
    reference: Tensor | None = None
    likelihood: Tensor | None = None
    lengths: Tensor | None = None
    longest: int = 1
    entropy: Tensor | None = None
    expert: Tensor | None = None
    penalty: Tensor | None = None
    predicted: Tensor | None = None
    baseline: Tensor | None = None


@dataclass(frozen=True, eq=False)
class Context:
    """Inputs of a method's parts besides rewards: of the run, of the rewards, of the groups and of their samples."""

    run: RunState = field(default_factory=RunState)
    rewards: RewardColumns = RewardColumns()
    groups: PromptGroups = PromptGroups()
    samples: SampleMeasures = SampleMeasures()

    if not TYPE_CHECKING:
        def __getattr__(self, name: str) -> NoReturn:
            """Raise AttributeError; for a field of one of the four records, its message gives the record."""
            for place, record in _RECORDS.items():
                if name in record.__dataclass_fields__:
                    raise AttributeError(f"Context has no {name!r}: expected context.{place}.{name}")
            raise AttributeError(f"Context has no {name!r}: expected one of {', '.join(_RECORDS)}")


_RECORDS = {"run": RunState, "rewards": RewardColumns, "groups": PromptGroups, "samples": SampleMeasures}
