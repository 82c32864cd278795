"""Prompts of an epoch by their recorded success rates, and their samples by the variance of gradients.

The memory holds the last rates of every sampled prompt, the mean rewards of its groups in an epoch, and the diversity
of its last samples; of `GradientVariance` the norms of gradients.
"""

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import numpy as np
import torch

from flowgrpo.curriculum.epoch_batch import EpochBatch
from flowgrpo.curriculum.order import KEY, OfBeliefs, posteriors, require_rate, update_beta
from flowgrpo.data import sets
from flowgrpo.data.prompts import Prompt
from flowgrpo.data.selection import rank
from flowgrpo.parts import Above, AtLeast, part

RATES, DIVERSITY, RETAINED, NORMS = "rates", "diversity", "retained", "gradient_norms"  # keys of the memory
LONGEST = 16  # rates kept per prompt


def record(memory: dict[str, Any], drawn: EpochBatch) -> None:
    """Append the mean reward of every prompt's standing groups of an epoch; of rewards within 0 to 1, a success rate.
    Raises UserError for rewards outside 0 to 1."""
    known, kinds = memory.setdefault(RATES, {}), memory.setdefault(DIVERSITY, {})
    sampled: dict[str, list[float]] = {}
    keys = {prompt.key for prompt in drawn.pool}
    for place, (prompt, totals) in enumerate(zip(drawn.prompts, drawn.totals)):
        if prompt.key in keys and len(rewards := totals[~totals.isnan()].double()):
            require_rate(prompt.key, rewards.min().item(), rewards.max().item())
            sampled.setdefault(prompt.key, []).append(rewards.mean().item())
            if drawn.diversity:
                kinds[prompt.key] = drawn.diversity[place]
    for key, rates in sampled.items():
        known[key] = [*known.get(key, []), sum(rates) / len(rates)][-LONGEST:]


def last_rate(memory: dict[str, Any], prompt: Prompt) -> float | None:
    """The newest success rate of a prompt; None if it was never sampled."""
    rates = memory.get(RATES, {}).get(prompt.key)
    return rates[-1] if rates else None


class OfRates:
    """Prompts by their recorded success rates: base class."""

    def learn(self, memory: dict[str, Any], drawn: EpochBatch) -> None:
        record(memory, drawn)


@part("curriculum", reads_diversity=True)
class VarianceSampling(OfRates):
    """Prompts by variance of the outcome and diversity of samples: a share by p (1 - p) and diversity, others as ever
    (variance-aware sampling of MMR1, 2509.21268).

    p is a prompt's newest success rate, diversity that of its last samples: for texts the share that repeats no other,
    for images the mean deviation of a pixel. The score is `variance` p (1 - p) + `diversity` times the diversity, and
    a prompt that was never sampled has the largest possible one. Rates are measured whenever a prompt is trained, where
    the paper measures all prompts from time to time.
    """

    share: float = 0.5
    variance: float = 0.8
    diversity: float = 0.2

    def __post_init__(self) -> None:
        if not 0 <= self.share <= 1 or min(self.variance, self.diversity) < 0 or not self.variance + self.diversity > 0:
            raise ValueError(f"VarianceSampling: share is {self.share}, variance {self.variance} and diversity "
                             f"{self.diversity}, expected a share of 0 to 1, and factors of 0 or more, not both 0")

    def __call__(self, pool: Sequence[Prompt], count: int, epoch: int, seed: int, weights: Sequence[float] | None,
                 memory: dict[str, Any], group: int) -> list[Prompt]:
        scores = np.array([self.score(memory, prompt) * prompt.weight for prompt in pool])
        number = min(round(self.share * count), int((scores > 0).sum()))
        rng = np.random.default_rng([seed, epoch, 1])
        chosen = rng.choice(len(pool), number, replace=False, p=scores / scores.sum()).tolist() if number else []
        rest = [place for place in range(len(pool)) if place not in {*chosen}] or [*range(len(pool))]
        others = sets.draw([pool[place] for place in rest], count - number, epoch, seed,
                             weights and [weights[place] for place in rest])
        return [pool[place] for place in chosen] + others

    def score(self, memory: dict[str, Any], prompt: Prompt) -> float:
        rate = last_rate(memory, prompt)
        if rate is None:
            return self.variance / 4 + self.diversity
        return self.variance * rate * (1 - rate) + self.diversity * memory[DIVERSITY].get(prompt.key, 0.0)


