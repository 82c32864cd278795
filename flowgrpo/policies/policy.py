"""Protocol of policies: what training, rollouts and evaluation read of a pipeline or of a language model; and the
precision of a run whose configuration says `auto`.
"""

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Generator, Tensor

from flowgrpo.config.schema import Config
from flowgrpo.device import AUTO, DTYPES, choose
from flowgrpo.distributed.shards import Lockstep
from flowgrpo.policies.weights.trainable import TrainableWeights


class Policy(Protocol):
    """Model whose samples have log-probabilities, and its trained weights.

    weights: the trained weights. device: of its forwards; states: of recorded states.
    process: "flow", "vp", "tokens" or "masks". modality: "image", "video" or "text". unit: what `evaluations` counts.
    exact: the largest |log ratio| that rounding explains in fp32; None in half precision.
    evaluations: rows through a denoiser, or tokens through a language model, so far.
    fps: frames per second of clips; None for others. turns: the steps in which processes meet if weights are sharded.
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
    def fps(self) -> float | None: ...

    @property
    def turns(self) -> Lockstep | None: ...

    def backward(self, loss: Tensor) -> None:
        """Add the gradient of a loss, 0-d."""

    def reference(self, held: Sequence[dict[str, Tensor]] = ()) -> AbstractContextManager[None]:
        """Context in which forwards are those of snapshots, averaged, or of the base model without any."""

    def generators(self, seeds: Iterable[int]) -> list[Generator]:
        """Generator per seed, on the device on which noise is drawn."""


def resolve_precision(config: Config, device: str | torch.device, loaded: Any = None, begun: str | None = None
           ) -> tuple[Config, str]:
    """Configuration with a precision in place of `auto`, and that precision in words, with the reason. loaded: a
    pipeline, or the tuple of a language model, which keeps its own; begun: that of a resumed run, which it keeps."""
    if config.precision != AUTO:
        return config, config.precision
    chosen, reason = choose(device)
    present = None
    if loaded is not None:  # None for a dtype that is no precision of a configuration
        from flowgrpo.policies.pipelines.load import denoisers

        modules = [loaded[0]] if isinstance(loaded, tuple) else list(denoisers(loaded).values())
        present = next((name for name, dtype in DTYPES.items() if modules and modules[0].dtype == dtype), None)
    if present is not None:
        chosen, reason = present, "that of the loaded model"
    elif begun is not None:
        here = "" if begun == chosen else f"; a new run would take {chosen} here: {reason}"
        chosen, reason = begun, f"as the run began{here}"
    return config.model_copy(update={"precision": chosen}), f"{chosen} (auto: {reason})"
