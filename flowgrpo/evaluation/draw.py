"""Generators of an evaluation, for images and for texts: sample, store, and measure the distance of samples.

Only this file separates the two; `evaluate` handles both alike.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from flowgrpo.config.schema import Config
from flowgrpo.data.prompts import Prompt
from flowgrpo.device import drawing
from flowgrpo.errors import UserError
from flowgrpo.evaluation import image_files
from flowgrpo.evaluation.plan import Ledger, Medium, Place, TextLedger
from flowgrpo.evaluation.samplers import Pipelines, Texts
from flowgrpo.policies import loading
from flowgrpo.rewards import guards
from flowgrpo.samplers.rollout import seeder
from flowgrpo.version import __version__

if TYPE_CHECKING:
    from flowgrpo.evaluation.plan import Plan


class Painter:
    """Draw with a pipeline. The base is drawn before the tuned model, so that it is loaded once."""

    def __init__(self, plan: Plan, device: torch.device):
        config = plan.config or Config()
        self.plan, self.seed_of = plan, seeder(plan.seed, 0)
        self.sampler = Pipelines(plan.model, config, drawing(config.precision, device, plan.precision), device)
        self.settings: dict[str, dict[str, Any]] = {}

    def draw(self, arm: str, prompts: Sequence[Prompt], places: Sequence[Place]) -> list[torch.Tensor]:
        """Draw images [3, H, W] or clips [F, 3, H, W] in [0, 1]."""
        if self.sampler.pipe is None:
            self.require_fit()
        seeds = [self.seed_of(place.prompt, place.sample) for place in places]
        return self.sampler.draw(self.plan.arm(arm), self._rewrite(prompts), seeds)

    def require_fit(self) -> None:
        """Raise UserError if the tuned weights do not fit the model, by the headers of their files."""
        if self.plan.tuned is not None:
            loading.require_fit(self.plan.model, self.plan.tuned, loading.files_of(self.plan.config, self.plan.model))

    def facts(self, arm: str, prompt: Prompt, place: Place, sample: torch.Tensor) -> str:
        """Generation settings of an image, as AUTOMATIC1111 and ComfyUI read them."""
        plan, weight = self.plan, self.plan.arms[arm]
        if arm not in self.settings:
            tuned = plan.tuned if weight else None
            self.settings[arm] = image_files.settings(self.sampler.pipe, plan.model, plan.asked, tuned,
                                                        None if weight in (0, 1) else weight)
        negative = plan.negative if prompt.negative is None else prompt.negative
        [written] = self._rewrite([prompt])
        return image_files.parameters(written.text, self.seed_of(place.prompt, place.sample), sample,
                                        self.settings[arm], negative)

    def _rewrite(self, prompts: Sequence[Prompt]) -> Sequence[Prompt]:
        return self.plan.enhancer(prompts) if self.plan.enhancer else prompts


class Writer:
    """Write with a language model, or draw with one that has an image head."""

    def __init__(self, plan: Plan, device: torch.device):
        self.plan, self.seed_of = plan, seeder(plan.seed, 0)
        self.sampler = Texts(plan.model, plan.config, plan.precision, device)

    def draw(self, arm: str, prompts: Sequence[Prompt], places: Sequence[Place]) -> list[Any]:
        """A completion, or an image [3, H, W] in [0, 1], per place, from the seed of its place alone."""
        return self.sampler.draw(self.plan.arm(arm), prompts,
                                 [self.seed_of(place.prompt, place.sample) for place in places])

    def facts(self, arm: str, prompt: Prompt, place: Place, sample: Any) -> str | None:
        plan = self.plan
        if plan.medium.modality == "text":  # stores no settings
            return None
        settings = {"Temperature": plan.asked["eval_temperature"], "CFG scale": plan.asked["guidance"],
                    "Model": Path(plan.model).name,
                    "Lora hashes": image_files.lora_hashes(plan.tuned if plan.arms[arm] else None),
                    "Version": f"flowgrpo {__version__}"}
        return image_files.parameters(prompt.text, self.seed_of(place.prompt, place.sample), sample, settings)


def text_distance(samples: Sequence[str]) -> float:
    """Mean distance between texts of a prompt, 0 to 1: 1 minus the Jaccard similarity of their word bigrams."""
    pairs = [set(itertools.pairwise(["", *text.split(), ""])) for text in samples]
    apart = [1 - len(one & other) / len(one | other) for one, other in itertools.combinations(pairs, 2)]
    return sum(apart) / len(apart)


IMAGES = Medium("image", Painter, Ledger, 1, None)
TEXTS = Medium("text", Writer, TextLedger, 8, "text")
DRAWINGS = Medium("image", Writer, Ledger, 8, "image")


def distance_between(medium: Medium, features: str | Callable) -> Callable[[Any], float]:
    """The mean distance between samples of a prompt: of images in `features`, of clips that of their middle frames, of
    texts `text_distance`. Raises UserError for features of texts."""
    if medium is TEXTS:
        if features != "pixels":
            raise UserError("--features: are of images; leave it out for a language model")
        return text_distance
    extract = guards.extractor(features)

    def apart(samples: torch.Tensor) -> float:
        images = samples if samples.ndim == 4 else samples[:, samples.shape[1] // 2]
        return guards.distances(torch.as_tensor(extract(images))[None]).mean().item()

    return apart