@part("curriculum",
      jointly={"keep prior": "0 to 1 and above 0", "others candidates power": "0 to 1, 1 or more, and above 0"})
class InformationGain:
    """Prompts with the largest gain p (1 - p)^power, for a rate p sampled from a posterior that forgets on two scales
    (VADE, 2511.18902). The paper's power 2 prefers a rate of 1/3; power 1 is the variance of a reward, largest at 1/2.

    A sampled prompt's posterior Beta(a, b) keeps `keep` of its counts and gets those of the new samples. All others
    keep `others` of theirs per epoch: as the policy moves, what is known of them fades to Beta(prior, prior). The
    default decays are ours, and so is the choice among `candidates` per prompt, in place of the whole pool.
    """

    power: Annotated[float, Above(0)] = 2.0
    candidates: Annotated[int, AtLeast(1)] = 4
    keep: Annotated[float, AtLeast(0, to=1)] = 0.5
    others: Annotated[float, AtLeast(0, to=1)] = 0.95
    prior: Annotated[float, Above(0)] = 1.0

    def __call__(self, pool: Sequence[Prompt], count: int, epoch: int, seed: int, weights: Sequence[float] | None,
                 memory: dict[str, Any], group: int) -> list[Prompt]:
        most = max(min(self.candidates * count, len(pool)), count)
        candidates = sets.draw(list(pool), most, epoch, seed, weights)
        rates = np.random.default_rng([seed, epoch, 0]).beta(*posteriors(memory, candidates, self.prior).T)
        gains = rates * (1 - rates) ** self.power
        return [candidates[place] for place in (-gains).argsort(kind="stable")[:count]]

    def learn(self, memory: dict[str, Any], drawn: EpochBatch) -> None:
        known = memory.setdefault(KEY, {})
        keys = {prompt.key for prompt in drawn.pool}
        fresh: dict[str, list[float]] = {}
        for prompt, totals in zip(drawn.prompts, drawn.totals):
            if prompt.key in keys and (rewards := totals[~totals.isnan()].tolist()):
                fresh.setdefault(prompt.key, []).extend(rewards)
        for key in known.keys() - fresh.keys():
            known[key] = [self.prior + self.others * (count - self.prior) for count in known[key]]
        for key, rewards in fresh.items():
            require_rate(key, min(rewards), max(rewards))
            a, b = known.get(key, (self.prior, self.prior))
            known[key] = list(update_beta(a, b, sum(rewards) / len(rewards), len(rewards), self.keep, self.prior))


@part("curriculum", jointly={"after keep by": "numbers of 1 or more, and hardest or variance"})
class Retention(OfRates):
    """All prompts in turn, from epoch `after` on only the `keep` of the first rank.

    by: "hardest", the lowest newest rate first, ranked anew in every epoch (hard-focus curriculum of DRIVE);
        "variance", of a prompt's rates so far, the largest first, ranked once (1-shot RLVR, 2504.20571).

    A prompt that was never sampled is retained only if the others do not suffice.
    """

    after: Annotated[int, AtLeast(1)] = 10
    keep: Annotated[int, AtLeast(1)] = 1
    by: Literal["hardest", "variance"] = "hardest"

    def __call__(self, pool: Sequence[Prompt], count: int, epoch: int, seed: int, weights: Sequence[float] | None,
                 memory: dict[str, Any], group: int) -> list[Prompt]:
        if epoch < self.after:
            return sets.draw(list(pool), count, epoch, seed, weights)
        known = memory.get(RATES, {})
        ranked = rank(pool, known, self.by) + [prompt for prompt in pool if not known.get(prompt.key)]
        kept = ranked[:self.keep]
        if self.by == "variance":
            chosen = memory.setdefault(RETAINED, [prompt.key for prompt in kept])
            kept = [prompt for prompt in pool if prompt.key in chosen] or kept
        return sets.draw(kept, count, epoch, seed)


