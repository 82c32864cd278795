"""Facts that a reward states about itself, for the table of `flowgrpo list rewards` and the checks before a run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from flowgrpo.packages import present

T = TypeVar("T")

# What a user gives as a reward: called as reward(outputs, prompts, metadata), or as its parameters' names say.
RewardFunction = Callable[..., Any]

MODALITIES = ("image", "video", "text")


@dataclass(frozen=True)
class About:
    """Facts of a reward, its attribute `about`; None where unknown.

    modality: "image", "video" or "text", several joined by a slash.
    range: lowest and highest score, None for no bound.
    needs: extras of flowgrpo or packages to install, comma-separated, "" for none.
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
        return all(present(name.strip()) for name in self.needs.split(",") if name.strip())


TRAINED = "reward.json"  # the file that makes a folder a reward


def differentiable(reward: T) -> T:
    """Decorator: mark a reward, a function or a class, as differentiable."""
    reward.differentiable = True  # type: ignore[attr-defined]  # functions and classes take attributes
    return reward


def described(facts: About) -> Callable[[T], T]:
    """Decorator: state the facts of a reward, a function."""
    def describe(reward: T) -> T:
        reward.about = facts  # type: ignore[attr-defined]  # functions take attributes
        return reward

    return describe
