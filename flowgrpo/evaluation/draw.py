"""Generators of an evaluation, for pictures and for texts: sample, store, and measure the distance of samples.

Only this file separates the two; `evaluate` handles both alike.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from flowgrpo.config.schema import Config
from flowgrpo.data.prompts import Prompt
from flowgrpo.device import drawing
from flowgrpo.errors import UserError
from flowgrpo.evaluation import images, lora_fit, picture_files
from flowgrpo.evaluation.batched import Together
from flowgrpo.evaluation.ledger import Ledger, Place, TextLedger
from flowgrpo.evaluation.plan import Medium
from flowgrpo.policies.pipelines.call import unchecked
from flowgrpo.policies.weights.rlg import Branches
from flowgrpo.rewards import guards
from flowgrpo.samplers.rollout import seeder
from flowgrpo.types import Completion

if TYPE_CHECKING:
    from flowgrpo.evaluation.plan import Plan
    from flowgrpo.text.policies.causal_lm import CausalLM


class Painter:
    """Draw with a pipeline, loaded on first use. The base is drawn before the tuned model and never after it, unless
    RLG is requested, which keeps both."""

    def __init__(self, plan: Plan, device: torch.device):
        self.plan, self.device, self.tuned = plan, device, False
        self.pipe: Any = None
        self.branches: Branches | None = None
        self.seed_of, self.together = seeder(plan.seed, 0), Together()
        self.settings: dict[str, dict[str, Any]] = {}

    def draw(self, arm: str, prompts: Sequence[Prompt], places: Sequence[Place]) -> list[torch.Tensor]:
        """Draw pictures [3, H, W] or clips [F, 3, H, W] in [0, 1]."""
        if self.pipe is None:
            config = self.plan.config or Config()
            precision = drawing(config.precision, self.device, self.plan.precision)
            files = images.files_of(config, self.plan.model)
            if self.plan.tuned is not None:
                lora_fit.require_fit(self.plan.model, self.plan.tuned, files)
            self.pipe = images.make_pipeline(self.plan.model, precision, config.trust_remote_code, self.device,
                                             config.memory, files)
        weight = self.plan.arms[arm]
        if weight and not self.tuned:
            self._tune()
        assert weight or not self.tuned or self.branches, "what was loaded into the pipeline does not leave it"
        with self.branches.at(weight) if self.branches else contextlib.nullcontext(), unchecked(self.pipe):
            seeds = [self.seed_of(place.prompt, place.sample) for place in places]
            return self.together.draw(self.pipe, self._written(prompts), seeds, self.plan.asked, self.plan.negative)

    def facts(self, arm: str, prompt: Prompt, place: Place, sample: torch.Tensor) -> str:
        """Return how a picture was drawn, as AUTOMATIC1111 and ComfyUI read it."""
        plan, weight = self.plan, self.plan.arms[arm]
        if arm not in self.settings:
            tuned = plan.tuned if weight else None
            self.settings[arm] = picture_files.settings(self.pipe, plan.model, plan.asked, tuned,
                                                        None if weight in (0, 1) else weight)
        negative = plan.negative if prompt.negative is None else prompt.negative
        [written] = self._written([prompt])
        return picture_files.parameters(written.text, self.seed_of(place.prompt, place.sample), sample,
                                        self.settings[arm], negative)

    def _written(self, prompts: Sequence[Prompt]) -> Sequence[Prompt]:
        """Return the prompts that pictures are drawn from: the users', or as an enhancer rewrites them."""
        return self.plan.enhancer(prompts) if self.plan.enhancer else prompts

    def _tune(self) -> None:
        assert self.plan.tuned is not None
        self.tuned = True
        if self.plan.rlg is None:
            images.load_tuned(self.pipe, self.plan.tuned)
        else:
            self.branches = images.load_branches(self.pipe, self.plan.tuned)


class Writer:
    """Write with a language model, reloaded for every arm."""

    def __init__(self, plan: Plan, device: torch.device):
        self.plan, self.device, self.arm = plan, device, ""
        self.policy: CausalLM | None = None
        self.seed_of = seeder(plan.seed, 0)

    def draw(self, arm: str, prompts: Sequence[Prompt], places: Sequence[Place]) -> list[Completion]:
        """Write one completion per place, each sampled only from the seed of its place."""
        if arm != self.arm:
            from flowgrpo.text import evaluation as texts

            self.policy = None  # two models at once may not fit
            config = texts.settings(self.plan.model, self.plan.config, self.plan.asked, self.device,
                                    self.plan.precision)
            self.policy = texts.load(config, self.plan.tuned if self.plan.arms[arm] else None, self.device)
            self.arm = arm
        conditioning = self.policy.encode([prompt.text for prompt in prompts],
                                          images=[prompt.brings for prompt in prompts])
        seeds = (self.seed_of(place.prompt, place.sample) for place in places)
        return self.policy.generate(conditioning, self.policy.generators(seeds))

    def facts(self, arm: str, prompt: Prompt, place: Place, sample: Completion) -> None:
        """Return nothing: a text stores no settings."""


def written_apart(samples: Sequence[str]) -> float:
    """Return the mean distance between texts of a prompt, 0 (equal) to 1 (nothing in common): 1 minus the Jaccard
    similarity of their word bigrams."""
    pairs = [set(itertools.pairwise(["", *text.split(), ""])) for text in samples]
    apart = [1 - len(one & other) / len(one | other) for one, other in itertools.combinations(pairs, 2)]
    return sum(apart) / len(apart)


def drawn_apart(features: Callable, samples: torch.Tensor) -> float:
    """Return the mean feature distance between pictures of a prompt; for clips that of their middle frames."""
    pictures = samples if samples.ndim == 4 else samples[:, samples.shape[1] // 2]
    return guards.distances(torch.as_tensor(features(pictures))[None]).mean().item()


def of_words(features: str | Callable) -> Callable:
    """Return the distance of texts, which has no features.
    Raises UserError if features are requested."""
    if features != "pixels":
        raise UserError("--features: are of pictures; leave it out for a language model")
    return written_apart


PICTURES = Medium("picture", Painter, Ledger, lambda features: partial(drawn_apart, guards.extractor(features)), 1,
                  None)
TEXTS = Medium("text", Writer, TextLedger, of_words, 8, "text")
