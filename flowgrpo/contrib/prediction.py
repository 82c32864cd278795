"""Success rates predicted from those of similar prompts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np

from flowgrpo.curriculum.history import RATES, record
from flowgrpo.data import sets
from flowgrpo.data.prompts import Prompt
from flowgrpo.data.selection import features
from flowgrpo.parts import Above, AtLeast, part

if TYPE_CHECKING:
    from flowgrpo.curriculum.epoch_batch import EpochBatch


def predict_rates(texts: Sequence[str], references: Sequence[str], rates: Sequence[float], temperature: float
                  ) -> np.ndarray:
    """Return the success rates [n] of texts: means of the references' rates, weighted by softmax(similarity /
    temperature)."""
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
