"""What is believed of every prompt's success rate: Beta posteriors, kept between epochs and in checkpoints."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from flowgrpo.advantages import RELATIVE_NOISE
from flowgrpo.errors import UserError

if TYPE_CHECKING:
    from flowgrpo.data import Prompt
    from flowgrpo.drawn import Drawn

KEY = "beliefs"


def of(memory: dict[str, Any], prompts: Sequence[Prompt], prior: float) -> np.ndarray:
    """(a, b) of the posterior Beta(a, b) of every prompt: [n, 2]; of one that was never sampled Beta(prior, prior)."""
    known = memory.get(KEY, {})
    return np.array([known.get(prompt.key, (prior, prior)) for prompt in prompts])


def learn(memory: dict[str, Any], drawn: Drawn, keep: float, prior: float) -> None:
    """Count an epoch's rewards, within 0 to 1, one group after the other, those of groups that were replaced too."""
    known, own = memory.setdefault(KEY, {}), {prompt.key for prompt in drawn.pool}
    for prompt, totals in zip(drawn.prompts, drawn.totals):
        if prompt.key in own and len(found := totals[~totals.isnan()].double()):
            _require_rate(prompt.key, found.min().item(), found.max().item())
            a, b = known.get(prompt.key, (prior, prior))
            known[prompt.key] = list(updated(a, b, found.mean().item(), len(found), keep, prior))


def updated(a: float, b: float, share: float, samples: int, keep: float, prior: float) -> tuple[float, float]:
    """The posterior's numbers after `samples` samples, a share of them right; keep < 1 forgets, towards the prior."""
    begin = (1 - keep) * prior
    return keep * a + begin + share * samples, keep * b + begin + (1 - share) * samples


def require(part: str, keep: float, prior: float) -> None:
    """ValueError for numbers that no belief can be kept with."""
    if not 0 <= keep <= 1 or not prior > 0:
        raise ValueError(f"{part}: keep is {keep} and prior {prior}, expected 0 to 1 and above 0")


def _require_rate(prompt: str, least: float, most: float) -> None:
    if least < -RELATIVE_NOISE or most > 1 + RELATIVE_NOISE:
        raise UserError(f"rewards from {least:g} to {most:g} (prompt: {prompt!r}), but a curriculum counts them as "
                        "success rates, within 0 to 1: scale the rewards' weights")
