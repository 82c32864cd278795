"""Prompt enhancer: a language model that rewrites prompts before a pipeline draws from them (`--enhancer`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from tqdm import tqdm

from flowgrpo.data.prompts import Prompt
from flowgrpo.errors import UserError
from flowgrpo.evaluation.plan import Arm, weights_digest
from flowgrpo.evaluation.sampler import Texts
from flowgrpo.policies import build, checkpoints, loading

INSTRUCTION = ("Rewrite the user's prompt for a text-to-image model. Keep what it says. Add details of the scene, the "
               "light and the style. Answer with the new prompt alone.")


class Enhancer:
    """Language model that rewrites prompts, loaded at the first one; every text is rewritten once.

    source: model, finished run or checkpoint. A run's `text` settings apply; a model without a run is instructed by
    INSTRUCTION. Rewrites are greedy unless the run's `text.eval_temperature` is set; then they depend on `seed` and the
    text alone.
    Raises UserError for a model that writes no texts.
    """

    def __init__(self, source: str, seed: int = 0):
        from flowgrpo.text.policies import engines as texts

        self.source, self.seed = source, seed
        model, self.weights = checkpoints.source(source)
        run = checkpoints.config_of(self.weights)
        if not build.writes(model, run):
            raise UserError(f"--enhancer {source}: generates images, expected a language model, or a run that trained "
                            "one")
        self.sampler = Texts(model, run, None, loading.place())
        self.arm = Arm(self.weights, texts.asked(run, 1, None) | ({} if run else {"system": INSTRUCTION}))
        self.known: dict[str, str] = {}

    def __call__(self, prompts: Sequence[Prompt]) -> list[Prompt]:
        """Return the prompts with rewritten texts."""
        missing = [text for text in dict.fromkeys(prompt.text for prompt in prompts) if text not in self.known]
        together = self.sampler.together
        for at in tqdm(range(0, len(missing), together), desc="rewriting", leave=False, disable=None):
            self._rewrite(missing[at:at + together])
        return [replace(prompt, text=self.known[prompt.text]) for prompt in prompts]

    def _rewrite(self, some: Sequence[str]) -> None:
        from flowgrpo.text.rewards.pictured import noise_seed, rewritten

        seeds = [noise_seed(self.seed, None, text, 0) for text in some]
        written = self.sampler.draw(self.arm, [Prompt(text) for text in some], seeds)
        self.known.update(zip(some, map(rewritten, written)))

    def as_json(self) -> dict[str, Any]:
        """Return how prompts are rewritten, as evaluations record it."""
        return {"enhancer": self.source, "enhancer_weights": weights_digest(self.weights)}


def make(source: str | None, seed: int = 0) -> Enhancer | None:
    """Return the enhancer of --enhancer; None without one."""
    return None if source is None else Enhancer(source, seed)
