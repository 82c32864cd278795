"""Protocols of parts: what stands in each field of a method's groups.

B: rows of a micro-batch; N: decisions of a row, 1 for a denoising step and one per token for a completion; P: prompts;
G: samples per prompt; R: rewards; D: the shape of a latent; T: steps of a rollout.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

from torch import Generator, Tensor

from flowgrpo.config.schema import Config
from flowgrpo.curriculum.epoch_batch import EpochBatch
from flowgrpo.data.prompts import Prompt
from flowgrpo.samplers.plans import Schedule
from flowgrpo.samplers.rollout import RolloutSpec
from flowgrpo.types import Context, Gaussian


@runtime_checkable
class ConfigChecked(Protocol):
    """Part that does not go with every configuration, or not with every kind of model."""

    def require_config(self, config: Config, of_text: bool) -> None:
        """Raise UserError for a configuration that the part does not go with. of_text: of a language model."""


# --- rollouts --------------------------------------------------------------------------------------------------------


class Kernel(Protocol):
    """Transition of a step that draws noise."""

    def __call__(self, x: Tensor, v: Tensor, grid: Tensor, i: int) -> Gaussian:
        """The Gaussian of the state at grid[i+1]. x, v: [B,*D] at grid[i]; grid: [T+1], falling."""


class Plan(Protocol):
    """Choice of the steps that draw noise, split and are trained."""

    def __call__(self, steps: int, epoch: int, seed: int) -> Schedule | tuple[Schedule, ...]:
        """The schedule of an epoch, or several of which every prompt has each. Raises ValueError."""


class Solver(Protocol):
    """Deterministic step."""

    def __call__(self, x: Tensor, v: Tensor, grid: Tensor, i: int, previous: Tensor | None) -> Tensor:
        """The state [B,*D] at grid[i+1]. previous: the data predicted at step i-1, or None."""


class GroupDraw(Protocol):
    """Draw of the completions of a group.

    causal: it needs tokens that are drawn one after the other.
    """

    causal: bool

    @property
    def leaves(self) -> int:
        """The number whose multiple the size of a group is."""

    def __call__(self, policy: Any, tokenized: Any, decoding: Any, generators: Sequence[Generator], greedy: Tensor,
                 group: int, micro_batch: int) -> list[Any]:
        """Completions of the prompts `tokenized`, [B] in whole groups. greedy: bool [B]."""


# --- targets ---------------------------------------------------------------------------------------------------------


class Times(Protocol):
    """Times at which final states are noised."""

    @property
    def shared(self) -> bool:
        """True for one noise for the samples of a group."""

    def __call__(self, grid: Tensor, epoch: int, seed: int) -> Tensor:
        """The falling times [K] of an epoch, in the grid's dtype."""


class Backprop(Protocol):
    """Last steps of a rollout with a graph."""

    def __call__(self, policy: Any, conditioning: Any, x: Tensor, exploration: RolloutSpec, step: int,
                 generators: Sequence[Generator]) -> Tensor:
        """The data [B,*D] that the states x [B,*D] of a step become."""


# --- credit ----------------------------------------------------------------------------------------------------------


class Selection(Protocol):
    """Choice of the samples that are trained."""

    def __call__(self, scores: Tensor, context: Context | None = None) -> Tensor:
        """The mask of the trained samples, bool [P,G]. scores: their advantages [P,G]."""


# --- loss ------------------------------------------------------------------------------------------------------------


class StepWeight(Protocol):
    """Weight of a step of the sigma grid in the loss."""

    def __call__(self, kernel: Callable[[Tensor, Tensor, Tensor, int], Gaussian], grid: Tensor, steps: Sequence[int]
                 ) -> Tensor:
        """The weights [K] of the trained steps, K of them."""


class Reduction(Protocol):
    """Mean over decisions."""

    def __call__(self, mask: Tensor) -> Tensor:
        """The weights [B,N] of decisions. mask: bool [B,N], true where one is trained."""

    def count(self, mask: Tensor) -> int:
        """Number that rows add to the divisor of an optimizer step's loss. mask: as in `__call__`."""


class Reference(Protocol):
    """Policy that the KL holds to."""

    def __call__(self, held: list[dict[str, Tensor]], now: Callable[[], dict[str, Tensor]], epoch: int
                 ) -> list[dict[str, Tensor]]:
        """The snapshots of weights to hold, for the epoch that begins; none: the base model."""


class Rehearsal(Protocol):
    """Divergence from the base model on samples that it drew (`contrib.rehearsal`)."""

    @property
    def weight(self) -> float:
        """The factor of the divergence, above 0."""

    @property
    def least(self) -> float | None:
        """The total reward below which a sample is left out; None: none is."""

    def __call__(self, logp: Tensor, base: Tensor) -> Tensor:
        """The weighted divergence [B, N] of log-probabilities [B, N] of the policy and of the base model."""


# --- prompts ---------------------------------------------------------------------------------------------------------


class Curriculum(Protocol):
    """Choice of an epoch's prompts."""

    def __call__(self, pool: Sequence[Prompt], count: int, epoch: int, seed: int, weights: Sequence[float] | None,
                 memory: dict[str, Any], group: int) -> list[Prompt]:
        """`count` prompts of the pool. weights: their weights, None if all are equal."""

    def learn(self, memory: dict[str, Any], drawn: EpochBatch) -> None:
        """Learn from an epoch's rewards. memory: what a checkpoint keeps."""


class Redraw(Protocol):
    """Choice of the groups that are replaced.

    A part may also have begin(prompts, drawn), which returns the prompts of an epoch's first turn as they are sampled,
    and learn(drawn), called at the end of its sampling.
    """

    def __call__(self, drawn: EpochBatch) -> Sequence[tuple[int | None, Prompt]]:
        """Pairs (index of a group, the prompt that replaces it); of an additional group the index is None."""


class GroupReplay(Protocol):
    """Choice of the recorded groups that are trained again (`contrib.group_replay`)."""

    @property
    def recompose(self) -> bool:
        """True if it trains a part of a group now and the other part later."""

    def choose(self, sizes: Sequence[float], logps: Sequence[float], count: int, seed: Sequence[int]) -> list[int]:
        """The places of `count` groups. sizes: their mean |advantages|; logps: their mean log-probabilities."""
