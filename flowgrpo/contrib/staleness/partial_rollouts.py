"""Partial rollouts of a run: more groups are begun than an epoch trains, and those that are not whole go on in the next
epoch (APRIL, 2509.18521)."""

import math
from collections.abc import Iterator
from dataclasses import fields
from typing import Any, cast

from flowgrpo.contrib.features import PartialRolloutKeys
from flowgrpo.data.prompts import Prompt, as_line, of_records
from flowgrpo.samplers.rollout import Part
from flowgrpo.storage.checkpoint import Tensors, within
from flowgrpo.text.policies.causal_lm import CausalLM
from flowgrpo.text.rollouts.completions import TextRollouts
from flowgrpo.text.samplers.importance import Begun, begin, complete_groups, continue_groups
from flowgrpo.training import sampling
from flowgrpo.training.extension import Run


class Pool:
    """Groups of a run that are begun: those of the epochs of a run without over-provision, in their order, with the
    same seeds. asked: the number of such epochs whose prompts were drawn; fresh: their groups that are not begun."""

    def __init__(self, run: Run):
        self.run, keys = run, PartialRolloutKeys.read(run.config)
        self.policy = cast(CausalLM, run.policy)
        self.extra, self.chunk = math.ceil(keys.over_provision * run.config.train.prompts), keys.chunk
        self.groups: list[tuple[Prompt, Begun]] = []
        self.fresh: list[tuple[Prompt, list[int]]] = []
        self.asked = 0

    def draw(self, epoch: int) -> list[tuple[Prompt, Begun]]:
        """Draw tokens until an epoch's number of groups are whole, and return the oldest of these; the others wait.
        Nothing changes if it raises."""
        run, train = self.run, self.run.config.train
        fresh, asked, waiting = [*self.fresh], self.asked, [*self.groups]
        missing = max(min(train.prompts + self.extra, train.prompts * (train.epochs - epoch)) - len(waiting), 0)
        while len(fresh) < missing:
            # The groups of the next epoch of a run without over-provision: prompts, and the seeds of samples.
            batch = sampling.choose_prompts(run, asked)
            seed = run.rollouts.seeds(asked, 0, len(batch))
            fresh += [(prompt, [seed(place, sample) for sample in range(run.geometry.group)])
                      for place, prompt in enumerate(batch)]
            asked += 1
        waiting += [(prompt, begin(seeds, self.policy.text.max_tokens)) for prompt, seeds in fresh[:missing]]
        prompts, groups = [prompt for prompt, _ in waiting], [group for _, group in waiting]
        tokenized, before = run.rollouts.conditioning(prompts, epoch), run.policy.evaluations
        with run.clock("rollout"):
            while sum(group.whole for group in groups) < train.prompts:
                run.stop.check()
                groups = continue_groups(self.policy, tokenized, groups, run.method.generation.decoding, self.chunk,
                                         run.geometry.micro_batch, run.optimization.update)
        run.rollouts.count(run.policy.evaluations - before)
        waiting = [*zip(prompts, groups)]
        whole = [place for place, group in enumerate(groups) if group.whole][:train.prompts]
        self.fresh, self.asked = fresh[missing:], asked
        self.groups = [of for place, of in enumerate(waiting) if place not in whole]
        return [waiting[place] for place in whole]

    def parts(self, whole: list[tuple[Prompt, Begun]]) -> Iterator[tuple[Part, list[list[str]]]]:
        """Yield whole groups as parts, with their texts."""
        rollouts = cast(TextRollouts, self.run.rollouts)
        for groups, prompts, _, _ in rollouts.whole_groups(len(whole)):
            of = [whole[place] for place in groups]
            batch = complete_groups(self.policy, [prompt.shown for prompt, _ in of], [group for _, group in of])
            yield rollouts.record(groups, prompts, [batch]), [list(batch.texts)]

    def state(self) -> tuple[Tensors, dict[str, Any]]:
        tensors = {f"{place}.{name.name}": getattr(group, name.name) for place, (_, group) in enumerate(self.groups)
                   for name in fields(Begun)}
        return tensors, {"begun": [as_line(prompt) for prompt, _ in self.groups], "asked": self.asked,
                         "fresh": [[as_line(prompt), seeds] for prompt, seeds in self.fresh]}

    def load_state(self, tensors: Tensors, values: dict[str, Any]) -> None:
        prompts = of_records(values.get("begun", []))
        self.groups = [(prompt, Begun(**within(tensors, f"{place}."))) for place, prompt in enumerate(prompts)]
        fresh = values.get("fresh", [])
        self.fresh = [*zip(of_records([line for line, _ in fresh]), [seeds for _, seeds in fresh])]
        self.asked = values.get("asked", 0)
