"""How an epoch samples and replays a masked language model: completions that come with their traces."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from flowgrpo.policies.causal_lm import Asked
from flowgrpo.policies.masked_lm import SampledTrace
from flowgrpo.policies.text_explorer import TextExplorer
from flowgrpo.samplers.rollout import Part
from flowgrpo.types import Scored, Traces


class MaskedExplorer(TextExplorer):
    """A masked language model under a method: a row of a replay is as many evaluations as its trace has states."""

    def part(self, groups: range, prompts: torch.Tensor, made: list[SampledTrace]) -> Part:
        """Whole groups of completions with the steps at which their tokens were drawn."""
        found = super().part(groups, prompts, made)
        [taken] = found.transitions
        steps = torch.cat([each.steps for each in made])
        return replace(found, transitions=(Traces(taken.ids, taken.prompts, taken.old, steps),))

    def replay(self, part: Part, asked: Asked) -> Iterator[tuple[int, slice, Scored]]:
        """What the present weights make of a part's traces: (0, rows of it, their score), so many rows at once that
        their states are a micro-batch, one at least."""
        [taken] = part.transitions
        most, kernel = self.geometry.micro_batch, self.method.kernel
        count = int(kernel.scorings(taken.steps, taken.ids.shape[1]).max()) + 1
        for start in range(0, len(taken.ids), max(most // count, 1)):
            rows = slice(start, start + max(most // count, 1))
            yield 0, rows, self.policy.log_probs(asked, taken.prompts[rows], taken.ids[rows], taken.old.mask[rows],
                                                 kernel, taken.steps[rows], most, self.method.reads_entropy)
