"""Facts that a reward states before it is called, for the table of `flowgrpo list rewards` and the checks before a run;
the pairs of a judge; and when weights are loaded.
"""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, TypeVar, dataclass_transform

from flowgrpo.packages import present

T = TypeVar("T")

# What a user gives as a reward: called as reward(outputs, prompts, metadata), or as its parameters' names say.
RewardFunction = Callable[..., Any]

MODALITIES = ("image", "video", "text")
SERVER = "server"  # in what a reward needs
TRAINED = "reward.json"  # the file that makes a folder a reward
lazy: ContextVar[bool] = ContextVar("lazy", default=False)  # weights are loaded at the first call


@dataclass(frozen=True)
class About:
    """Facts of a reward, its attribute `about`; None where unknown.

    modality: "image", "video" or "text", several joined by a slash.
    range: lowest and highest score, None for no bound.
    needs: extras of flowgrpo or packages to install, comma-separated, "" for none. SERVER: a service that answers,
    for which there is nothing to install.
    licence: of the code and of the weights that the reward loads.
    Raises ValueError for an unknown modality.
    """

    modality: str | None = None
    range: tuple[float | None, float | None] | None = None
    needs: str | None = None
    licence: str | None = None

    def __post_init__(self) -> None:
        if self.modality is not None and not set(self.modality.split("/")) <= set(MODALITIES):
            raise ValueError(f"modality is {self.modality!r}, expected {', '.join(MODALITIES)}, or several joined by a "
                             "slash")

    @property
    def installed(self) -> bool | None:
        """True if everything that the reward needs is installed, None if unknown; nothing is imported to find out."""
        if self.needs is None:
            return None
        return all(present(name.strip()) for name in self.needs.split(",") if name.strip() not in ("", SERVER))


def differentiable(reward: T) -> T:
    """Decorator: mark a reward, a function or a class, as differentiable."""
    reward.differentiable = True  # type: ignore[attr-defined]  # functions and classes take attributes
    return reward


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def built_in(name: str, found_by: str = "", about: About | None = None, *, eq: bool = True, kw_only: bool = False
             ) -> Callable[[T], T]:
    """Decorator: the name of a reward of the package, for `built_in.json`, which `scripts/docs/build_docs.py` writes,
    and for the messages of a class that has no attribute `reward` of its own. A class becomes a frozen dataclass,
    unless it has an `__init__` of its own.

    found_by: words of users by which `flowgrpo list rewards` finds it, where its first sentence lacks them.
    about: the facts of a function; a class has them as an attribute. eq, kw_only: of the dataclass.
    """
    def named(reward: T) -> T:
        made: Any = reward  # functions and classes take attributes
        if isinstance(made, type) and "__init__" not in vars(made):
            made = dataclass(frozen=True, eq=eq, kw_only=kw_only)(made)
        made.found_by = found_by
        if about is not None:
            made.about = about
        elif "reward" not in vars(made):
            made.reward = name
        return made  # type: ignore[no-any-return]

    return named


@dataclass(frozen=True)
class Pairing:
    """Comparisons within a group.

    both_orders: judge every pair twice, with each of the two first once, and average. This cancels a judge's position
    bias, at twice the calls.
    comparisons: pairs per group. None, or a number of at least all G (G-1) / 2: all; fewer are drawn so that every
    sample is compared equally often.
    seed: of that draw.
    """

    both_orders: bool = False
    comparisons: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if self.comparisons is not None and self.comparisons < 1:
            raise ValueError(f"comparisons is {self.comparisons}, expected 1 or more, or None for all pairs")

    def pairs(self, group: int, prompt: str = "") -> list[tuple[int, int]]:
        """(first, second) of every comparison in a group, a regular tournament that is fixed per prompt.

        The samples are shuffled into a ring. Each meets its nearest neighbours, as first on one side and as second on
        the other, so that position bias harms all equally. Only for an odd number of opponents, one across the ring is
        met in one position.
        Raises ValueError for `comparisons` that are not regular.
        """
        every, unit = group * (group - 1) // 2, group if group % 2 else group // 2
        count = every if self.comparisons is None else min(self.comparisons, every)
        if rest := count % unit:
            nearest = [n for n in (count - rest, count - rest + unit) if n]
            raise ValueError(f"comparisons is {count}, but every sample of a group of {group} is compared equally "
                             f"often: expected {' or '.join(map(str, nearest))}")
        degree = 2 * count // group
        ring = random.Random(f"{self.seed}/{prompt}").sample(range(group), group)
        pairs = [(ring[i], ring[(i + away) % group]) for away in range(1, degree // 2 + 1) for i in range(group)]
        return pairs + [(ring[i], ring[i + group // 2]) for i in range(group // 2 if degree % 2 else 0)]


@contextmanager
def lazily() -> Iterator[None]:
    """Context manager: rewards made inside it load their weights at their first call."""
    token = lazy.set(True)
    try:
        yield
    finally:
        lazy.reset(token)
