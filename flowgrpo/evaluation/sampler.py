"""Samplers of (arm, prompts, seeds), by a pipeline or a language model. A sample depends on these three alone."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from flowgrpo.config.schema import Config
from flowgrpo.data.prompts import Prompt
from flowgrpo.evaluation import images
from flowgrpo.evaluation.batched import Together
from flowgrpo.evaluation.plan import Arm
from flowgrpo.policies.pipelines.call import unchecked
from flowgrpo.policies.weights.rlg import Branches
from flowgrpo.types import Completion

if TYPE_CHECKING:
    from flowgrpo.text.policies.causal_lm import CausalLM


class Pipelines:
    """Sampler of images and clips by a stock pipeline, loaded at the first draw.

    It is loaded again for other weights than those in it, which do not leave it. The base draws before the tuned model
    without that, and so do several arms with RLG.
    """

    def __init__(self, model: str, config: Config, precision: str, device: torch.device):
        self.model, self.config, self.precision, self.device = model, config, precision, device
        self.pipe: Any = None
        self.loaded: Path | None = None
        self.branches: Branches | None = None
        self.together = Together()

    def draw(self, arm: Arm, prompts: Sequence[Prompt], seeds: Sequence[int]) -> list[torch.Tensor]:
        """Draw images [3, H, W] or clips [F, 3, H, W] in [0, 1], one per prompt and seed."""
        self._load(arm)
        weighted: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        if self.branches is not None:
            assert arm.rlg is not None  # the same kind of arm, else `_load` had loaded it
            weighted = self.branches.at(arm.rlg)
        with weighted, unchecked(self.pipe):
            return self.together.draw(self.pipe, prompts, seeds, arm.asked, self.config.negative_prompt)

    def _load(self, arm: Arm) -> None:
        as_loaded = (self.loaded, self.branches is not None) == (arm.weights, arm.rlg is not None)
        if self.pipe is None or not (self.loaded is None or as_loaded):
            self.pipe = self.loaded = self.branches = None
            gc.collect()  # two models at once may not fit
            self.pipe = images.make_pipeline(self.model, self.precision, self.config.trust_remote_code, self.device,
                                             self.config.memory, images.files_of(self.config, self.model))
        if self.loaded is not None or arm.weights is None or arm.rlg == 0:
            return
        self.loaded = arm.weights
        if arm.rlg is None:
            images.load_tuned(self.pipe, arm.weights)
        else:
            self.branches = images.load_branches(self.pipe, arm.weights)


class Texts:
    """Sampler of completions by a language model, loaded for every arm.

    precision: None takes the run's, or the device's default.
    """

    def __init__(self, model: str, config: Config | None, precision: str | None, device: torch.device):
        self.model, self.config, self.precision, self.device = model, config, precision, device
        self.arm: Arm | None = None
        self.policy: CausalLM | None = None

    def draw(self, arm: Arm, prompts: Sequence[Prompt], seeds: Sequence[int]) -> list[Completion]:
        """Write a completion per prompt and seed."""
        if arm != self.arm:
            from flowgrpo.text import evaluation as texts

            self.policy = None  # two models at once may not fit
            config = texts.settings(self.model, self.config, arm.asked, self.device, self.precision)
            self.policy, self.arm = texts.load(config, arm.weights, self.device), arm
        assert self.policy is not None  # loaded with the arm
        given = self.policy.encode([prompt.text for prompt in prompts], images=[prompt.brings for prompt in prompts])
        return self.policy.generate(given, self.policy.generators(seeds))
