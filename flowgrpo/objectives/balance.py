"""Balance of the reinforcement gradient and the data gradient in an optimizer step: `balance(now) -> (RL, data)`.

The step's gradient is RL * g_reinforcement + data * g_data.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated

from flowgrpo.parts import Above, AtLeast, part


@dataclass(frozen=True)
class Now:
    """State of a run at an optimizer step.

    update: the number of earlier optimizer steps.
    drawn: a uniform number in [0, 1), by the seed and the step.
    norms: of the reinforcement gradient and the data gradient, for a balance with `reads_norms`.
    signals: by objective ("rl", "data"), a number of each earlier epoch: the mean reward, and the mean data loss.
    """

    update: int
    drawn: float = 0.0
    norms: tuple[float, float] = (0.0, 0.0)
    signals: dict[str, Sequence[float]] = field(default_factory=dict)


class Balance:
    """Weights of the two gradients; base class.

    reads_norms: it reads the norms of both gradients.
    """

    reads_norms = False

    def __call__(self, now: Now) -> tuple[float, float]:
        """Return the weights (RL, data) of an optimizer step. Data of weight 0 are not computed."""
        raise NotImplementedError


@part("data.balance", jointly={"data rl": "above 0, and 0 or more"})
class FixedWeights(Balance):
    """Equal weights in every step: `rl` * L_RL + `data` * L_data."""

    data: Annotated[float, Above(0)] = 0.1
    rl: Annotated[float, AtLeast(0)] = 1.0

    def __call__(self, now: Now) -> tuple[float, float]:
        return self.rl, self.data


@part("data.balance")
class WarmupCosine(Balance):
    """(1 - mu) L_RL + mu L_data (CHORD, 2508.11408): mu rises linearly from 0 to `peak` in `warmup` optimizer steps,
    falls as a cosine to `valley` in the next `decay` ones, and stays there."""

    peak: float = 0.5
    valley: float = 0.02
    warmup: Annotated[int, AtLeast(0)] = 20
    decay: Annotated[int, AtLeast(0)] = 200

    def __post_init__(self) -> None:
        if not 0 <= self.valley <= self.peak <= 1 or self.peak == 0:
            raise ValueError(f"WarmupCosine: peak is {self.peak} and valley {self.valley}, expected 0 <= valley <= "
                             "peak <= 1, and a peak above 0")

    def __call__(self, now: Now) -> tuple[float, float]:
        mu = self.mu(now.update)
        return 1 - mu, mu

    def mu(self, update: int) -> float:
        """Return mu of an optimizer step, counted from 0."""
        if update < self.warmup:
            return self.peak * update / self.warmup
        if update >= self.warmup + self.decay:
            return self.valley
        fallen = 0.5 - 0.5 * math.cos(math.pi * (update - self.warmup) / self.decay)
        return self.peak + (self.valley - self.peak) * fallen


@part("data.balance", reads_norms=True, jointly={"gamma warmup": "above 0, and 0 or more"})
class GradientNorms(Balance):
    """One of the two losses in each step, chosen at random: data with probability |g_data| / (|g_data| + gamma |g_RL|)
    (SASR, 2505.13026). The first `warmup` optimizer steps learn from data alone.

    Far from the data their gradient is large, and they are drawn often. Draws go by the run's seed and the step.
    """

    gamma: Annotated[float, Above(0)] = 1.0
    warmup: Annotated[int, AtLeast(0)] = 0

    def __call__(self, now: Now) -> tuple[float, float]:
        data = now.update < self.warmup or now.drawn < self.probability(*now.norms)
        return (0.0, 1.0) if data else (1.0, 0.0)

    def probability(self, rl: float, data: float) -> float:
        """Return the probability of data, for the norms of both gradients; 0 where both are 0."""
        whole = data + self.gamma * rl
        return data / whole if whole else 0.0


@part("data.balance", jointly={"window temperature": "1 or more, and above 0"})
class Convergence(Balance):
    """Weights that move to the objective that converges least: they sum to 1, and volatility counts too (RECAP,
    2510.21978, equation 1).

    The weights are the softmax over `temperature` of c + i, equal until 2 `window` epochs are over. Of a data loss with
    the mean m over the last `window` epochs, and n over those before: c = m / n, i the deviation (ddof 0) of the last
    ones over m + n. Of the mean reward c is n / m: it falls as a reward grows. The inverse is ours, as are epochs in
    place of steps; both signals should be above 0.
    """

    window: Annotated[int, AtLeast(1)] = 3
    temperature: Annotated[float, Above(0)] = 5.0

    def __call__(self, now: Now) -> tuple[float, float]:
        seen = [list(now.signals.get(name, ()))[-2 * self.window:] for name in ("rl", "data")]
        if min(map(len, seen)) < 2 * self.window:
            return 0.5, 0.5
        rl, data = self.priority(seen[0], rises=True), self.priority(seen[1])
        share = 1 / (1 + math.exp(max(-700.0, min((data - rl) / self.temperature, 700.0))))
        return share, 1 - share

    def priority(self, values: Sequence[float], rises: bool = False) -> float:
        """Return c + i of an objective's values, oldest first. rises: they are rewards, not losses."""
        recent = values[self.window:]
        before, last = (sum(half) / self.window for half in (values[:self.window], recent))
        deviation = math.sqrt(sum((value - last) ** 2 for value in recent) / self.window)
        above, below = (before, last) if rises else (last, before)
        return above / max(below, 1e-8) + deviation / max(last + before, 1e-8)
