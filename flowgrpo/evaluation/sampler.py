"""Samplers of (arm, prompts, seeds), by a pipeline or a language model. A sample depends on these three alone."""

from __future__ import annotations

import contextlib
import gc
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from tqdm import tqdm

from flowgrpo.config.schema import Config
from flowgrpo.cores import Threads
from flowgrpo.data.prompts import Prompt
from flowgrpo.evaluation import calls
from flowgrpo.evaluation.plan import Arm
from flowgrpo.policies import loading
from flowgrpo.policies.pipelines.call import unchecked
from flowgrpo.policies.pipelines.rlg import Branches
from flowgrpo.samplers.grids import require_steps
from flowgrpo.samplers.rollout import seeder
from flowgrpo.types import Completion

if TYPE_CHECKING:
    from flowgrpo.text.policies.causal_lm import CausalLM


class Sampler(Protocol):
    """Sampler of one model. together: samples per call by default."""

    together: int

    def load(self, arm: Arm) -> Any:
        """Load the model with an arm's weights, unless they are in it, and return it."""

    def draw(self, arm: Arm, prompts: Sequence[Prompt], seeds: Sequence[int]) -> Sequence[Any]:
        """Return a sample per prompt and seed."""


def tell(threads: Threads) -> None:
    """Let torch use as many threads as cores are free; say a change on stderr, which is no result."""
    if line := threads.look():
        tqdm.write(line, file=sys.stderr)


def first_of_each(sampler: Sampler, arm: Arm, prompts: Sequence[Prompt], seed: int) -> list[Any]:
    """Return the first sample of every prompt."""
    sampler.load(arm)  # before the bar: what cannot be loaded is one line
    of, places = seeder(seed, 0), range(len(prompts))
    parts = [places[at:at + sampler.together] for at in range(0, len(prompts), sampler.together)]
    return [sample for rows in tqdm(parts, desc="sampling", leave=False, disable=None)
            for sample in sampler.draw(arm, [prompts[i] for i in rows], [of(i, 0) for i in rows])]


class Pipelines:
    """Sampler of images and clips by a stock pipeline, loaded at the first draw.

    It is loaded again for other weights than those in it, which do not leave it. The base draws before the tuned model
    without that, and so do several arms with RLG.
    """

    together = 1

    def __init__(self, model: str, config: Config, precision: str, device: torch.device):
        self.model, self.config, self.precision, self.device = model, config, precision, device
        self.threads = Threads.of(device)
        self.pipe: Any = None
        self.loaded: Path | None = None
        self.branches: Branches | None = None
        self.batched = calls.Together()

    def draw(self, arm: Arm, prompts: Sequence[Prompt], seeds: Sequence[int]) -> list[torch.Tensor]:
        """Draw images [3, H, W] or clips [F, 3, H, W] in [0, 1], one per prompt and seed."""
        self.load(arm)
        tell(self.threads)
        weighted: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        if self.branches is not None:
            assert arm.rlg is not None  # the same kind of arm, else `load` had loaded it
            weighted = self.branches.at(arm.rlg)
        with weighted, unchecked(self.pipe):
            return self.batched.draw(self.pipe, prompts, seeds, arm.asked, self.config.negative_prompt)

    def load(self, arm: Arm) -> Any:
        """Load the pipeline with an arm's weights, unless they are in it, and return it.

        Raises UserError for weights that do not fit, and for a number of steps that the scheduler does not take.
        """
        as_loaded = (self.loaded, self.branches is not None) == (arm.weights, arm.rlg is not None)
        if self.pipe is None or not (self.loaded is None or as_loaded):
            if self.pipe is not None:
                self.pipe = self.loaded = self.branches = None
                gc.collect()  # two models at once may not fit
            self.pipe = loading.make_pipeline(self.model, self.precision, self.config.trust_remote_code, self.device,
                                             self.config.memory, loading.files_of(self.config, self.model))
        if self.loaded is None and arm.weights is not None and arm.rlg != 0:
            self._tune(arm.weights, arm.rlg)
        require_steps(self.pipe.scheduler, arm.asked.get("num_inference_steps"))
        return self.pipe

    def _tune(self, weights: Path, rlg: float | None) -> None:
        self.loaded = weights
        if rlg is None:
            loading.load_tuned(self.pipe, weights)
        else:
            self.branches = loading.load_branches(self.pipe, weights)


class Texts:
    """Sampler of completions by a language model, loaded for every arm.

    precision: None takes the run's, or the device's default.
    """

    together = 8

    def __init__(self, model: str, config: Config | None, precision: str | None, device: torch.device):
        self.model, self.config, self.precision, self.device = model, config, precision, device
        self.threads = Threads.of(device)
        self.arm: Arm | None = None
        self.policy: CausalLM | None = None

    def draw(self, arm: Arm, prompts: Sequence[Prompt], seeds: Sequence[int]) -> list[Completion]:
        """Write a completion per prompt and seed."""
        policy = self.load(arm)
        tell(self.threads)
        given = policy.encode([prompt.text for prompt in prompts], images=[prompt.brings for prompt in prompts])
        return policy.generate(given, policy.generators(seeds))

    def load(self, arm: Arm) -> CausalLM:
        """Load the model with an arm's weights and settings, unless they are in it, and return it."""
        if self.policy is None or arm != self.arm:
            from flowgrpo.text.policies import engines as texts

            self.policy = None  # two models at once may not fit
            config = texts.settings(self.model, self.config, arm.asked, self.device, self.precision)
            self.policy, self.arm = texts.load(config, arm.weights, self.device), arm
        return self.policy
