"""Fields of a method's groups: how a part in each is called.

B: rows of a micro-batch; N: decisions of a row, 1 for a denoising step and one per token for a completion; P: prompts;
G: samples per prompt; R: rewards; D: the shape of a latent; T: steps of a rollout.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeAlias, runtime_checkable

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

# Transition of a step that draws noise, (x, v, grid, i): the Gaussian of the state at grid[i+1]. x, v: [B,*D] at
# grid[i]; grid: [T+1], falling.
Kernel: TypeAlias = Callable[[Tensor, Tensor, Tensor, int], Gaussian]
# Choice of the steps that draw noise, split and are trained, (steps, epoch, seed): the schedule of an epoch, or several
# of which every prompt has each. Raises ValueError.
Plan: TypeAlias = Callable[[int, int, int], Schedule | tuple[Schedule, ...]]
# Deterministic step, (x, v, grid, i, previous): the state [B,*D] at grid[i+1]. previous: the data predicted at step
# i-1, or None.
Solver: TypeAlias = Callable[[Tensor, Tensor, Tensor, int, Tensor | None], Tensor]


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


# Last steps of a rollout with a graph, (policy, conditioning, x, exploration, step, generators): the data [B,*D] that
# the states x [B,*D] of a step become.
Backprop: TypeAlias = Callable[[Any, Any, Tensor, RolloutSpec, int, Sequence[Generator]], Tensor]

# --- credit and loss -------------------------------------------------------------------------------------------------

# Choice of the samples that are trained, (scores, context): their mask, bool [P,G]. scores: their advantages [P,G].
Selection: TypeAlias = Callable[[Tensor, Context], Tensor]
# Weight of a step of the sigma grid in the loss, (kernel, grid, steps): [K], of the K trained steps.
StepWeight: TypeAlias = Callable[[Kernel, Tensor, Sequence[int]], Tensor]
# Policy that the KL holds to, (held, now, epoch): the snapshots of weights to hold, for the epoch that begins; none:
# the base model.
Reference: TypeAlias = Callable[
    [list[dict[str, Tensor]], Callable[[], dict[str, Tensor]], int], list[dict[str, Tensor]]]
# Divergence from the base model on samples that it drew: `contrib.rehearsal.Rehearsal`, of a higher layer.
Rehearsal: TypeAlias = Any


class Reduction(Protocol):
    """Mean over decisions."""

    def __call__(self, mask: Tensor) -> Tensor:
        """The weights [B,N] of decisions. mask: bool [B,N], true where one is trained."""

    def count(self, mask: Tensor) -> int:
        """Number that rows add to the divisor of an optimizer step's loss. mask: as in `__call__`."""


# --- prompts ---------------------------------------------------------------------------------------------------------


class Curriculum(Protocol):
    """Choice of an epoch's prompts."""

    def __call__(self, pool: Sequence[Prompt], count: int, epoch: int, seed: int, weights: Sequence[float] | None,
                 memory: dict[str, Any], group: int) -> list[Prompt]:
        """`count` prompts of the pool. weights: their weights, None if all are equal."""

    def learn(self, memory: dict[str, Any], drawn: EpochBatch) -> None:
        """Learn from an epoch's rewards. memory: what a checkpoint keeps."""


# Choice of the groups that are replaced: pairs (index of a group, the prompt that replaces it); of an additional group
# the index is None. A part may also have begin(prompts, drawn), which returns the prompts of an epoch's first turn as
# they are sampled, and learn(drawn), called at the end of its sampling.
Redraw: TypeAlias = Callable[[EpochBatch], Sequence[tuple[int | None, Prompt]]]
# Choice of the recorded groups that are trained again: `contrib.group_replay.GroupReplay`, of a higher layer.
GroupReplay: TypeAlias = Any
