"""Supervised terms beside a policy gradient: their balance, weights of their tokens, and `LayerTuning`.

A balance is `balance(now) -> (RL, data)`: the step's gradient is RL * g_reinforcement + data * g_data.

A weight of tokens is `part(logp, entropy, mask) -> weights`, all [B, L], without a gradient; logp: log-probabilities
under the present weights; mask: true for tokens of the answer.

`LayerTuning` (Dynamic-TreeRPO, 2509.23352) is a reconstruction. Its abstract and reviews give these facts. The clip
bounds lie between two values and depend on the reward with a sensitivity (its equation 11). A regression to the
prediction along the best path of the group, dynamically weighted as a progress reward, is added with a coefficient
(equation 13). The equations themselves could not be read. The forms here (the sigmoid in both bounds, progress as the
gain of the mean advantage) are ours.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Literal

import torch
from torch import Tensor

from flowgrpo.objectives.kl import like_tensor
from flowgrpo.parts import Above, AtLeast, part
from flowgrpo.types import RegressionTarget, Scored, unwrap, wide


@part("tuning")
class LayerTuning:
    """weight * w * mean((v - v*)^2) per decision, [B, 1] (LayerTuning, 2509.23352, a reconstruction).

    v is the model's output on a sample's own state. v* is the old policy's at the same step on the path to the best
    sample of its group. Weight 0 omits the term and reads no means.

    by: what w is, 0 where it is negative. "advantage": that of the best sample, at every step. "progress": what its
        path gained at this step, the mean advantage of the samples below its edge less that of the samples below the
        state that the edge leaves. Over the steps of a tree these gains add up to the best sample's advantage above its
        root's mean; a step that splits nothing gains nothing.
    A group without variance has no pull (`towards_best`).
    """

    weight: Annotated[float, AtLeast(0)] = 0.0
    by: Literal["advantage", "progress"] = "advantage"

    def weights(self, advantages: Tensor, edges: int, states: int) -> Tensor:
        """Weight w [N] of each group at one step.

        advantages: [N, G] of the samples. edges, states: transitions of the step in a group, and states that they
        leave.
        """
        top, best = advantages.max(dim=1)
        if self.by == "advantage":
            return top.clamp(min=0)
        width = advantages.shape[1]
        after, before = (advantages.unflatten(1, (count, -1)).mean(2).gather(1, (best * count // width)[:, None])
                         for count in (edges, states))
        return (after - before)[:, 0].clamp(min=0)

    def __call__(self, new: Scored, regression_target: RegressionTarget) -> Tensor:
        assert new.mean is not None and new.slope is not None, "LayerTuning needs means and slopes"
        # A mean is affine in the output: the difference of outputs is that of means over the slope.
        apart = (new.mean - regression_target.mean).square().flatten(2).mean(dim=2)
        return self.weight * regression_target.weight * apart / like_tensor(new.slope, apart).square()


class TokenWeight:
    """Weights of tokens; base class.

    reads_entropy: it reads the entropy of each token's distribution, in nats.
    """

    reads_entropy = False

    def __call__(self, logp: Tensor, entropy: Tensor | None, mask: Tensor) -> Tensor:
        """Weights [B, L]; 1 for every token unless it is overridden."""
        return torch.ones_like(logp)

    def distribution(self, seed: int) -> "Drawn | None":
        """Return what reads the model's logits in place of their log-softmax; None: nothing. seed: of its draws."""
        return None


@part("data.token_weight")
class EqualTokens(TokenWeight):
    """1 for every token: plain cross entropy."""


@part("data.token_weight")
class Uncertain(TokenWeight):
    """p (1 - p) of the token's probability p (CHORD, 2508.11408): 1/4 at p = 1/2, and 0 for tokens that the policy is
    sure of or would never say."""

    def __call__(self, logp: Tensor, entropy: Tensor | None, mask: Tensor) -> Tensor:
        p = logp.detach().exp()
        return p * (1 - p)


