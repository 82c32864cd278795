"""Setup of a run: what all of its checks read."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import torch

from flowgrpo.config.geometry import BatchShape, geometry
from flowgrpo.config.schema import Config
from flowgrpo.data.prompts import Prompt
from flowgrpo.errors import UserError
from flowgrpo.methods.method import Method


@dataclass(frozen=True, eq=False)
class Setup:
    """Facts of a run. A check is a function of them that raises UserError; what is not known yet is empty.

    kind: of the model, as in `policies.build`.
    where: said before a key of the configuration, such as "phases[0].set: ".
    loaded: the pipeline, or the language model with its tokenizer or processor; None if it is not loaded yet.
    processes: of the run, a team of memory.context_parallel counts as one; all_processes: every one.
    first: this is the first of them. resumes: the run goes on from a checkpoint.
    trained, extra_rewards: rewards by name, as the recipe has them; measured: those on held-out prompts. judged: names
    of further values by which weights can be chosen.
    split: training and held-out prompts.
    """

    config: Config
    kind: str
    method: Method
    where: str = ""
    loaded: Any = None
    device: str | torch.device = "cpu"
    processes: int = 1
    all_processes: int = 1
    first: bool = True
    resumes: bool = False
    trained: dict[str, Any] = field(default_factory=dict)
    extra_rewards: dict[str, Any] = field(default_factory=dict)
    measured: dict[str, Any] = field(default_factory=dict)
    judged: Sequence[str] = ()
    split: tuple[list[Prompt], list[Prompt]] = ([], [])

    @property
    def shape(self) -> BatchShape:
        """The batch of a process. Raises UserError if the processes cannot share it."""
        return geometry(self.config.train, self.processes)

    @property
    def prompts(self) -> list[Prompt]:
        return [*self.split[0], *self.split[1]]


@runtime_checkable
class Checked(Protocol):
    """Part of a method that states what it does not go with."""

    def check(self, setup: Setup) -> None:
        """Raise UserError for a run that the part does not go with."""


def check_parts(setup: Setup) -> None:
    """Raise UserError for a part that does not go with the run."""
    for part in setup.method.parts().values():
        if isinstance(part, Checked):
            part.check(setup)


def require_compatible(setting: str, conflicts: Mapping[str, object], otherwise: str = "") -> None:
    """Raise UserError for the first option that conflicts with a setting.
    conflicts: by an option and its cure, in words, True if it conflicts. otherwise: the end of the message."""
    for option in (option for option, conflict in conflicts.items() if conflict):
        raise UserError(f"{setting}, which does not go with {option}{otherwise}")
