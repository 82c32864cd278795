"""Plan of an evaluation: what it draws, with which medium, and its digest."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flowgrpo.config.schema import Config
from flowgrpo.evaluation.ledger import Ledger

BASE, TUNED = "base", "tuned"


@dataclass(frozen=True)
class Medium:
    """unit: what a sample is called; hand: what draws them, from a plan and a device; apart: from features to what
    tells the distance of a prompt's samples; together: how many are drawn at once where nobody says; modality: as
    rewards call it, None where pictures or clips show it."""

    unit: str
    hand: type
    ledger: type[Ledger]
    apart: Callable[[Any], Callable[[Any], float]]
    together: int
    modality: str | None


@dataclass(frozen=True)
class Plan:
    """What is drawn: a model's samples, those of weights tuned from it, or both; config: of the run that tuned them;
    asked: the arguments of the pipeline's calls, or what a language model's `text` settings are; medium: pictures or
    texts.

    arms: by name the weight with which the tuned model counts, 0 for the base, 1, or one of RLG; rlg: whether such
    weights were asked for: None, one, or "sweep" for several, to which others may be added. precision: None takes the
    run's, or what suits the device.
    """

    model: str
    tuned: Path | None
    arms: dict[str, float]
    rlg: float | str | None
    config: Config | None
    asked: dict[str, Any]
    samples: int
    seed: int
    medium: Medium
    precision: str | None = None

    @property
    def negative(self) -> str:
        return self.config.negative_prompt if self.config else ""

    @property
    def unchanged(self) -> str | None:
        """The arm that draws with the base, the first where there is one."""
        return next((arm for arm, weight in self.arms.items() if weight == 0), None)

    def told(self) -> dict[str, Any]:
        """What the pictures depend on, beside the prompts."""
        return {"model": self.model, "tuned": str(self.tuned) if self.tuned else None, "weights": _digest(self.tuned),
                "samples": self.samples, "seed": self.seed, "call": self.asked, "negative_prompt": self.negative,
                "rlg": self.rlg, **({"precision": self.precision} if self.precision else {})}


def _digest(path: Path | None) -> str | None:
    """What tells weights apart: of all safetensors files at that place."""
    if path is None:
        return None
    files = [path] if path.is_file() else sorted(file for file in path.rglob("*.safetensors")
                                                 if "checkpoints" not in file.relative_to(path).parts)
    return digest([file.read_bytes() for file in files])


def digest(parts: Sequence[str | bytes]) -> str:
    """Sixteen hexadecimal digits that tell contents apart."""
    hashed = hashlib.sha256()
    for part in parts:
        hashed.update(part.encode() if isinstance(part, str) else part)
    return hashed.hexdigest()[:16]
