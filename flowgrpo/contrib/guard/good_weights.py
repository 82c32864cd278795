"""Copies of what a run trains, in host memory: weights, optimizer state, moving average, old policy and reference."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from flowgrpo.storage import checkpoint
from flowgrpo.storage.checkpoint import Stateful, Tensors
from flowgrpo.training.run import Run
from flowgrpo.training.stored_parts import within


@dataclass(frozen=True)
class Good:
    """Weights after `epoch` epochs, with all that belongs to them, by the names of a checkpoint."""

    epoch: int
    tensors: Tensors


def followers(run: Run) -> Iterator[tuple[str, Stateful]]:
    """Yield the parts of a run that hold earlier weights."""
    yield "old", run.rollouts.old_policy
    yield "reference", run.kl_reference


def copied(run: Run) -> Good:
    """Return a copy of what the run trains."""
    tensors: Tensors = {f"weights/{key}": value for key, value in run.policy.weights.named.items()}
    tensors |= {f"ema/{key}": value for key, value in (run.optimization.ema or {}).items()}
    tensors |= {f"optimizer/{key}": value
                for key, value in checkpoint.optimizer_tensors(run.optimization.optimizer).items()}
    tensors |= {f"{name}/{key}": value for name, part in followers(run) for key, value in part.state()[0].items()}
    return Good(run.epoch, {key: value.detach().to("cpu", copy=True) for key, value in tensors.items()})


@torch.no_grad()
def restore(run: Run, good: Good) -> None:
    """Give the run what was copied, bit by bit."""
    optimization, weights = run.optimization, run.policy.weights
    weights.load(within(good.tensors, "weights/"))
    own = {key: value.clone() for key, value in within(good.tensors, "optimizer/").items()}  # the optimizer keeps them
    checkpoint.load_optimizer(optimization.optimizer, own)
    if optimization.ema is not None:
        for key, value in within(good.tensors, "ema/").items():
            optimization.ema[key].copy_(value)
    for name, part in followers(run):
        held = {key: value.clone() for key, value in within(good.tensors, f"{name}/").items()}
        part.load_state(held, {"epoch": run.epoch} | part.state()[1])