@part("curriculum")
class OppositePairs(OfRates):
    """Pairs of a hard and an easy prompt: one is sometimes solved, the other sometimes fails (bidirectional pairing).

    Hard: its newest success rate is above 0 and below 1/2; easy: above 1/2 and below 1. Both are drawn at random, as
    many of the one as of the other, and at most a `share` of the epoch; the other places go to all prompts in turn. The
    rare outcome of either has the larger advantage by the group's deviation, `parts.advantage.scale: group`.
    """

    share: Annotated[float, Above(0, to=1)] = 1.0

    def __call__(self, pool: Sequence[Prompt], count: int, epoch: int, seed: int, weights: Sequence[float] | None,
                 memory: dict[str, Any], group: int) -> list[Prompt]:
        rates = [last_rate(memory, prompt) for prompt in pool]
        hard = [prompt for prompt, rate in zip(pool, rates) if rate is not None and 0 < rate < 0.5]
        easy = [prompt for prompt, rate in zip(pool, rates) if rate is not None and 0.5 < rate < 1]
        rng = np.random.default_rng([seed, epoch, 2])
        number = min(int(self.share * count) // 2, len(hard), len(easy))
        pairs = [side[place] for at in zip(rng.permutation(len(hard))[:number], rng.permutation(len(easy))[:number])
                 for side, place in zip((hard, easy), at)]
        taken = {prompt.key for prompt in pairs}
        left = [place for place, prompt in enumerate(pool) if prompt.key not in taken] or [*range(len(pool))]
        return pairs + sets.draw([pool[place] for place in left], count - len(pairs), epoch, seed,
                                   weights and [weights[place] for place in left])


@part("curriculum", reads_norms=True, jointly={"keep prior": "0 to 1 and above 0"})
class GradientVariance(OfBeliefs):
    """More of an epoch's groups for prompts with long gradients that are rarely right (GVM, 2505.02391): `share_out`.

    An epoch has `each` times fewer different prompts than groups, at least one group each. The rate p of a prompt is
    the mean of its posterior, as of `Knapsack`. Its gradient norm is the root mean square over its right samples, of
    the gradient by the logits of the drawn tokens, sqrt(sum (1 - p_t)^2); the paper's is by the last layer's weights.
    Images have equal norms. Use the advantage `Pooled`, which compares all groups of a prompt as one.

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
        a, b = posteriors(memory, drawn, self.prior).T
        known = memory.get(NORMS, {})
        usual = sum(known.values()) / len(known) if known else 1.0
        norms = [known.get(prompt.key, usual) for prompt in drawn]
        groups = share_out((a / (a + b)).tolist(), norms, count, self.alpha, self.beta)
        return [prompt for prompt, number in zip(drawn, groups) for _ in range(number)]

    def learn(self, memory: dict[str, Any], drawn: EpochBatch) -> None:
        """Learn the rates, and the norms of prompts with a right sample; others keep theirs."""
        super().learn(memory, drawn)
        known = memory.setdefault(NORMS, {})
        squares = defaultdict[str, list[float]](list)
        for prompt, totals, norms in zip(drawn.prompts, drawn.totals, drawn.norms):
            squares[prompt.key].extend(norms[totals >= self.right].square().tolist())
        known |= {key: math.sqrt(sum(values) / len(values)) for key, values in squares.items() if values}


def share_out(rates: Sequence[float], norms: Sequence[float], units: int, alpha: float, beta: float) -> list[int]:
    """The units of each prompt, one at least: in proportion to G / sqrt(p + alpha / p^(beta - 1)) for the rate p
    and the norm G (2505.02391).
    These are set first, then all others by the largest remainder, ties by position."""
    odds = [norm / math.sqrt(max(rate, 1e-9) + alpha / max(rate, 1e-9) ** (beta - 1))
            for rate, norm in zip(rates, norms)]
    total = sum(odds)
    exact = [units * share / total if total else units / len(odds) for share in odds]
    counts = [max(math.floor(share), 1) for share in exact]
    for _ in range(units - sum(counts)):
        counts[max(range(len(counts)), key=lambda at: exact[at] - counts[at])] += 1
    while sum(counts) > max(units, len(counts)):
        counts[max((at for at in range(len(counts)) if counts[at] > 1), key=lambda at: counts[at] - exact[at])] -= 1
    return counts


def gradient_norms(logp: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """The norm of each row's gradient by the logits of its drawn tokens, sqrt(sum (1 - p)^2): [m, L] to [m]."""
    return ((1 - logp.float().exp()) * mask).square().sum(1).sqrt()
