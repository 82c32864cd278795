"""Samples per prompt that minimise the variance of the policy gradient under a budget."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import torch

from flowgrpo.curriculum.order import learn, of
from flowgrpo.data import sets
from flowgrpo.data.prompts import Prompt
from flowgrpo.parts import Above, AtLeast, part

if TYPE_CHECKING:
    from flowgrpo.curriculum.epoch_batch import EpochBatch

NORMS = "gradient_norms"  # key of the memory


@part("curriculum", reads_norms=True, jointly={"keep prior": "0 to 1 and above 0"})
class GradientVariance:
    """More of an epoch's groups for prompts with long gradients that are rarely right (GVM, 2505.02391): `shared_out`.

    An epoch has `each` times fewer different prompts than groups, at least one group each. The rate p of a prompt is
    the mean of its posterior, as of `Knapsack`. Its gradient norm is the root mean square over its right samples, of
    the gradient by the logits of the drawn tokens, sqrt(sum (1 - p_t)^2); the paper's is by the last layer's weights.
    Pictures have equal norms. Use the advantage `Pooled`, which compares all groups of a prompt as one.

    alpha, beta: of the penalty of tiny rates. right: total reward from which a sample is right.
    """

    each: Annotated[int, AtLeast(1)] = 4
    alpha: Annotated[float, AtLeast(0)] = 1e-3
    beta: float = 2.0
    keep: Annotated[float, AtLeast(0, to=1)] = 0.5
    prior: Annotated[float, Above(0)] = 1.0
    right: float = 0.5

    def __call__(self, pool: Sequence[Prompt], count: int, epoch: int, seed: int, weights: Sequence[float] | None,
                 memory: dict[str, Any], group: int) -> list[Prompt]:
        drawn = sets.draw(list(pool), min(max(count // self.each, 1), len(pool)), epoch, seed, weights)
        a, b = of(memory, drawn, self.prior).T
        known = memory.get(NORMS, {})
        usual = sum(known.values()) / len(known) if known else 1.0
        norms = [known.get(prompt.key, usual) for prompt in drawn]
        groups = shared_out((a / (a + b)).tolist(), norms, count, self.alpha, self.beta)
        return [prompt for prompt, number in zip(drawn, groups) for _ in range(number)]

    def learn(self, memory: dict[str, Any], drawn: EpochBatch) -> None:
        """Learn the rates, and the norms of prompts with a right sample; others keep theirs."""
        learn(memory, drawn, self.keep, self.prior)
        known, squares = memory.setdefault(NORMS, {}), defaultdict[str, list[float]](list)
        for prompt, totals, norms in zip(drawn.prompts, drawn.totals, drawn.norms or ()):
            squares[prompt.key].extend(norms[totals >= self.right].square().tolist())
        known |= {key: math.sqrt(sum(values) / len(values)) for key, values in squares.items() if values}


def shared_out(rates: Sequence[float], norms: Sequence[float], units: int, alpha: float, beta: float,
               least: int = 1) -> list[int]:
    """Return the units of each prompt, `least` at least: in proportion to G / sqrt(p + alpha / p^(beta - 1)) for the
    rate p and the norm G (2505.02391).

    The least ones are set first, then all others by the largest remainder, ties by position.
    """
    odds = [norm / math.sqrt(max(rate, 1e-9) + alpha / max(rate, 1e-9) ** (beta - 1))
            for rate, norm in zip(rates, norms)]
    total = sum(odds)
    exact = [units * share / total if total else units / len(odds) for share in odds]
    counts = [max(math.floor(share), least) for share in exact]
    for _ in range(units - sum(counts)):
        counts[max(range(len(counts)), key=lambda at: exact[at] - counts[at])] += 1
    while sum(counts) > max(units, least * len(counts)):
        counts[max((at for at in range(len(counts)) if counts[at] > least), key=lambda at: counts[at] - exact[at])] -= 1
    return counts


def gradient_norms(logp: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return the norm of each row's gradient by the logits of its drawn tokens, sqrt(sum (1 - p)^2): [m, L] to [m]."""
    return ((1 - logp.float().exp()) * mask).square().sum(1).sqrt()
