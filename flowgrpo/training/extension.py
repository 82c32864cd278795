"""Extensions: what most runs lack, called at named moments of the training loop.

The trainer knows none of them. A feature (`config.features`) says what turns each one on; one file holds all of it: its
checks, its state in a checkpoint and its metrics.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Concatenate, ParamSpec, Protocol, TypeAlias

from torch import Tensor

from flowgrpo.config.schema import Config
from flowgrpo.data.prompts import Prompt
from flowgrpo.distributed.signals import Stop
from flowgrpo.evaluation.measured import Measured
from flowgrpo.evaluation.trainer import Trainer
from flowgrpo.log import PhaseTimer
from flowgrpo.methods.method import Method
from flowgrpo.methods.setup import Setup
from flowgrpo.objectives.reductions import Divisor
from flowgrpo.rollouts.base import GroupSampler
from flowgrpo.samplers.rollout import Part
from flowgrpo.training.epoch import Epoch
from flowgrpo.training.first_ratio import FirstRatio
from flowgrpo.training.kl_reference import KLReference
from flowgrpo.training.optimizer import Optimization
from flowgrpo.training.progress import Progress
from flowgrpo.training.scoring import Scoring

if TYPE_CHECKING:
    from accelerate import Accelerator

P = ParamSpec("P")

Metrics: TypeAlias = dict[str, Any]
Step: TypeAlias = tuple[list[Part], Divisor]  # parts of one optimizer step, and the divisor over all processes


class Run(Trainer, Protocol):
    """Attributes of a `train.Trainer`, which says what each is, those that evaluation reads with them.

    A phase replaces config, geometry, rollouts, prompts and method, so that they are read when they are needed.
    """

    accelerator: Accelerator
    prompts: list[Prompt]
    method: Method
    memory: dict[str, Any]
    scoring: Scoring
    clock: PhaseTimer
    stop: Stop
    log: Callable[[str], None]
    rollouts: GroupSampler[Any]
    optimization: Optimization
    kl_reference: KLReference
    first_ratio: FirstRatio
    progress: Progress
    extensions: Extensions

    def run_epoch(self) -> dict[str, Any]:
        """Run one epoch; return its metrics."""


class Extension:
    """Feature of a run. Its moments, in the order of an epoch; each does nothing unless it is overridden.

    name: its key in a checkpoint.
    judges: names of the values of `judge`, for `eval.best` and `eval.stop`.
    needs: what a run must have, of `methods.capabilities`; lacks: what a run with it lacks, with the reasons.
    asked_by: the setting that asks for it, with the setup as {0}, as a refusal begins.

    What may change during a run, such as its rollouts, is read from the trainer when it is needed, and never kept.
    """

    name: ClassVar[str] = ""
    judges: ClassVar[tuple[str, ...]] = ()
    needs: ClassVar[frozenset[str]] = frozenset()
    lacks: ClassVar[dict[str, str]] = {}
    asked_by: ClassVar[str] = ""
    changes: ClassVar[bool] = False  # its state, before an epoch's first update: the epoch cannot be left then
    seconds_left: Callable[[], float | None] | None = None  # of a run that ends by the clock, and not by its epochs

    @classmethod
    def require(cls, setup: Setup) -> None:
        """Raise UserError for a run that it does not go with."""

    @classmethod
    def require_model(cls, setup: Setup) -> None:
        """Raise UserError for a run whose model it does not go with, as far as `setup.loaded` is known."""

    @classmethod
    def best_by(cls, config: Config) -> str | None:
        """The reward by whose best measurement weights are kept for the end, unless `eval.best` names one."""

    @classmethod
    def chooses(cls, config: Config) -> bool:
        """True if evaluations on the way decide which weights the run ends with."""
        return cls.best_by(config) is not None

    @classmethod
    def enabled_by(cls, setup: Setup) -> str:
        """First words of a refusal: the setting that asks for it. Empty: it stays off where it does not go."""
        return cls.asked_by.format(setup) or f"the extension {cls.__name__} is on"

    @classmethod
    def requirements(cls, setup: Setup) -> frozenset[str]:
        """Capabilities that this run must have: `needs`, if no setting adds to it."""
        return cls.needs

    @classmethod
    def missing(cls, setup: Setup) -> dict[str, str]:
        """Which capabilities a run with it lacks, each with the reason, as a refusal of another names it."""
        return cls.lacks

    @classmethod
    def conflicts(cls, setup: Setup) -> dict[str, bool]:
        """Reasons for a refusal besides a lack of what it needs, in words; True for each that applies."""
        return {}

    def __init__(self, trainer: Run):
        self.trainer = trainer

    def around_epoch(self) -> AbstractContextManager[None]:
        """Context manager around an epoch, for settings that hold in it alone."""
        return nullcontext()

    def draw_epoch(self) -> Epoch | None:
        """An epoch that is sampled and scored, in place of the trainer's draw; None: the trainer draws."""
        return None

    def on_drawn(self, epoch: Epoch) -> None:
        """Read or replace samples that are scored and not compared yet."""

    def on_credited(self, epoch: Epoch) -> None:
        """Read or replace parts that have advantages, before their first update."""

    def add_steps(self, steps: Iterable[Step]) -> Iterable[Step]:
        """The optimizer steps of one pass over an epoch."""
        return steps

    def on_backward(self, update: int) -> None:
        """Add to the gradient of this process's share of an optimizer step."""

    def on_gradients(self, update: int) -> None:
        """Change the gradient of all processes, before the optimizer's step."""

    def on_stepped(self) -> None:
        """Change the weights of the optimizer's step, before their moving average."""

    def on_trained(self, epoch: Epoch) -> Metrics:
        """Metrics of an epoch whose updates are done."""
        return {}

    def whole_run(self, run: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """The summary of `run()`; of a process that trains nothing, that of another one."""
        return run()

    def on_base(self, measured: Measured, functions: Mapping[str, Any]) -> None:
        """Read the base's measurement, before the first epoch of a run or of its resumption.
        functions: the measured rewards by name."""

    def judge(self, measured: Measured) -> Metrics:
        """The values of `judges` for an evaluation on the way: larger is better, NaN is no value."""
        return {}

    def on_measured(self, measured: Measured) -> Metrics:
        """Metrics of an evaluation on the way, whose weights may be replaced."""
        return {}

    def on_finished(self, measured: Measured) -> None:
        """Read the last measurement of a run, under the weights that it keeps."""

    def summary(self) -> str | None:
        """Sentence in the run's summary and report; None for none."""

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """(tensors, values) for a checkpoint."""
        return {}, {}

    def load_state(self, tensors: dict[str, Tensor], values: dict[str, Any]) -> None:
        """Restore a checkpoint's state; without any, start anew."""

    def close(self) -> None:
        """End threads, at the end of the run or at an error."""


def _in_turn(moment: Callable[Concatenate[Extension, P], None]) -> Callable[Concatenate[Extensions, P], None]:
    """That moment of all extensions, one after the other."""
    def call(self: Extensions, *given: P.args, **named: P.kwargs) -> None:
        for extension in self.present:
            getattr(extension, moment.__name__)(*given, **named)

    return call


def _joined(moment: Callable[Concatenate[Extension, P], Metrics]) -> Callable[Concatenate[Extensions, P], Metrics]:
    """Metrics of that moment of all extensions, in one dictionary."""
    def call(self: Extensions, *given: P.args, **named: P.kwargs) -> Metrics:
        return {name: value for extension in self.present
                for name, value in getattr(extension, moment.__name__)(*given, **named).items()}

    return call


class Extensions:
    """Extensions of a run, called in the order of `extensions.ORDER`."""

    def __init__(self, present: list[Extension]):
        self.present = present

    @property
    def change(self) -> bool:
        return any(extension.changes for extension in self.present)

    @property
    def add_gradients(self) -> bool:
        return any(type(extension).on_backward is not Extension.on_backward for extension in self.present)

    @property
    def seconds_left(self) -> Callable[[], float | None] | None:
        """The function by which an extension tells the seconds that the run may still take; None if none does."""
        return next((extension.seconds_left for extension in self.present if extension.seconds_left), None)

    def around_epoch(self) -> ExitStack:
        stack = ExitStack()
        for extension in self.present:
            stack.enter_context(extension.around_epoch())
        return stack

    def draw_epoch(self) -> Epoch | None:
        return next((epoch for extension in self.present if (epoch := extension.draw_epoch()) is not None), None)

    on_drawn = _in_turn(Extension.on_drawn)
    on_credited = _in_turn(Extension.on_credited)

    def add_steps(self, steps: Iterable[Step]) -> Iterable[Step]:
        for extension in self.present:
            steps = extension.add_steps(steps)
        return steps

    on_backward = _in_turn(Extension.on_backward)
    on_gradients = _in_turn(Extension.on_gradients)
    on_stepped = _in_turn(Extension.on_stepped)
    on_trained = _joined(Extension.on_trained)

    def whole_run(self, run: Callable[[], dict[str, Any]]) -> Callable[[], dict[str, Any]]:
        """The run inside the `whole_run` of each extension that has its own."""
        for extension in self.present:
            if type(extension).whole_run is not Extension.whole_run:
                run = partial(extension.whole_run, run)
        return run

    on_base = _in_turn(Extension.on_base)
    judge = _joined(Extension.judge)
    on_measured = _joined(Extension.on_measured)
    on_finished = _in_turn(Extension.on_finished)

    def summary(self) -> list[str]:
        return [said for extension in self.present if (said := extension.summary())]

    def stateful(self) -> dict[str, Any]:
        return {extension.name: extension for extension in self.present if extension.name}

    close = _in_turn(Extension.close)
