"""Head on frozen features that learns a taste from votes, and the evidence that the votes have one.

The score of an image is linear in its features, s = w z. The probability that it is the best of those shown is
softmax(s): Plackett-Luce, of two images Bradley-Terry. A taste may change: w has the prior N(0, v) and drifts to it,
w <- a w + sqrt(1 - a^2) N(0, v) at each vote, with a^h = 1/2 after h votes. A vote updates mean and covariance of w by
Laplace's approximation (an iterated Kalman filter). Several v and h, on each block of the features and on all of them,
are tried as experts. Each predicts a vote before it learns from it; the mixture trusts an expert by these predictions,
with a fixed share for all (Herbster and Warmuth, 1998). So neither v nor a is chosen by looking at the votes twice.

Evidence. A gambler begins with 1 and stakes all of it on each vote by the mixture's probabilities q; if one of k images
is chosen, the capital becomes k q(chosen) times as much. Images are shown in random places. So whoever chooses without
looking, by chance or by place, chooses each with probability 1 / k, and the capital is a martingale: in 5 % of such
sessions at most it ever reaches 20 (Ville, 1939), however often one looks (Ramdas and others, 2210.01948).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import TypeAlias

import torch
from torch import Tensor

from flowgrpo.contrib.taste.votes import Vote

DEVIATIONS = (0.7, 2.0)  # of scores within a question, by the prior, of each block of features
HALF_LIVES = (math.inf, 60.0, 20.0)  # votes
SHARE = 0.01  # of the trust, which all experts get at each vote
DIRECTIONS = 256  # of a block of features, which a head looks at: those in which the first images differ
CHANCE = 0.05  # of sessions without a taste, which are taken for one with a taste
NEWTON = 8  # steps at most
LENGTHS = torch.tensor([1.0, 0.5, 0.25, 0.1, 0.03, 0.0], dtype=torch.double)  # of a step, of which the best is taken
Seen: TypeAlias = tuple[Tensor, list[float]]  # features [k, F] of the images shown, and the vote's shares [k]


def observe(features: Tensor, vote: Vote) -> Seen | None:
    """Features of the shown images, of [n, F] of the question's, and the vote's target; None for a skipped vote."""
    return None if vote.target is None else (features[list(vote.shown)], vote.target)


@dataclass(frozen=True)
class Head:
    """Linear score of features [B, F]: features / scale @ weight."""

    scale: Tensor
    weight: Tensor

    def __call__(self, features: Tensor) -> Tensor:
        """Scores [B], float64. Differences between images of a prompt are log-odds."""
        return (features.double() / self.scale) @ self.weight


def spread(questions: Tensor, blocks: Sequence[int]) -> Tensor:
    """The scale [F] of features [Q, n, F]: divided by it, a block's variance within a question is 1 in all; inf for a
    constant feature."""
    features = questions.double()
    deviation = features.var(1).mean(0).sqrt()
    known = deviation > 1e-8 * features.abs().amax((0, 1)).clamp(min=1e-30)
    widths = torch.cat([torch.full((width,), float(width), dtype=torch.double) for width in blocks])
    return torch.where(known, deviation, torch.inf) * widths.sqrt()


class Belief:
    """Experts on a taste, one for each prior and half-life, and the trust in each after the votes so far.

    first: features [Q, n, F] of the first questions, which give the scale of all. blocks: widths of the blocks of
    features, which sum to F; each gives the scores the same variance.
    votes: learned. capital: the logarithm of the gambler's; most: its largest value so far.
    """

    def __init__(self, first: Tensor, blocks: Sequence[int], deviations: Sequence[float] = DEVIATIONS,
                 half_lives: Sequence[float] = HALF_LIVES, share: float = SHARE):
        # What an expert looks at: one block of the features, or all of them.
        looks = torch.eye(len(blocks)).tolist() + [[1.0] * len(blocks)] * (len(blocks) > 1)
        experts = [*product(half_lives, deviations, looks)]
        self.blocks, self.scale, self.share = [*blocks], spread(first, blocks), share
        self.decay = torch.tensor([0.5 ** (1 / half) for half, _, _ in experts], dtype=torch.double)
        self.prior = torch.tensor([[deviation * seen for seen in of] for _, deviation, of in experts],
                                  dtype=torch.double).square()  # [E, blocks]
        self.trust = torch.full((len(experts),), 1 / len(experts), dtype=torch.double)
        self.bases = [torch.zeros(width, 0, dtype=torch.double) for width in blocks]  # [F of the block, directions]
        self.block = torch.zeros(0, dtype=torch.long)  # of each of the R coordinates
        self.mean = torch.zeros(len(experts), 0, dtype=torch.double)  # [E, R]
        self.covariance = torch.zeros(len(experts), 0, 0, dtype=torch.double)  # [E, R, R]
        self.votes, self.capital, self.most = 0, 0.0, 0.0

    @property
    def evidence(self) -> float:
        """The largest capital so far, at most 1e300."""
        return math.exp(min(self.most, math.log(1e300)))

    @property
    def convinced(self) -> bool:
        """True once votes without a taste would have reached the capital in at most CHANCE of sessions."""
        return self.evidence >= 1 / CHANCE

    def learn(self, votes: Sequence[Seen]) -> tuple[int, int]:
        """Predict votes and learn from them, one by one; return how many of the decided ones were right, and all."""
        scaled = [features.double() / self.scale for features, _ in votes]
        rows = [features - features.mean(0) for features in scaled]
        if rows:
            self._look(torch.cat(rows))
        right = decided = 0
        for row, (_, target) in zip(rows, votes):
            # The row in the directions that are looked at, [k, R].
            at = row.new_zeros(len(row), len(self.block))
            for number, part in enumerate(row.split(self.blocks, 1)):
                at[:, self.block == number] = part @ self.bases[number]
            # Predict before learning: only then is a right prediction evidence of a taste.
            self._drift()
            gains, scores = self.covariance @ at.T, self.mean @ at.T  # [E, R, k], [E, k]
            predicted = _predict(scores, at @ gains)
            if max(target) == 1:
                chosen = target.index(1.0)
                decided, right = decided + 1, right + int((self.trust @ predicted).argmax() == chosen)
                self._bet(predicted[:, chosen], len(target))
            self._update(scores, at @ gains, gains, torch.tensor(target, dtype=torch.double))
            self.votes += 1
        return right, decided

    def head(self) -> Head:
        """The mean of the experts by the trust in them."""
        weight = self.trust @ self.mean
        return Head(self.scale, torch.cat([basis @ weight[self.block == number]
                                           for number, basis in enumerate(self.bases)]))

    def _look(self, rows: Tensor) -> None:
        """Add the directions of rows [N, F] that are new, up to DIRECTIONS of a block; no vote so far has said anything
        of these."""
        for number, part in enumerate(rows.split(self.blocks, 1)):
            basis = self.bases[number]
            for _ in range(2):  # twice: the first leaves rounding
                part = part - part @ basis @ basis.T
            _, values, found = torch.linalg.svd(part, full_matrices=False)
            new = found[values > 1e-3][:DIRECTIONS - basis.shape[1]].T
            self.bases[number] = torch.cat([basis, new], 1)
            count, known = new.shape[1], len(self.block)
            self.block = torch.cat([self.block, torch.full((count,), number)])
            self.mean = torch.nn.functional.pad(self.mean, (0, count))
            self.covariance = torch.nn.functional.pad(self.covariance, (0, count, 0, count))
            at = torch.arange(known, known + count)
            self.covariance[:, at, at] = self.prior[:, number, None]

    def _drift(self) -> None:
        square = self.decay.square()
        self.mean *= self.decay[:, None]
        self.covariance *= square[:, None, None]
        self.covariance.diagonal(dim1=1, dim2=2).add_((1 - square)[:, None] * self.prior[:, self.block])

    def _bet(self, probability: Tensor, images: int) -> None:
        """Let the gambler win or lose a vote, of which each expert gave the chosen image a probability [E]."""
        mixed = float(self.trust @ probability)
        self.capital += math.log(images * mixed)
        self.most = max(self.most, self.capital)
        self.trust = (1 - self.share) * self.trust * probability / mixed + self.share / len(self.trust)

    def _update(self, s0: Tensor, a: Tensor, gains: Tensor, target: Tensor) -> None:
        """Learn from a vote: the scores are s0 + A u at the mode, where u = target - softmax.

        s0: [E, k], with the covariance a [E, k, k]; gains: their covariance with w, [E, R, k].
        """
        eye = torch.eye(len(target), dtype=a.dtype)
        u = torch.zeros_like(s0)

        def scores(u: Tensor) -> Tensor:
            return s0 + (a @ u[..., None])[..., 0]

        def posterior(u: Tensor) -> Tensor:
            return (target * scores(u).log_softmax(-1)).sum(-1) - (u * (scores(u) - s0)).sum(-1) / 2

        for _ in range(NEWTON):
            p = scores(u).softmax(-1)
            step = torch.linalg.solve(eye + _curvature(p) @ a, u - target + p)
            if step.abs().max() < 1e-9:
                break
            tried = u - LENGTHS[:, None, None] * step
            u = tried[posterior(tried).argmax(0), torch.arange(len(u))]
        curvature = _curvature(scores(u).softmax(-1))
        self.mean = self.mean + (gains @ u[..., None])[..., 0]
        self.covariance.baddbmm_(gains @ torch.linalg.solve(eye + curvature @ a, curvature), gains.mT, alpha=-1)


def _predict(scores: Tensor, covariance: Tensor) -> Tensor:
    """The probabilities [E, k] that images are chosen, of scores [E, k] with a covariance [E, k, k].

    Scores shrink by the variance of their differences, 2 v, as in MacKay (1992): s / sqrt(1 + pi 2 v / 8).
    """
    images = scores.shape[1]
    variance = (covariance.diagonal(dim1=1, dim2=2).sum(1) - covariance.sum((1, 2)) / images) / (images - 1)
    return (scores / (1 + math.pi / 4 * variance).sqrt()[:, None]).softmax(1)


def _curvature(p: Tensor) -> Tensor:
    """diag(p) - p p' [E, k, k] of probabilities p [E, k]."""
    return p.diag_embed() - p[..., None] * p[..., None, :]
