"""Which policy a KL holds the trained one to: `reference(held, now, epoch) -> held`.

held: the snapshots of trainable weights that are kept so far; now() takes one of the present weights, those at the
start of the epoch, counted from 0. The KL of that epoch is to the average of what is returned (`Weights.reference`),
to the base model where it is empty. The trainer asks once per epoch and keeps the snapshots in its checkpoints, which
so resume bit for bit. Only trainable weights are ever copied, on the CPU.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

Snapshot = dict[str, Tensor]


@dataclass(frozen=True)
class Base:
    """The base model in every epoch: the adapter is off, or without one the first weights are back. Copies nothing."""

    def __call__(self, held: list[Snapshot], now: Callable[[], Snapshot], epoch: int) -> list[Snapshot]:
        return []


@dataclass(frozen=True)
class EMA:
    """A moving average of the weights, moved at every epoch's start: decay * average + (1 - decay) * weights (the
    moving anchor of WARP, 2406.16768, which moves it with every optimiser step).

    decay 1 stays at the first weights, 0 is Old(1). Of a LoRA the factors A and B are averaged, each by itself, as
    `train.ema` does.
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
class Old:
    """The policy as it was at the start of the epoch, or with `every` above 1 at the start of the last epoch whose
    number it divides (the hard update of TR-DPO, 2404.09656).

    With every 1 the KL limits the step of one epoch, and the policy may go any way from the base in many.
    """

    every: int = 1

    def __post_init__(self) -> None:
        _require("Old", every=self.every)

    def __call__(self, held: list[Snapshot], now: Callable[[], Snapshot], epoch: int) -> list[Snapshot]:
        return [now()] if not held or epoch % self.every == 0 else held


@dataclass(frozen=True)
class Soup:
    """The average of the last `size` snapshots, one taken at the start of every `every`-th epoch, the first among them
    (weight soup as reference: SALSA, 2411.01798, whose soup is of two models trained independently before).

    Of LoRAs the merged weights are averaged, the products B A, not their factors: `Weights.reference`.
    """

    every: int = 10
    size: int = 2

    def __post_init__(self) -> None:
        _require("Soup", every=self.every, size=self.size)

    def __call__(self, held: list[Snapshot], now: Callable[[], Snapshot], epoch: int) -> list[Snapshot]:
        return [*held, now()][-self.size:] if not held or epoch % self.every == 0 else held


@dataclass(frozen=True)
class Teacher:
    """Another language model, frozen, in every epoch: a KL to it, whose weight falls, is distillation beside the reward
    (KDRL, 2506.02208).

    model: a directory or a hub id; it is loaded once, and reads the policy's tokens: its tokenizer has to be the
    policy's. Without one the base model is its own teacher.
    """

    model: str = ""

    def __call__(self, held: list[Snapshot], now: Callable[[], Snapshot], epoch: int) -> list[Snapshot]:
        return []


def _require(part: str, **fields: int) -> None:
    for name, value in fields.items():
        if value < 1:
            raise ValueError(f"{part}: {name} is {value}, expected 1 or more")
