"""Extensions: what most runs lack, called at named moments of the training loop.

The trainer knows none of them. A feature (`config.features`) says what turns each one on; one file holds all of it: its
checks, its state in a checkpoint and its metrics.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

from torch import Tensor

from flowgrpo.config.schema import Config
from flowgrpo.methods.setup import Setup
from flowgrpo.samplers.rollout import Part
from flowgrpo.training.epoch import Epoch
from flowgrpo.training.run import Run

if TYPE_CHECKING:
    from flowgrpo.evaluation.measured import Measured

Metrics: TypeAlias = dict[str, Any]
Step: TypeAlias = tuple[list[Part], int]  # parts of one optimizer step, and its decisions on all processes


class Extension:
    """Feature of a run. Its moments, in the order of an epoch; each does nothing unless it is overridden.

    name: its key in a checkpoint.
    judges: names of the values of `judge`, for `eval.best` and `eval.stop`.
    needs: what a run must have, of `methods.capabilities`.

    What may change during a run, such as its rollouts, is read from the trainer when it is needed, and never kept.
    """

    name: ClassVar[str] = ""
    judges: ClassVar[tuple[str, ...]] = ()
    needs: ClassVar[frozenset[str]] = frozenset()
    changes: ClassVar[bool] = False  # its state, before an epoch's first update: the epoch cannot be left then

    @classmethod
    def require(cls, setup: Setup) -> None:
        """Raise UserError for a run that it does not go with."""

    @classmethod
    def require_model(cls, setup: Setup) -> None:
        """Raise UserError for a run whose model it does not go with, as far as `setup.loaded` is known."""

    @classmethod
    def best_by(cls, config: Config) -> str | None:
        """Return the reward by whose best measurement weights are kept for the end, unless `eval.best` names one."""

    @classmethod
    def enabled_by(cls, setup: Setup) -> str:
        """Return how the run asks for it, as a refusal begins; empty: it stays off where it does not go."""
        return f"the extension {cls.__name__} is on"

    @classmethod
    def requirements(cls, setup: Setup) -> frozenset[str]:
        """Return what this run must have: `needs`, where no setting adds to it."""
        return cls.needs

    @classmethod
    def missing(cls, setup: Setup) -> dict[str, str]:
        """Return which capabilities a run with it lacks, each with the reason, as a refusal of another names it."""
        return {}

    @classmethod
    def conflicts(cls, setup: Setup) -> dict[str, bool]:
        """Return what it does not go with besides the lack of what it needs, in words, and whether it applies."""
        return {}

    def __init__(self, trainer: Run):
        self.trainer = trainer

    def around_epoch(self) -> AbstractContextManager[None]:
        """Context manager around an epoch, for settings that hold in it alone."""
        return nullcontext()

    def draw_epoch(self) -> Epoch | None:
        """Return an epoch that is sampled and scored, in place of the trainer's draw; None: the trainer draws."""
        return None

    def on_drawn(self, epoch: Epoch) -> None:
        """Read or replace samples that are scored and not compared yet."""

    def on_credited(self, epoch: Epoch) -> None:
        """Read or replace parts that have advantages, before their first update."""

    def add_steps(self, steps: Iterable[Step]) -> Iterable[Step]:
        """Return the optimizer steps of one pass over an epoch."""
        return steps

    def on_backward(self, update: int) -> None:
        """Add to the gradient of this process's share of an optimizer step."""

    def on_gradients(self, update: int) -> None:
        """Change the gradient of all processes, before the optimizer's step."""

    def on_stepped(self) -> None:
        """Change the weights of the optimizer's step, before their moving average."""

    def on_trained(self, epoch: Epoch) -> Metrics:
        """Return metrics of an epoch whose updates are done."""
        return {}

    def on_base(self, measured: Measured, functions: Mapping[str, Any]) -> None:
        """Read the base's measurement, before the first epoch of a run or of its resumption.

        functions: the measured rewards by name.
        """

    def judge(self, measured: Measured) -> Metrics:
        """Return the values of `judges` for an evaluation on the way: larger is better, NaN is no value."""
        return {}

    def on_measured(self, measured: Measured) -> Metrics:
        """Return metrics of an evaluation on the way, whose weights may be replaced."""
        return {}

    def on_finished(self, measured: Measured) -> None:
        """Read the last measurement of a run, under the weights that it keeps."""

    def summary(self) -> str | None:
        """Return what the run's summary and its report say of it."""

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return (tensors, values) for a checkpoint."""
        return {}, {}

    def load_state(self, tensors: dict[str, Tensor], values: dict[str, Any]) -> None:
        """Restore a checkpoint's state; without any, start anew."""

    def close(self) -> None:
        """End threads, at the end of the run or at an error."""


class Extensions:
    """Extensions of a run, called in the order of `extensions.ORDER`."""

    def __init__(self, present: list[Extension]):
        self.present = present

    @property
    def change(self) -> bool:
        return any(extension.changes for extension in self.present)

    def around_epoch(self) -> ExitStack:
        stack = ExitStack()
        for extension in self.present:
            stack.enter_context(extension.around_epoch())
        return stack

    def draw_epoch(self) -> Epoch | None:
        return next((epoch for extension in self.present if (epoch := extension.draw_epoch()) is not None), None)

    def on_drawn(self, epoch: Epoch) -> None:
        for extension in self.present:
            extension.on_drawn(epoch)

    def on_credited(self, epoch: Epoch) -> None:
        for extension in self.present:
            extension.on_credited(epoch)

    def add_steps(self, steps: Iterable[Step]) -> Iterable[Step]:
        for extension in self.present:
            steps = extension.add_steps(steps)
        return steps

    def on_backward(self, update: int) -> None:
        for extension in self.present:
            extension.on_backward(update)

    def on_gradients(self, update: int) -> None:
        for extension in self.present:
            extension.on_gradients(update)

    def on_stepped(self) -> None:
        for extension in self.present:
            extension.on_stepped()

    def on_trained(self, epoch: Epoch) -> Metrics:
        metrics: Metrics = {}
        for extension in self.present:
            metrics |= extension.on_trained(epoch)
        return metrics

    def on_base(self, measured: Measured, functions: Mapping[str, Any]) -> None:
        for extension in self.present:
            extension.on_base(measured, functions)

    def judge(self, measured: Measured) -> Metrics:
        return {name: value for extension in self.present for name, value in extension.judge(measured).items()}

    def on_measured(self, measured: Measured) -> Metrics:
        metrics: Metrics = {}
        for extension in self.present:
            metrics |= extension.on_measured(measured)
        return metrics

    def on_finished(self, measured: Measured) -> None:
        for extension in self.present:
            extension.on_finished(measured)

    def summary(self) -> list[str]:
        return [said for extension in self.present if (said := extension.summary())]

    def stateful(self) -> dict[str, Any]:
        return {extension.name: extension for extension in self.present if extension.name}

    def close(self) -> None:
        for extension in self.present:
            extension.close()
