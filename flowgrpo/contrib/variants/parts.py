"""Prompts of an epoch with variants that the policy wrote of problems which it sometimes solves."""

from __future__ import annotations

import string
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from flowgrpo.data import splits
from flowgrpo.data.prompts import Prompt, of_records

if TYPE_CHECKING:
    from flowgrpo.curriculum.epoch_batch import EpochBatch

VARIANTS = "variants"  # key of the memory: lines of prompts, the oldest first


@dataclass(frozen=True)
class Variations:
    """Share of the epoch that are variants of earlier prompts, with the same reference answer (SvS, 2508.14029).

    After an epoch the policy reads each prompt with right and wrong samples, and its first right one, in `template`,
    and writes another problem with the same answer, which keeps the prompt's metadata. A variant whose own samples are
    all right or all wrong is dropped; others come again. SvS trains the writing too, which is left out here. Language
    models alone.

    share: of the epoch's prompts. right: total reward from which a sample is right. kept: variants at most.
    """

    writes: ClassVar[bool] = True

    share: float = 0.25
    right: float = 0.5
    kept: int = 256
    template: str = ("{prompt}\n\nA solution:\n{solution}\n\nWrite another problem, worded differently, that has the "
                     "same final answer. Write the problem alone:")

    reads_target = "tokens"

    def __post_init__(self) -> None:
        named = {name for _, name, *_ in string.Formatter().parse(self.template) if name is not None}
        if not 0 < self.share <= 1 or self.kept < 1 or named != {"prompt", "solution"}:
            raise ValueError(f"Variations: share is {self.share}, kept {self.kept} and template has "
                             f"{', '.join(sorted(named)) or 'no field'}, expected above 0 to 1, 1 or more, and prompt "
                             "and solution")

    def __call__(self, pool: Sequence[Prompt], count: int, epoch: int, seed: int, weights: Sequence[float] | None,
                 memory: dict[str, Any], group: int) -> list[Prompt]:
        variants = of_records(memory.get(VARIANTS, [])[:round(self.share * count)])
        return variants + splits.draw(list(pool), count - len(variants), epoch, seed, weights)

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
