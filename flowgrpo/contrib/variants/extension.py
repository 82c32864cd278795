"""Variants of prompts, written by the policy after an epoch (`contrib.variants.parts`)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from flowgrpo.contrib.variants.parts import VARIANTS, Variations
from flowgrpo.data.prompts import Prompt, as_line
from flowgrpo.errors import UserError
from flowgrpo.samplers.rollout import Part, seeder
from flowgrpo.text.rewards.answer_keys import spoken
from flowgrpo.training.epoch import Epoch
from flowgrpo.training.extension import Extension
from flowgrpo.training.run import Run
from flowgrpo.types import Completions

TURN = 9_000  # separates the draws of variants from those of an epoch's samples


class Variants(Extension):
    """Variants of prompts, in the memory of the method's parts."""

    def on_credited(self, epoch: Epoch) -> None:
        run, method = self.trainer, self.trainer.method
        curriculum: Any = getattr(method.curriculum, "inner", method.curriculum)
        lines = [json.dumps(as_line(variant)) for part in epoch.parts
                 for variant in _of_part(run, curriculum, part, epoch.own)]
        known = run.memory.setdefault(VARIANTS, [])
        texts = {line["prompt"] for line in known} | {prompt.text for prompt in run.prompts}
        for line in map(json.loads, run.processes.gather_samples(lines)):
            if line["prompt"] not in texts:
                texts.add(line["prompt"])
                known.append(line)
        del known[:-curriculum.kept]


def _of_part(run: Run, curriculum: Variations, part: Part, prompts: Sequence[Prompt]) -> list[Prompt]:
    """Return a variant of each prompt of a part with right and wrong samples; none where the policy writes nothing."""
    policy: Any = run.policy
    [taken], [rewards] = part.transitions, part.rewards
    assert isinstance(taken, Completions)
    written = []
    for place in taken.prompts.unique().tolist():
        rows = (taken.prompts == place).nonzero()[:, 0].cpu()
        good = rewards.cpu()[rows] >= curriculum.right
        if good.all() or not good.any():
            continue
        row, prompt = int(rows[good][0]), prompts[place]
        solution = str(policy.written(taken.ids[row:row + 1], taken.old.mask[row:row + 1])[0])
        shown = curriculum.template.format(prompt=prompt.text, solution=solution)
        try:
            policy.require_context([shown])
        except UserError:  # too long for the model
            continue
        seed = seeder(run.config.seed, run.epoch, TURN)
        sampled = policy.sample(policy.encode([shown], images=[prompt.brings]), run.method.generation.decoding,
                                policy.generators([seed(place, 0)]), torch.zeros(1, dtype=torch.bool))
        if text := spoken(str(sampled.texts[0])).strip():
            written.append(replace(prompt, text=text))
    return written
