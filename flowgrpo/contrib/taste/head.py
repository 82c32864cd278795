"""Head on frozen features that learns a taste from votes: Plackett-Luce on the best of several, Bradley-Terry on two.

The score of an image is linear in its features, s = w z. The probability that it is the best of those shown is
softmax(s). The loss is the cross-entropy to the vote's shares, of which a tie gives each the same, plus a ridge on w.
It is convex; Newton's method solves it. The ridge is the best of a few by approximate leave-one-out (Rad and Maleki,
1801.10243, on groups of rows): with A = Z H^-1 Z' of a vote's rows, p their probabilities and W = diag(p) - p p', its
scores without it are s + A (1 - W A)^-1 (p - y).

A head beats chance if votes that are left out are likelier by it than by equal shares, by more than one standard error
of the mean difference (the rule of Breiman and others, 1984).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from flowgrpo.contrib.taste.votes import Vote

RIDGES = (1e-3, 1e-2, 1e-1, 1.0)  # per vote, of features of mean square 1 / F
ITERATIONS = 30
DIRECTIONS = 256  # of the features' largest spread, which a head looks at where there are more
Seen: TypeAlias = tuple[Tensor, list[float]]  # features [k, F] of the images shown, and the vote's shares [k]


def observe(features: Tensor, vote: Vote) -> Seen | None:
    """Return what a vote teaches; None for a skipped one. features: [n, F] of all images of its question."""
    return None if vote.target is None else (features[list(vote.shown)], vote.target)


@dataclass(frozen=True)
class Head:
    """Linear score of features [B, F]: (features - mean) / scale @ weight.

    ridge: chosen, 0 of an empty head. gain: mean log-likelihood of a vote that is left out, above chance, in nats;
    error: its standard error.
    """

    mean: Tensor
    scale: Tensor
    weight: Tensor
    ridge: float = 0.0
    gain: float = 0.0
    error: float = 0.0

    def beats_chance(self, errors: float = 1.0) -> bool:
        """Return True if it predicts votes better than chance, by more than so many standard errors."""
        return self.gain > errors * self.error

    def __call__(self, features: Tensor) -> Tensor:
        """Return scores [B], float64. Differences between images of a prompt are log-odds."""
        return ((features.double() - self.mean) / self.scale) @ self.weight

    def right(self, votes: Sequence[Seen]) -> tuple[int, int]:
        """Return how many of the decided votes it foretells, and their number."""
        decided = [(of, target) for of, target in votes if max(target) == 1]
        return sum(int(self(of).argmax()) == target.index(1.0) for of, target in decided), len(decided)


def fit_head(votes: Sequence[Seen], ridges: Sequence[float] = RIDGES) -> Head:
    """Return the head of all votes. It scores 0 where there are none."""
    rows = torch.cat([of for of, _ in votes]).double() if votes else torch.zeros(1, 1, dtype=torch.double)
    mean, spread = rows.mean(0), rows.std(0, correction=0)
    scale = torch.where(spread > 1e-8 * rows.abs().amax(0).clamp(min=1e-30), spread, torch.inf) * rows.shape[1]**0.5
    nothing = Head(mean, scale, torch.zeros_like(mean))
    if not votes:
        return nothing
    z, basis = _reduce((rows - mean) / scale)
    sizes = [len(target) for _, target in votes]
    shares = [torch.tensor(target, dtype=torch.double) for _, target in votes]
    groups = list(zip(z.split(sizes), shares))
    found = {ridge: _leave_one_out(groups, ridge * len(votes)) for ridge in ridges}
    ridge = max(found, key=lambda one: float(found[one][0].mean()))
    gains, w = found[ridge]
    error = float(gains.std()) / len(votes)**0.5 if len(votes) > 1 else math.inf
    return Head(mean, scale, basis @ w, ridge, float(gains.mean()), error)


def _reduce(z: Tensor) -> tuple[Tensor, Tensor]:
    """Return (z in coordinates of its own rows' space [N, r], the basis [F, r]): a ridge's solution lies in it.

    r is DIRECTIONS at most.
    """
    if z.shape[1] <= min(z.shape[0], DIRECTIONS):
        return z, torch.eye(z.shape[1], dtype=z.dtype)
    wide = z.shape[1] > z.shape[0]
    values, vectors = torch.linalg.eigh(z @ z.T if wide else z.T @ z)
    kept = [at for at in range(len(values))[-DIRECTIONS:] if values[at] > 1e-12 * values[-1].clamp(min=1e-300)]
    basis = z.T @ (vectors[:, kept] / values[kept].sqrt()) if wide else vectors[:, kept]
    return z @ basis, basis


def fit_ridge(groups: Sequence[Seen] | Sequence[tuple[Tensor, Tensor]], ridge: float) -> tuple[Tensor, Tensor]:
    """Return (w [r], the Hessian [r, r]) at the minimum of the summed cross-entropies + ridge |w|^2 / 2."""
    width = groups[0][0].shape[1]
    w, eye = torch.zeros(width, dtype=torch.double), torch.eye(width, dtype=torch.double)
    stacked: dict[int, tuple[Tensor, Tensor]] = {}
    for size in {len(target) for _, target in groups}:
        of = [(z, torch.as_tensor(target, dtype=torch.double)) for z, target in groups if len(target) == size]
        stacked[size] = torch.stack([z for z, _ in of]), torch.stack([target for _, target in of])
    for _ in range(ITERATIONS):
        gradient, hessian = ridge * w, ridge * eye
        for z, target in stacked.values():
            p = (z @ w).softmax(1)
            gradient = gradient + torch.einsum("vkr,vk->r", z, p - target)
            centred = (z - torch.einsum("vk,vkr->vr", p, z)[:, None]) * p.sqrt()[..., None]
            flat = centred.flatten(0, 1)
            hessian = hessian + flat.T @ flat
        step = torch.linalg.solve(hessian, gradient)
        slope, now, length = float(gradient @ step), _loss(stacked, w, ridge), 1.0
        while length > 1e-4 and _loss(stacked, w - length * step, ridge) > now - 1e-4 * length * slope:
            length /= 2
        w = w - length * step
        if slope < 1e-12 * (1 + abs(now)):
            break
    return w, hessian


def _loss(stacked: dict[int, tuple[Tensor, Tensor]], w: Tensor, ridge: float) -> float:
    losses = [-(target * (z @ w).log_softmax(1)).sum() for z, target in stacked.values()]
    return float(torch.stack(losses).sum() + ridge / 2 * w @ w)


def _leave_one_out(groups: Sequence[tuple[Tensor, Tensor]], ridge: float) -> tuple[Tensor, Tensor]:
    """Return (log-likelihoods [N] of votes that are left out one by one, above those of chance; w)."""
    w, hessian = fit_ridge(groups, ridge)
    inverse = torch.linalg.inv(hessian)
    gains = []
    for z, target in groups:
        s = z @ w
        p = s.softmax(0)
        a = z @ inverse @ z.T
        without = s + a @ torch.linalg.solve(torch.eye(len(s), dtype=s.dtype) - (p.diag() - torch.outer(p, p)) @ a,
                                             p - target)
        gains.append(target @ without.log_softmax(0) + math.log(len(s)))
    return torch.stack(gains), w
