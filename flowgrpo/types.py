"""The records that flow between sampling, scoring and training.

Shapes: P prompts, G samples per prompt, B = P*G rows ordered prompt-major, K recorded steps, S token positions,
N decisions per row (K steps, or S-1 tokens), *D the shape of one latent.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import reduce
from itertools import pairwise

import torch
from torch import Tensor


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


@dataclass(frozen=True, eq=False)
class Segment:
    """A contiguous stretch of recorded states.

    states: [B, K+1, *D], as the network saw them; steps: the K consecutive grid indices, states[:, k] being the state
    before step steps[k] and states[:, k+1] the one after it.
    """

    states: Tensor
    steps: tuple[int, ...]

    def __post_init__(self) -> None:
        assert self.states.shape[1] == len(self.steps) + 1, (self.states.shape, self.steps)
        assert all(b == a + 1 for a, b in pairwise(self.steps)), self.steps


@dataclass(frozen=True, eq=False)
class Trajectory:
    """What a rollout recorded: segments in grid order, and the final state [B, *D] that is decoded."""

    segments: tuple[Segment, ...]
    final: Tensor

    def __post_init__(self) -> None:
        assert all(a < b for a, b in pairwise(self.steps)), self.steps

    @property
    def steps(self) -> tuple[int, ...]:
        """The K recorded grid indices, in grid order."""
        return tuple(step for segment in self.segments for step in segment.steps)

    def pairs(self) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Yield (step, x [B, *D], x_next [B, *D]) in grid order; both are views of the recorded states."""
        for segment in self.segments:
            for k, step in enumerate(segment.steps):
                yield step, segment.states[:, k], segment.states[:, k + 1]


@dataclass(frozen=True, eq=False)
class Tokens:
    """Sampled token sequences. ids: int64 [B, S]; mask: bool [B, S-1], true where ids[:, 1:] was a decision."""

    ids: Tensor
    mask: Tensor

    def __post_init__(self) -> None:
        assert self.mask.shape == (self.ids.shape[0], self.ids.shape[1] - 1), (self.ids.shape, self.mask.shape)


@dataclass(frozen=True, eq=False)
class Scored:
    """A policy's score of recorded decisions.

    logp: [B, N]; mask: bool [B, N], true where the decision counts; only where a method reads them, mean [B, N, *D]
    of each transition and std, [N] or [B, N], the deviation of the whole step.
    """

    logp: Tensor
    mask: Tensor
    mean: Tensor | None = None
    std: Tensor | None = None

    def __post_init__(self) -> None:
        assert self.logp.ndim == 2 and self.logp.shape == self.mask.shape, (self.logp.shape, self.mask.shape)
        assert self.mean is None or self.mean.shape[:2] == self.logp.shape, (self.mean.shape, self.logp.shape)


@dataclass(frozen=True, eq=False)
class Rollout:
    """One epoch's samples on one process.

    taken: the decisions; old: their score under the policy that took them; outputs: the B pictures, frames or texts
    that rewards see; group: int64 [B], the prompt each row belongs to.
    """

    taken: Trajectory | Tokens
    old: Scored
    outputs: object
    group: Tensor
