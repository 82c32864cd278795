"""Facts that a reward states about itself, for the table of `flowgrpo rewards` and the checks before a run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from flowgrpo.errors import UserError
from flowgrpo.packages import present

T = TypeVar("T")

# Called as reward(outputs, prompts, metadata), or as its attributes say; `score` checks what it returns.
Reward = Callable[..., Any]

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


def about(reward: object) -> About:
    """Return a reward's facts: all unknown for a plain function without them."""
    facts = getattr(reward, "about", None)
    return facts if isinstance(facts, About) else About()


def require_modality(rewards: Mapping[str, object], modality: str) -> None:
    """Raise UserError for the first reward known to judge another modality."""
    for name, reward in rewards.items():
        known = about(reward).modality
        if known is not None and modality not in known.split("/"):
            raise UserError(f"reward {name!r} judges {known}, but what is generated here is {modality}: choose a "
                            f"reward for {modality} (`flowgrpo rewards` lists them)")


def privileged(reward: object) -> bool:
    """True if a reward, or a part of it, may do more for a request than score it: run code, read files, use a key.

    Built-in rewards say so by the attribute `privileged`; any code from elsewhere may.
    """
    if isinstance(reward, str):
        return ".py:" in reward
    module = getattr(reward, "__module__", None) or type(reward).__module__
    return (not module.startswith("flowgrpo.") or getattr(reward, "privileged", False) is True
            or any(map(privileged, getattr(reward, "made_of", ()))))


def scores_latents(reward: object) -> bool:
    """True if a reward, or one with its rule, scores clean latents (its attribute `scores`), which are not decoded."""
    return getattr(reward, "scores", None) == "latents"


def require_latents(rewards: Mapping[str, object], modality: str) -> None:
    """Raise UserError for the first reward that scores latents in a text run, which has none."""
    for name, reward in rewards.items():
        if modality == "text" and scores_latents(reward):
            raise UserError(f"reward {name!r} scores latents (scores = 'latents'), and this model writes texts: take "
                            "`scores` away")


def modality_of(outputs: object) -> str:
    """Return the modality of a batch of outputs: pictures [B,3,H,W], videos [B,F,3,H,W], or texts."""
    by_dimensions: dict[int | None, str] = {4: "image", 5: "video"}
    return by_dimensions.get(getattr(outputs, "ndim", None), "text")


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
