"""Generators of an evaluation, for images and for texts: sample, store, and measure the distance of samples.

Only this file separates the two; `evaluate` handles both alike.
"""

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from flowgrpo.config.schema import Config
from flowgrpo.data.prompts import Prompt
from flowgrpo.device import drawing
from flowgrpo.errors import UserError
from flowgrpo.evaluation import image_files
from flowgrpo.evaluation.plan import AnyLedger, Ledger, Medium, Place, Plan, TextLedger
from flowgrpo.evaluation.samplers import Pipelines, Texts
from flowgrpo.policies import loading
from flowgrpo.rewards import guards
from flowgrpo.samplers.rollout import seeder
from flowgrpo.version import __version__

IMAGES = Medium("image", Ledger, 1, None)
TEXTS = Medium("text", TextLedger, 8, "text")
DRAWINGS = Medium("image", Ledger, 8, "image")


class Drawer:
    """Draw with a pipeline, or write or draw with a language model: a sample depends on the seed of its place alone. Of
    several draws, where the plan asks for them, it is the best.

    The base draws before the tuned model, so that a pipeline is loaded once.
    """

    def __init__(self, plan: Plan, device: torch.device):
        config = plan.config or Config()
        self.plan, self.seed_of = plan, seeder(plan.seed, 0)
        self.sampler: Pipelines | Texts = Pipelines(
            plan.model, config, drawing(config.precision, device, plan.precision), device) \
            if plan.medium is IMAGES else Texts(plan.model, plan.config, plan.precision, device)
        self.settings: dict[str, dict[str, Any]] = {}
        self.chosen: dict[Place, tuple[Place, float]] = {}  # of the best of several, the draw and its score

    def draw(self, prompts: Sequence[Prompt], places: Sequence[Place]) -> list[Any]:
        """Images [3, H, W] or clips [F, 3, H, W] in [0, 1], or completions, of one arm."""
        if (best := self.plan.best) is None:
            return self._draw_once(prompts, places)
        tries = [[place._replace(sample=place.sample * best.count + number) for place in places]
                 for number in range(best.count)]
        drawn = list(zip(*(self._draw_once(prompts, some) for some in tries)))
        picked = best.pick([sample for samples in drawn for sample in samples], prompts, self.plan.fps)
        self.chosen |= {place: (tries[number][at], score)
                        for at, (place, (number, score)) in enumerate(zip(places, picked))}
        return [samples[number] for samples, (number, _) in zip(drawn, picked)]

    def fill(self, ledger: AnyLedger, prompts: Sequence[Prompt], places: Sequence[Place], batch: int,
             drawn: Callable[[int], object] = lambda count: None) -> None:
        """Draw samples of one arm into a ledger, `batch` at once. prompts: by their numbers. drawn: is given the number
        of each batch's samples."""
        for first in range(0, len(places), batch):
            some = places[first:first + batch]
            for place, sample in zip(some, self.draw([prompts[place.prompt] for place in some], some)):
                ledger.save(place, sample, self.facts(prompts[place.prompt], place, sample), self.plan.fps)
            drawn(len(some))

    def _draw_once(self, prompts: Sequence[Prompt], places: Sequence[Place]) -> list[Any]:
        if isinstance(self.sampler, Pipelines) and self.sampler.pipe is None:
            self.require_fit()
        seeds = [self.seed_of(place.prompt, place.sample) for place in places]
        return self.sampler.draw(self.plan.arm(places[0].arm), self._rewrite(prompts), seeds)

    def require_fit(self) -> None:
        """Raise UserError if the tuned weights do not fit the pipeline, by the headers of their files."""
        if self.plan.tuned is not None:
            loading.require_fit(self.plan.model, self.plan.tuned, loading.files_of(self.plan.config, self.plan.model))

    def facts(self, prompt: Prompt, place: Place, sample: Any) -> str | None:
        """Generation settings of an image, as AUTOMATIC1111 and ComfyUI read them; a text stores none."""
        plan, arm, negative = self.plan, place.arm, ""
        weight, (place, score) = plan.arms[arm], self.chosen.pop(place, (place, 0.0))
        if plan.medium is TEXTS:
            return None
        tuned = plan.tuned if weight else None
        if isinstance(self.sampler, Pipelines):
            negative = plan.negative if prompt.negative is None else prompt.negative
            if arm not in self.settings:
                self.settings[arm] = image_files.settings(self.sampler.pipe, plan.model, plan.asked, tuned,
                                                          None if weight in (0, 1) else weight)
        elif arm not in self.settings:
            self.settings[arm] = {
                "Temperature": plan.asked["eval_temperature"], "CFG scale": plan.asked["guidance"],
                "Model": Path(plan.model).name, "Lora hashes": image_files.lora_hashes(tuned),
                "Version": f"flowgrpo {__version__}"}
        [written] = self._rewrite([prompt])
        facts = image_files.parameters(written.text, self.seed_of(place.prompt, place.sample), sample,
                                       self.settings[arm], negative)
        best = plan.best and {"Best of": plan.best.count, "Best by": plan.best.name, "Best score": f"{score:g}"}
        return ", ".join([facts, *(f"{name}: {image_files.quote(value)}" for name, value in (best or {}).items())])

    def _rewrite(self, prompts: Sequence[Prompt]) -> Sequence[Prompt]:
        return self.plan.enhancer(prompts) if self.plan.enhancer else prompts


def text_distance(samples: Sequence[str]) -> float:
    """Mean distance between texts of a prompt, 0 to 1: 1 minus the Jaccard similarity of their word bigrams."""
    pairs = [set(itertools.pairwise(["", *text.split(), ""])) for text in samples]
    apart = [1 - len(one & other) / len(one | other) for one, other in itertools.combinations(pairs, 2)]
    return sum(apart) / len(apart)


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
