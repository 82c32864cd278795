"""Protocols of policies and encoded prompts: what samplers read of a pipeline."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeVar

import torch
from torch import Generator, Tensor

from flowgrpo.samplers.scheduler import Segment, StepRecord


class EncodedPrompts(Protocol):
    """Prompts as a pipeline reads them."""

    @property
    def prompts(self) -> Sequence[str]:
        """Return the texts, one per row."""

    def rows(self: E, index: Tensor) -> E:
        """Return the rows `index` (int64 [B]); a row may be taken several times."""


E = TypeVar("E", bound=EncodedPrompts)
C = TypeVar("C", bound=EncodedPrompts, contravariant=True)


class Replayer(Protocol[C]):
    """Model whose transitions can be scored again.

    device: of its forwards. states: of recorded states.
    """

    @property
    def device(self) -> torch.device: ...

    @property
    def states(self) -> torch.device: ...

    def replay(self, conditioning: C, x: Tensor, grid: Tensor, step: int | Tensor, timesteps: Tensor | None = None
               ) -> Tensor:
        """Return the model output [B,*D] at one step, or at a step per row, with gradients where enabled."""


class Denoiser(Replayer[C], Protocol[C]):
    """Policy that samples by segments of a noise grid."""

    def generators(self, seeds: Iterable[int]) -> list[Generator]:
        """Return a generator per seed, on the device on which noise is drawn."""

    def sampling(self) -> AbstractContextManager[Any]:
        """Return the grad mode of rollouts."""

    def reference(self, held: Sequence[dict[str, Tensor]] = ()) -> AbstractContextManager[None]:
        """Return a context in which forwards are those of snapshots, averaged, or of the base model without any."""

    def run(self, task: Segment, conditioning: C, latents: Tensor | None, generators: list[Generator],
            x0: Tensor | None = None) -> tuple[Tensor, StepRecord]:
        """Run a segment of the grid: the last state [B,*D] and the record of the task."""

    def unroll(self, task: Segment, conditioning: C, latents: Tensor, checkpointing: bool = False) -> Tensor:
        """Return the last state [B,*D] of a segment, in one graph of all its steps."""

    def picture(self, latents: Tensor, conditioning: C) -> Tensor:
        """Return the decoded pictures [B,...] in [0, 1], with gradients where enabled."""
