"""Facts that a reward states about itself, for the table of `flowgrpo rewards` and the checks before a run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from flowgrpo.errors import UserError
from flowgrpo.extras import present

MODALITIES = ("image", "video", "text")


@dataclass(frozen=True)
class About:
    """A reward's facts, its attribute `about`; None where unknown.

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


def about(reward: Any) -> About:
    """Return a reward's facts: all unknown for a plain function without them."""
    facts = getattr(reward, "about", None)
    return facts if isinstance(facts, About) else About()


def require_modality(rewards: dict[str, Any], modality: str) -> None:
    """Raise UserError for the first reward known to judge another modality."""
    for name, reward in rewards.items():
        known = about(reward).modality
        if known is not None and modality not in known.split("/"):
            raise UserError(f"reward {name!r} judges {known}, but what is generated here is {modality}: choose a "
                            f"reward for {modality} (`flowgrpo rewards` lists them)")


def modality_of(outputs: Any) -> str:
    """Return the modality of a batch of outputs: pictures [B,3,H,W], videos [B,F,3,H,W], or texts."""
    return {4: "image", 5: "video"}.get(getattr(outputs, "ndim", None), "text")


TRAINED = "reward.json"  # the file that makes a folder a reward


def differentiable(reward: Any) -> Any:
    """Decorator: mark a reward, a function or a class, as differentiable."""
    reward.differentiable = True
    return reward
