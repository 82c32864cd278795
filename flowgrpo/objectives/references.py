"""Reference policies of the KL: `reference(held, now, epoch) -> held`.

held: the stored snapshots of trainable weights.
now: a function that takes a snapshot of the present weights, those at the start of the epoch, counted from 0.

The KL of that epoch is to the average of the returned snapshots (`Weights.reference`), or to the base model if there
are none. The trainer asks once per epoch and stores the snapshots in its checkpoints, so a resume is exact bit for bit.
Only trainable weights are ever copied, on the CPU.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

Snapshot = dict[str, Tensor]


@dataclass(frozen=True)
class Base:
    """The base model in every epoch: the adapter is off, or without one the first weights are restored. Copies
    nothing."""

    def __call__(self, held: list[Snapshot], now: Callable[[], Snapshot], epoch: int) -> list[Snapshot]:
        return []


@dataclass(frozen=True)
class EMA:
    """Moving average of the weights, updated at every epoch's start: decay * average + (1 - decay) * weights (the
    moving anchor of WARP, 2406.16768, which updates it with every optimiser step).

    decay 1 stays at the first weights, 0 is PreviousPolicy(1). The factors A and B of a LoRA are averaged separately,
    as `train.ema` does.
    """

    decay: float = 0.99

    def __post_init__(self) -> None:
        if not 0 <= self.decay <= 1:
            raise ValueError(f"EMA: decay is {self.decay}, expected 0 to 1")

    def __call__(self, held: list[Snapshot], now: Callable[[], Snapshot], epoch: int) -> list[Snapshot]:
        if not held:
            return [now()]
        return [{key: held[0][key].lerp(value, 1 - self.decay) for key, value in now().items()}]


@dataclass(frozen=True)
class PreviousPolicy:
    """The policy at the start of the epoch, or with `every` above 1 at the start of the last epoch divisible by it (the
    hard update of TR-DPO, 2404.09656).

    With every 1 the KL limits the step of one epoch; over many epochs the policy may move any distance from the base.
    """

    every: int = 1

    def __post_init__(self) -> None:
        _require("PreviousPolicy", every=self.every)

    def __call__(self, held: list[Snapshot], now: Callable[[], Snapshot], epoch: int) -> list[Snapshot]:
        return [now()] if not held or epoch % self.every == 0 else held


@dataclass(frozen=True)
class WeightAverage:
    """Average of the last `size` snapshots, one at the start of every `every`-th epoch, the first among them (weight
    soup as reference: SALSA, 2411.01798, whose soup is of two models trained independently before).

    For LoRAs the merged weights are averaged, the products B A, not their factors: `Weights.reference`.
    """

    every: int = 10
    size: int = 2

    def __post_init__(self) -> None:
        _require("WeightAverage", every=self.every, size=self.size)

    def __call__(self, held: list[Snapshot], now: Callable[[], Snapshot], epoch: int) -> list[Snapshot]:
        return [*held, now()][-self.size:] if not held or epoch % self.every == 0 else held


@dataclass(frozen=True)
class Teacher:
    """Another language model, frozen, in every epoch: a KL to it with a falling weight is distillation in addition to
    the reward (KDRL, 2506.02208).

    model: a directory or a hub id, loaded once; its tokenizer must equal the policy's. Empty: the base model is the
    teacher.
    """

    model: str = ""

    def __call__(self, held: list[Snapshot], now: Callable[[], Snapshot], epoch: int) -> list[Snapshot]:
        return []


def _require(part: str, **fields: int) -> None:
    for name, value in fields.items():
        if value < 1:
            raise ValueError(f"{part}: {name} is {value}, expected 1 or more")
