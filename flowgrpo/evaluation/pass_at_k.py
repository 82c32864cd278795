"""pass@k and majority vote (maj@n) over the samples of a prompt."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np

from flowgrpo.evaluation.statistics import WILSON, interval
from flowgrpo.rewards.reward import about


def pass_at_k(samples: int, right: int, k: int) -> float:
    """Return pass@k, the probability that one of k samples is right, as the unbiased estimate from n samples with c
    right: 1 - C(n - c, k) / C(n, k) (Codex, 2107.03374, equation 1).
    Raises ValueError unless 1 <= k <= n and 0 <= c <= n."""
    if not 1 <= k <= samples or not 0 <= right <= samples:
        raise ValueError(f"pass@{k} of {samples} samples, {right} of them right: expected k from 1 and right from 0 to "
                         "the number of samples")
    return 1 - math.comb(samples - right, k) / math.comb(samples, k)


def majority(answers: Sequence[Hashable | None], scores: Sequence[float]) -> float:
    """Return the score of the most common answer to a prompt; on a tie the mean over the tied answers.

    answers: None for a sample without an answer, which gets no vote. With no answers at all the score is 0. NaN if a
    score is NaN.
    """
    if any(math.isnan(score) for score in scores):
        return math.nan
    given = [answer for answer in answers if answer is not None]
    most = max(map(given.count, given), default=0)
    leading = [answer for answer in dict.fromkeys(given) if given.count(answer) == most]
    means = [np.mean([score for answer, score in zip(answers, scores) if answer == one]) for one in leading]
    return float(np.mean(means)) if means else 0.0


def powers(samples: int) -> list[int]:
    """Return 1, 2, 4, ... up to the number of samples, and that number."""
    return sorted({*(2**i for i in range(samples.bit_length())), samples})


def verdicts(rewards: dict[str, Any]) -> list[str]:
    """Return the rewards that may mean right and wrong: range 0 to 1, or unknown. A best score of 0, as of a penalty,
    is not a failure."""
    return [name for name, reward in rewards.items() if about(reward).range in (None, (0, 1))]


def tries(scores: dict[str, np.ndarray], answers: dict[str, list[list[Hashable | None]]]) -> dict[str, dict[str, Any]]:
    """Return pass@k of every reward whose scores are all 0 or 1, and maj@n of those with answers, with intervals over
    prompts.

    scores: by reward [N,S], NaN where it does not apply. answers: by the rewards that extract answers from texts,
    [N,S].
    """
    results: dict[str, dict[str, Any]] = {}
    for name, values in scores.items():
        there, count = ~np.isnan(values).any(1), values.shape[1]
        if count < 2 or not there.any() or not np.isin(values[there], (0, 1)).all():
            continue
        right = values[there].sum(1).astype(int)
        results[name] = {f"pass@{k}": _told([pass_at_k(count, c, k) for c in right.tolist()], count)
                         for k in powers(count)}
        if name in answers:
            votes = [majority(*both) for both, applies in zip(zip(answers[name], values), there) if applies]
            results[name][f"maj@{count}"] = _told(votes, count)
    return results


def _told(values: Sequence[float], samples: int) -> dict[str, Any]:
    return interval(np.array(values)[:, None], WILSON, samples).as_json()
