"""Variants of prompts that the policy writes of problems which it sometimes solves."""

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from flowgrpo.curriculum.epoch_batch import EpochBatch
from flowgrpo.data import sets
from flowgrpo.data.prompts import Prompt, as_line, of_records
from flowgrpo.errors import UserError
from flowgrpo.objectives.references import names_in
from flowgrpo.parts import part
from flowgrpo.samplers.rollout import Part, seeder
from flowgrpo.text.rewards.answer_keys import strip_thoughts
from flowgrpo.training.epoch import Epoch
from flowgrpo.training.extension import Extension, Run
from flowgrpo.types import Completions

VARIANTS = "variants"  # key of the memory: lines of prompts, the oldest first


@part("curriculum", target="texts", writes=True)
class Variations:
    """Share of the epoch that are variants of earlier prompts, with the same reference answer (SvS, 2508.14029).

    After an epoch the policy reads each prompt with right and wrong samples, and its first right one, in `template`,
    and writes another problem with the same answer, which keeps the prompt's metadata. A variant whose own samples are
    all right or all wrong is dropped; others come again. SvS trains the writing too.

    share: of the epoch's prompts. right: total reward from which a sample is right. kept: variants at most.
    """

    share: float = 0.25
    right: float = 0.5
    kept: int = 256
    template: str = ("{prompt}\n\nA solution:\n{solution}\n\nWrite another problem, worded differently, that has the "
                     "same final answer. Write the problem alone:")

    def __post_init__(self) -> None:
        named = names_in(self.template)
        if not 0 < self.share <= 1 or self.kept < 1 or named != {"prompt", "solution"}:
            raise ValueError(f"Variations: share is {self.share}, kept {self.kept} and template has "
                             f"{', '.join(sorted(named)) or 'no field'}, expected above 0 to 1, 1 or more, and prompt "
                             "and solution")

    def __call__(self, pool: Sequence[Prompt], count: int, epoch: int, seed: int, weights: Sequence[float] | None,
                 memory: dict[str, Any], group: int) -> list[Prompt]:
        variants = of_records(memory.get(VARIANTS, [])[:round(self.share * count)])
        return variants + sets.draw(list(pool), count - len(variants), epoch, seed, weights)

    def learn(self, memory: dict[str, Any], drawn: EpochBatch) -> None:
        """Drop drawn variants that taught nothing; the others go to the end."""
        known = memory.setdefault(VARIANTS, [])
        for prompt, totals in zip(drawn.prompts, drawn.totals):
            line = next((line for line in known if line["prompt"] == prompt.text), None)
            if line is not None:
                known.remove(line)
                rewards = totals[~totals.isnan()]
                if (rewards >= self.right).any() and (rewards < self.right).any():
                    known.append(line)


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
    """Variant of each prompt of a part with right and wrong samples; none where the policy writes nothing."""
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
        solution = str(policy.detokenize(taken.ids[row:row + 1], taken.old.mask[row:row + 1], [prompt.shown])[0])
        shown = curriculum.template.format(prompt=prompt.text, solution=solution)
        try:
            policy.require_context([shown])
        except UserError:  # too long for the model
            continue
        seed = seeder(run.config.seed, run.epoch, TURN)
        sampled = policy.sample(policy.encode([shown], images=[prompt.brings]), run.method.generation.decoding,
                                policy.generators([seed(place, 0)]), torch.zeros(1, dtype=torch.bool))
        if text := strip_thoughts(sampled.texts[0]).strip():
            written.append(replace(prompt, text=text))
    return written
