"""Plan of an evaluation: its model, medium and digest."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from flowgrpo.config.schema import Config
from flowgrpo.config.sections import Load
from flowgrpo.data.prompts import Prompt
from flowgrpo.evaluation.ledger import BaseLedger, Place
from flowgrpo.evaluation.picture_files import weight_files
from flowgrpo.policies.pipelines.load import rate_ahead

BASE, TUNED = "base", "tuned"


@dataclass(frozen=True)
class Arm:
    """Weights to sample from, and the settings of a call.

    weights: a run's folder, one of its checkpoints, a LoRA, or None for the base.
    asked: arguments of a pipeline's call, or a language model's `text` settings.
    rlg: draw with base + rlg * (tuned - base); None: with the weights.
    """

    weights: Path | None
    asked: dict[str, Any]
    rlg: float | None = None


class BestOf(Protocol):
    """Choice of one of several draws (`best_of.BestOf`)."""

    def over(self, hand: Hand) -> Hand:
        """Return a generator whose samples are the best of several of another one's."""

    def as_json(self) -> dict[str, Any]:
        """Return how samples are chosen."""


class Enhancer(Protocol):
    """Rewriter of prompts (`enhancer.Enhancer`)."""

    def __call__(self, prompts: Sequence[Prompt]) -> list[Prompt]:
        """Return the prompts with rewritten texts."""

    def as_json(self) -> dict[str, Any]:
        """Return how prompts are rewritten."""


class Hand(Protocol):
    """Generator of an evaluation's samples. fps: frames per second of clips; None for others."""

    @property
    def fps(self) -> float | None: ...

    def draw(self, arm: str, prompts: Sequence[Prompt], places: Sequence[Place]) -> Sequence[Any]:
        """Return a sample per place."""

    def facts(self, arm: str, prompt: Prompt, place: Place, sample: Any) -> str | None:
        """Return how a sample was drawn, None where that is not stored."""


@dataclass(frozen=True)
class Medium:
    """Kind of sample.

    unit: name of a sample.
    hand: makes the generator from a plan and a device.
    apart: makes the distance of a prompt's samples from features.
    together: default number of samples per call.
    modality: as in rewards; None if the samples show it (pictures or clips).
    """

    unit: str
    hand: Callable[[Plan, torch.device], Hand]
    ledger: type[BaseLedger]
    apart: Callable[[Any], Callable[[Any], float]]
    together: int
    modality: str | None


@dataclass(frozen=True)
class Plan:
    """Models to sample (the base, weights tuned from it, or both), and settings.

    config: of the run that tuned the weights.
    asked: arguments of the pipeline's calls, or a language model's `text` settings.
    medium: pictures or texts.
    arms: weight of the tuned model by arm: 0 for the base, 1, or an RLG weight.
    rlg: requested RLG weights: None, one, or "sweep" for several, to which others may be added.
    precision: None takes the run's, or the device's default.
    best: how each sample is chosen among several draws; None: it is drawn once.
    enhancer: rewrites the prompts that pictures are drawn from; rewards and pages read the user's.
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
    best: BestOf | None = None
    enhancer: Enhancer | None = None

    def drawer(self, device: torch.device) -> Hand:
        """Return what makes the samples."""
        hand = self.medium.hand(self, device)
        return hand if self.best is None else self.best.over(hand)

    def arm(self, name: str) -> Arm:
        """Return the arm of that name. With RLG all arms but the base are blends of one loaded pair."""
        weight = self.arms[name]
        return Arm(self.tuned if weight else None, self.asked) if self.rlg is None else Arm(
            self.tuned, self.asked, weight)

    @property
    def negative(self) -> str:
        return self.config.negative_prompt if self.config else ""

    @functools.cached_property
    def fps(self) -> float | None:
        """Return the frames per second of clips; None for completions."""
        if self.medium.modality == "text":
            return None
        files = self.config.load if self.config is not None and self.config.model == self.model else Load()
        return rate_ahead(self.model, files, self.asked, self.asked.get("fps"))

    @property
    def unchanged(self) -> str | None:
        """Return the first arm that draws with the base, if any."""
        return next((arm for arm, weight in self.arms.items() if weight == 0), None)

    def as_json(self) -> dict[str, Any]:
        """Return the settings that the pictures depend on, besides the prompts."""
        return {"model": self.model, "tuned": str(self.tuned) if self.tuned else None,
                "weights": weights_digest(self.tuned),
                "samples": self.samples, "seed": self.seed, "call": self.asked, "negative_prompt": self.negative,
                "rlg": self.rlg, **({"precision": self.precision} if self.precision else {}),
                **(self.best.as_json() if self.best else {}), **(self.enhancer.as_json() if self.enhancer else {})}


def weights_digest(path: Path | None) -> str | None:
    """Return a digest of the weights of a run, a checkpoint or a LoRA; exports beside them do not change it."""
    return None if path is None else digest([file.read_bytes() for _, file in weight_files(path)])


def digest(parts: Sequence[str | bytes]) -> str:
    """Return sixteen hexadecimal digits that identify contents."""
    hashed = hashlib.sha256()
    for part in parts:
        hashed.update(part.encode() if isinstance(part, str) else part)
    return hashed.hexdigest()[:16]
