"""Choice of prompts from sets: without duplicates, by recorded success rates, in a mixture; and features of texts
without a model: hashed words and pairs of words. Pure functions.
"""

import functools
import itertools
import re
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from flowgrpo.data.prompts import Prompt
from flowgrpo.errors import UserError
from flowgrpo.nouns import quantity

_WORD = re.compile(r"\w+")
Rates = Mapping[str, Sequence[float]]  # success rates by a prompt's key, the oldest first
TRIALS, NEAR = 20_000, 4_000  # mixtures that are tried: anywhere, and near the best one
GRAM = 3  # words of an n-gram by which near repetitions are found
WIDTH = 512  # of a text's features
_WORDS = re.compile(r"\w+|[^\w\s]")


def words_of(text: str) -> list[str]:
    """Words of a text in lower case, without punctuation."""
    return _WORD.findall(text.lower())


def deduplicate(prompts: Sequence[Prompt], near: float | None = None) -> list[Prompt]:
    """Prompts without repetitions, the first one of each kept.

    Two texts are the same if their words are; and near each other if the share of GRAM words in a row that both have,
    among those that either has (Jaccard), is at least `near`. Prompts with different files are never the same.
    """
    kept: list[Prompt] = []
    exact: set[tuple[str, ...]] = set()
    sizes: list[int] = []  # numbers of n-grams of the kept ones
    holding: dict[tuple[str, ...], list[int]] = {}
    for prompt in prompts:
        words, files = words_of(prompt.text), prompt.key.split("\n")[1:]
        identity = (*words, "\n", *files)
        if identity in exact:
            continue
        exact.add(identity)
        if near is not None:
            grams = {(*words[at:at + GRAM], "\n", *files) for at in range(max(len(words) - GRAM + 1, 1))}
            shared = Counter(place for gram in grams for place in holding.get(gram, ()))
            if any(count / (len(grams) + sizes[place] - count) >= near for place, count in shared.items()):
                continue
            for gram in grams:
                holding.setdefault(gram, []).append(len(kept))
            sizes.append(len(grams))
        kept.append(prompt)
    return kept


def within(prompts: Sequence[Prompt], rates: Rates, low: float, high: float) -> list[Prompt]:
    """Prompts whose newest success rate is from low to high; of those without one, none."""
    return [prompt for prompt in prompts if rates.get(prompt.key) and low <= rates[prompt.key][-1] <= high]


def rank(prompts: Sequence[Prompt], rates: Rates, by: str) -> list[Prompt]:
    """Prompts that have rates by rank: "hardest", the lowest newest rate first; "variance", the largest variance of all
    rates first; "middling", the newest rate nearest to 1/2 first. Equal ones stay in order."""
    value = {"hardest": lambda past: past[-1], "variance": lambda past: -float(np.var(past)),
             "middling": lambda past: abs(past[-1] - 0.5)}[by]
    return sorted((prompt for prompt in prompts if rates.get(prompt.key)), key=lambda prompt: value(rates[prompt.key]))


def mix(sets: Sequence[Sequence[Prompt]], weights: Sequence[float], count: int | None, seed: int) -> list[Prompt]:
    """Prompts of several sets in proportion to `weights`.

    With a count, so many prompts, drawn at random from each set. Without one, all prompts, whose own weights then give
    the sets their shares of training. Raises UserError for a set with fewer prompts than its share.
    """
    shares = np.array(weights) / sum(weights)
    if count is None:
        if len(sets) == 1:
            return list(sets[0])
        whole = sum(map(len, sets))
        return [replace(prompt, weight=prompt.weight * share * whole / sum(each.weight for each in prompts))
                for prompts, share in zip(sets, shares) for prompt in prompts]
    exact = shares * count
    numbers = np.floor(exact).astype(int)
    for place in (numbers - exact).argsort(kind="stable")[:count - numbers.sum()]:  # the largest remainders
        numbers[place] += 1
    for number, (prompts, taken) in enumerate(zip(sets, numbers), 1):
        if taken > len(prompts):
            raise UserError(f"--count {count}: set {number} has {quantity(len(prompts), 'prompt')}, and its share is "
                            f"{taken}: give it a smaller weight, or a --count of at most "
                            f"{int(len(prompts) / shares[number - 1])}")
    rng = np.random.default_rng(seed)
    return [prompts[place] for prompts, taken in zip(sets, numbers)
            for place in sorted(rng.permutation(len(prompts))[:taken])]


def best_mixture(mixtures: Sequence[Sequence[float]], scores: Sequence[float], seed: int = 0) -> np.ndarray:
    """Mixture [k] with the largest predicted score, of a quadratic surrogate fitted to the scores [n] of tried mixtures
    [n,k] (MoDoMoDo, 2505.24871): on the simplex, sum b_i x_i + sum b_ij x_i x_j, i < j. Mixtures are divided by their
    sums. Raises UserError for fewer mixtures than it has coefficients."""
    tried = np.array(mixtures, dtype=float)
    tried /= tried.sum(1, keepdims=True)
    fitted = _quadratic(tried)
    if len(tried) < fitted.shape[1]:
        raise UserError(f"{len(tried)} mixtures of {tried.shape[1]} sets: expected at least {fitted.shape[1]}, as many "
                        "as the surrogate has coefficients")
    coefficients = np.linalg.lstsq(fitted, np.array(scores, dtype=float), rcond=None)[0]
    rng, size = np.random.default_rng(seed), tried.shape[1]
    trials = np.concatenate([np.eye(size), rng.dirichlet(np.ones(size), TRIALS)])
    for width in (0.0, 0.05, 0.01, 0.002):
        best = trials[(_quadratic(trials) @ coefficients).argmax()]
        moved = np.clip(best + width * rng.normal(size=(NEAR, size)), 0, None)
        trials = np.concatenate([best[None], moved / moved.sum(1, keepdims=True)])
    return trials[(_quadratic(trials) @ coefficients).argmax()]


def _quadratic(mixtures: np.ndarray) -> np.ndarray:
    """Terms of the surrogate: [n, k + k (k - 1) / 2]."""
    pairs = [mixtures[:, i] * mixtures[:, j] for i, j in itertools.combinations(range(mixtures.shape[1]), 2)]
    return np.column_stack([mixtures, *pairs])


@functools.lru_cache(maxsize=65536)
def features(text: str, width: int = WIDTH) -> np.ndarray:
    """Counts of a text's words and pairs of words, hashed to `width` places, of length 1: [width]."""
    words, counts = _WORDS.findall(text.lower()), np.zeros(width)
    for gram in [*words, *(" ".join(pair) for pair in zip(words, words[1:]))]:
        counts[zlib.crc32(gram.encode()) % width] += 1
    return counts / max(float(np.linalg.norm(counts)), 1e-12)
