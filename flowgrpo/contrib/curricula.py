"""Curricula over what is known of other prompts: a bandit over categories, rates predicted from similar prompts."""

import math
from collections import deque
from collections.abc import Sequence
from typing import Annotated, Any

import numpy as np
from scipy.special import softmax

from flowgrpo.advantages.group import group_relative
from flowgrpo.curriculum.epoch_batch import EpochBatch
from flowgrpo.curriculum.history import RATES, record
from flowgrpo.data import sets
from flowgrpo.data.prompts import Prompt
from flowgrpo.data.selection import features
from flowgrpo.errors import UserError
from flowgrpo.methods.setup import Setup
from flowgrpo.parts import Above, AtLeast, part

ARMS = "categories"  # key of the memory: by category [value, groups so far, the last mean |advantages|]


@part("curriculum", jointly={"temperature rate": "above 0, and above 0 to 1"})
class CategoryBandit:
    """Prompts of categories that are sampled by softmax(value / temperature), the categories being a bandit's arms.

    The return of an arm is the mean |advantage| of its groups in an epoch, by the group's own deviation: groups that
    all agree return 0. Its value follows by temporal differences, Q <- (1 - rate) Q + rate return (SEC, 2505.14970), or
    is the mean over its last `window` groups, if window is above 0 (DUMP, 2504.09710).

    key: of the prompts' metadata, whose value is the category.
    bonus: factor on the upper confidence sqrt(2 ln(n + 1) / (n_j + 1)), for n_j of n groups so far: 0 for SEC, 1 for
        DUMP.

    Prompts of a category are drawn at random, by their weights. Groups are counted, where DUMP counts samples. The
    temperature of DUMP's code is 0.1.
    """

    key: str = "task"
    temperature: Annotated[float, Above(0)] = 1.0
    rate: Annotated[float, Above(0, to=1)] = 0.5
    window: Annotated[int, AtLeast(0)] = 0
    bonus: Annotated[float, AtLeast(0)] = 0.0

    def check(self, setup: Setup) -> None:
        """Raise UserError for a prompt without a category."""
        pool = setup.split[0]
        missing = next((prompt for prompt in pool if self.key not in prompt.metadata), None)
        if missing is not None:
            known = ", ".join(sorted({key for prompt in pool for key in prompt.metadata})) or "none"
            raise UserError(f"parts.curriculum.key is {self.key!r}, which the metadata of {missing.text[:60]!r} does "
                            f"not have: expected a key that every prompt has, there are: {known}")

    def __call__(self, pool: Sequence[Prompt], count: int, epoch: int, seed: int, weights: Sequence[float] | None,
                 memory: dict[str, Any], group: int) -> list[Prompt]:
        members: dict[str, list[int]] = {}
        for place, prompt in enumerate(pool):
            members.setdefault(self.category(prompt), []).append(place)
        rng, names = np.random.default_rng([seed, epoch, 0]), sorted(members)
        factors = np.array([prompt.weight for prompt in pool]) * (1.0 if weights is None else np.array(weights))
        chosen = []
        for name, number in zip(names, rng.multinomial(count, self.probabilities(memory, names))):
            lots = rng.exponential(size=len(members[name])) / np.maximum(factors[members[name]], 1e-12)
            chosen += np.resize(np.array(members[name])[lots.argsort()], number).tolist()
        return [pool[place] for place in rng.permutation(chosen)]

    def probabilities(self, memory: dict[str, Any], names: Sequence[str]) -> np.ndarray:
        return softmax(np.array(self.scores(memory, names)) / self.temperature)

    def scores(self, memory: dict[str, Any], names: Sequence[str]) -> list[float]:
        """Value of every category, with its bonus; a category that was never drawn has the value 0."""
        arms = [memory.get(ARMS, {}).get(name, [0.0, 0, []]) for name in names]
        total = sum(groups for _, groups, _ in arms)
        return [value + self.bonus * math.sqrt(2 * math.log(total + 1) / (groups + 1)) for value, groups, _ in arms]

    def learn(self, memory: dict[str, Any], drawn: EpochBatch) -> None:
        """Update the values by an epoch's groups, replaced ones too."""
        returned: dict[str, list[float]] = {}
        sizes = group_relative(drawn.totals, "group").abs().mean(1).tolist()
        for prompt, size, totals in zip(drawn.prompts, sizes, drawn.totals):
            if not totals.isnan().all():
                returned.setdefault(self.category(prompt), []).append(size)
        arms = memory.setdefault(ARMS, {})
        for name, values in returned.items():
            value, groups, last = arms.get(name, [0.0, 0, []])
            if self.window:
                last = [*deque([*last, *values], self.window)]
                value = sum(last) / len(last)
            else:
                value = (1 - self.rate) * value + self.rate * sum(values) / len(values)
            arms[name] = [value, groups + len(values), last]

    def category(self, prompt: Prompt) -> str:
        return str(prompt.metadata.get(self.key))


def predict_rates(texts: Sequence[str], references: Sequence[str], rates: Sequence[float], temperature: float
                  ) -> np.ndarray:
    """Success rates [n] of texts: means of the references' rates, weighted by softmax(similarity / temperature)."""
    similar = np.stack([features(text) for text in texts]) @ np.stack([features(text) for text in references]).T
    odds = np.exp((similar - similar.max(1, keepdims=True)) / temperature)
    return odds @ np.array(rates) / odds.sum(1)


@part("curriculum", jointly={"target fresh temperature": "0 to 1, 0 to 1, and above 0"})
class PredictedDifficulty:
    """Prompts whose predicted success rate is nearest to `target`, among `candidates` times as many
    (DOTS, 2506.05316).

    The rates of the `references` prompts that were sampled last predict those of all others: means that are weighted
    by the similarity of the prompts' words and pairs of words, where the paper trains an attention over embeddings. A
    share `fresh` of the epoch is drawn from all prompts in turn, so that references stay varied.
    """

    target: Annotated[float, AtLeast(0, to=1)] = 0.5
    candidates: Annotated[int, AtLeast(1)] = 4
    references: Annotated[int, AtLeast(1)] = 64
    temperature: Annotated[float, Above(0)] = 0.1
    fresh: Annotated[float, AtLeast(0, to=1)] = 0.25

    def __call__(self, pool: Sequence[Prompt], count: int, epoch: int, seed: int, weights: Sequence[float] | None,
                 memory: dict[str, Any], group: int) -> list[Prompt]:
        known = memory.get(RATES, {})
        most = max(min(self.candidates * count, len(pool)), count)
        candidates = sets.draw(list(pool), most, epoch, seed, weights)
        if not known:
            return candidates[:count]
        number = min(round(self.fresh * count), count)
        first, rest = candidates[:number], candidates[number:]
        sampled = [*known][-self.references:]
        rates = predict_rates([prompt.key for prompt in rest], sampled, [known[key][-1] for key in sampled],
                              self.temperature) if rest else np.empty(0)
        return first + [rest[place] for place in np.abs(rates - self.target).argsort(kind="stable")[:count - number]]

    def learn(self, memory: dict[str, Any], drawn: EpochBatch) -> None:
        """Record an epoch's rates; the prompts that were sampled last are the last in the memory."""
        record(memory, drawn)
        known = memory[RATES]
        for key in dict.fromkeys(prompt.key for prompt in drawn.prompts):
            if key in known:
                known[key] = known.pop(key)