@part("data.token_weight", reads_entropy=True)
class EntropyAware(TokenWeight):
    """scale * exp(-H), H the mean entropy of the answer's tokens (SRFT, 2506.19767): an answer counts less where the
    policy wavers. The mean per answer is our choice."""

    scale: Annotated[float, Above(0)] = 0.5

    def __call__(self, logp: Tensor, entropy: Tensor | None, mask: Tensor) -> Tensor:
        known = unwrap(entropy).detach() * mask
        mean = known.sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp(min=1)
        return (self.scale * (-mean).exp()).expand_as(logp)


@part("data.token_weight", jointly={"samples wrong": "1 or more, and 0 or less"})
class OneToken(TokenWeight):
    """Policy gradient on tokens sampled at every position of the answer (One-Token Rollout, 2509.26313).

    At each place `samples` tokens are drawn from the policy, behind the answer's own beginning. A drawn token of the
    answer has the reward 1, another one `wrong`. The loss of a place is -(1/K) sum of R log p(drawn). Where the
    answer's token is never drawn and `wrong` is 0, a place has no gradient.
    """

    samples: Annotated[int, AtLeast(1)] = 64
    wrong: Annotated[float, AtLeast(-math.inf, to=0)] = 0.0

    def distribution(self, seed: int) -> "Drawn":
        return Drawn(self.samples, self.wrong, seed)


@dataclass(frozen=True)
class Drawn:
    """Objective of a place, at its token: the mean of reward times log-probability over `samples` drawn tokens.
    It is called as a decoding is, for logits [n,V] and their tokens `taken` [n]."""

    samples: int
    wrong: float
    seed: int

    def __call__(self, logits: Tensor, taken: Tensor | None = None) -> Tensor:
        (logits,) = wide(logits)
        log_probs, tokens = logits.log_softmax(-1), unwrap(taken)
        generator = torch.Generator(logits.device).manual_seed(self.seed)  # anew: a backward pass may compute it again
        drawn = torch.multinomial(log_probs.detach().exp(), self.samples, replacement=True, generator=generator)
        reward = torch.where(drawn == tokens[:, None], 1.0, self.wrong).to(log_probs)
        value = (reward * log_probs.gather(1, drawn)).mean(1, keepdim=True)
        return torch.zeros_like(log_probs).scatter(1, tokens[:, None], value)

    def temperatures(self, ids: Tensor) -> Tensor | None:
        return None


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
        """Weights (RL, data) of an optimizer step. Data of weight 0 are not computed."""
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
        if now.update < self.warmup:
            mu = self.peak * now.update / self.warmup
        elif now.update >= self.warmup + self.decay:
            mu = self.valley
        else:
            fallen = 0.5 - 0.5 * math.cos(math.pi * (now.update - self.warmup) / self.decay)
            mu = self.peak + (self.valley - self.peak) * fallen
        return 1 - mu, mu


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
        """Probability of data, for the norms of both gradients; 0 where both are 0."""
        whole = data + self.gamma * rl
        return data / whole if whole else 0.0


@part("data.balance", reads_norms=True)
class EqualNorms(Balance):
    """L_RL + w L_data, with w such that the data gradient has `share` of the reinforcement gradient's norm.

    An optimizer with one state for both then follows both, however far apart their losses are. A step without a
    reinforcement gradient leaves the data out; one without a data gradient is the reinforcement gradient's.
    """

    share: Annotated[float, Above(0)] = 1.0

    def __call__(self, now: Now) -> tuple[float, float]:
        rl, data = now.norms
        return 1.0, self.share * rl / data if data else 0.0


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
        rl = self.priority(seen[0], rises=True)
        data = self.priority(seen[1])
        share = 1 / (1 + math.exp(max(-700.0, min((data - rl) / self.temperature, 700.0))))
        return share, 1 - share

    def priority(self, values: Sequence[float], rises: bool = False) -> float:
        """Return c + i of an objective's values, oldest first. rises: they are rewards, not losses."""
        recent = values[self.window:]
        before, last = (sum(half) / self.window for half in (values[:self.window], recent))
        deviation = math.sqrt(sum((value - last) ** 2 for value in recent) / self.window)
        above, below = (before, last) if rises else (last, before)
        return above / max(below, 1e-8) + deviation / max(last + before, 1e-8)
