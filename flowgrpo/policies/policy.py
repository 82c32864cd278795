"""Protocol of policies: what training, rollouts and evaluation read of a pipeline or of a language model."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import torch
from torch import Generator, Tensor

from flowgrpo.distributed.lockstep import Lockstep
from flowgrpo.policies.weights.trainable import TrainableWeights


class Policy(Protocol):
    """Model whose samples have log-probabilities, and its trained weights.

    weights: the trained weights. device: of its forwards; states: of recorded states.
    process: "flow", "vp", "tokens" or "masks". modality: "image", "video" or "text". unit: what `evaluations` counts.
    exact: the largest |log ratio| that rounding explains in fp32; None in half precision.
    evaluations: rows through a denoiser, or tokens through a language model, so far.
    """

    weights: TrainableWeights
    device: torch.device
    states: torch.device
    process: str
    modality: str
    unit: str
    exact: float | None
    evaluations: int

    @property
    def fps(self) -> float | None:
        """Return the frames per second of clips; None for others."""

    @property
    def turns(self) -> Lockstep | None:
        """Return the steps in which processes meet if weights are sharded; None: they are not."""

    def backward(self, loss: Tensor) -> None:
        """Add the gradient of a loss, 0-d."""

    def reference(self, held: Sequence[dict[str, Tensor]] = ()) -> AbstractContextManager[None]:
        """Return a context in which forwards are those of snapshots, averaged, or of the base model without any."""

    def generators(self, seeds: Iterable[int]) -> list[Generator]:
        """Return a generator per seed, on the device on which noise is drawn."""
