"""Evolution of a LoRA's singular values by forward passes alone (ESSA): `flowgrpo contrib evolve`.

No gradient and no log-probability is computed, so that any reward fits. The search is separable CMA-ES (Ros and Hansen
2008); the paper's is CMA-ES with a full covariance.
"""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from flowgrpo.errors import UserError
from flowgrpo.policies.weights import adapters
from flowgrpo.policies.weights.trainable import TrainableWeights
from flowgrpo.storage import atomic


class SingularValues:
    """Search space: the singular values of the product B A of every LoRA layer, [rank x layers].

    A layer is B = Q diag(s) and A = V, whose product is as before. Raises UserError for a LoRA whose products are 0, as
    of a new one.
    """

    def __init__(self, weights: TrainableWeights):
        self.pairs: list[tuple[torch.nn.Parameter, Tensor]] = []  # B, and Q in its shape
        first = []
        with torch.no_grad():
            for layer in weights.layers().values():
                a, b = (cast(Any, part)["default"].weight for part in (layer.lora_A, layer.lora_B))
                left, values, right = factors(b.flatten(1), a.flatten(1))
                a.copy_(right.view_as(a))
                self.pairs.append((b, left.view_as(b)))
                first.append(values.cpu().double().numpy())
        self.first = np.concatenate(first) if first else np.empty(0)
        if not self.first.max(initial=0.0) > 0:
            raise UserError("the LoRA adds nothing yet, so that its singular values are 0: expected a trained one, set "
                            "adapter.init to its folder")
        self.scale = np.concatenate([np.full(len(values), max(values.mean(), 1e-6)) for values in first])

    @torch.no_grad()
    def place(self, point: np.ndarray) -> None:
        """Put the values `first` + `scale` * point in place; point: [rank x layers]."""
        values, start = torch.from_numpy(self.first + self.scale * point), 0
        for b, left in self.pairs:
            rank = left.shape[1]
            some = values[start:start + rank].to(left)
            b.copy_(left * some.view(1, rank, *[1] * (left.ndim - 2)))
            start += rank


def factors(b: Tensor, a: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(Q [m, r], s [r], V [r, n]) with Q diag(s) V = b a, the singular value decomposition of the product. b: [m, r];
    a: [r, n], r at most m and n. No matrix larger than these is made."""
    (q, upper), (p, lower) = torch.linalg.qr(b.double()), torch.linalg.qr(a.double().T)
    u, values, v = torch.linalg.svd(upper @ lower.T)
    return (q @ u).to(b), values, (v @ p.T).to(a)


@dataclass
class SeparableCMA:
    """Separable CMA-ES that maximises: `points` draws a generation, `learn` moves mean, step and axes by its values.

    mean: [d]. step: the standard deviation. size: points per generation, 2 or more.
    """

    mean: np.ndarray
    step: float
    size: int
    seed: int = 0

    def __post_init__(self) -> None:
        d, self.generation = len(self.mean), 0
        kept = self.size // 2
        ranks = math.log(kept + 0.5) - np.log(np.arange(1, kept + 1))
        self.weights = ranks / ranks.sum()
        self.mass = 1 / np.square(self.weights).sum()
        self.axes, self.path, self.step_path = np.ones(d), np.zeros(d), np.zeros(d)
        self.step_rate = (self.mass + 2) / (d + self.mass + 5)
        self.damping = 1 + 2 * max(0.0, math.sqrt((self.mass - 1) / (d + 1)) - 1) + self.step_rate
        self.path_rate = (4 + self.mass / d) / (d + 4 + 2 * self.mass / d)
        one = 2 / ((d + 1.3) ** 2 + self.mass)
        many = min(1 - one, 2 * (self.mass - 2 + 1 / self.mass) / ((d + 2) ** 2 + self.mass))
        self.rates = min(one * (d + 2) / 3, 1.0), min(max(many, 0.0) * (d + 2) / 3, 1.0)
        self.length = math.sqrt(d) * (1 - 1 / (4 * d) + 1 / (21 * d * d))

    def points(self) -> np.ndarray:
        """Generation: [size, d]."""
        rng = np.random.default_rng([self.seed, self.generation])
        self.drawn = rng.normal(size=(self.size, len(self.mean)))
        return self.mean + self.step * self.axes * self.drawn

    def learn(self, values: Sequence[float]) -> None:
        """Move towards the better half of the last generation; values: [size], the larger the better."""
        best = self.drawn[np.argsort(-np.array(values), kind="stable")[:len(self.weights)]]
        z = self.weights @ best
        self.mean = self.mean + self.step * self.axes * z
        self.generation += 1
        self.step_path = (1 - self.step_rate) * self.step_path + math.sqrt(
            self.step_rate * (2 - self.step_rate) * self.mass) * z
        norm = float(np.linalg.norm(self.step_path))
        usual = norm / math.sqrt(1 - (1 - self.step_rate) ** (2 * self.generation))
        moving = usual < (1.4 + 2 / (len(z) + 1)) * self.length
        self.path = (1 - self.path_rate) * self.path + moving * math.sqrt(
            self.path_rate * (2 - self.path_rate) * self.mass) * self.axes * z
        one, many = self.rates
        many = min(many, 1 - one)
        squares = self.weights @ np.square(self.axes * best)
        self.axes = np.sqrt((1 - one - many) * np.square(self.axes) + one * np.square(self.path) + many * squares)
        self.step *= math.exp(self.step_rate / self.damping * (norm / self.length - 1))


def evolve(weights: TrainableWeights, value: Callable[[int], float], log: Callable[[str], None], generations: int,
           population: int, spread: float, seed: int = 0) -> list[dict[str, Any]]:
    """Search the singular values for a large value, and leave the search's mean in place; return a line per generation.
    value: of the weights that are in place, in a generation. A value that is NaN counts as the least. spread: the first
    standard deviation, in mean singular values of a layer."""
    space = SingularValues(weights)
    search = SeparableCMA(np.zeros(len(space.first)), spread, population, seed)
    lines = []
    for generation in range(generations):
        values = []
        for point in search.points():
            space.place(point)
            reached = value(generation)
            values.append(-math.inf if math.isnan(reached) else reached)
        search.learn(values)
        known = [reached for reached in values if reached > -math.inf]
        lines.append({"generation": generation, "mean": sum(known) / max(len(known), 1), "best": max(values),
                      "step": search.step})
        log(f"generation {generation + 1}/{generations}: mean {lines[-1]['mean']:.4f}, best "
            f"{max(values):.4f}")
    space.place(search.mean)
    return lines


def write(weights: TrainableWeights, folder: Path, lines: Sequence[dict[str, Any]]) -> str:
    """Write the LoRA and the lines of its generations to a folder; return the sentence of `save`."""
    atomic.make_folder(folder)
    atomic.write_text(folder / "evolution.jsonl", "".join(json.dumps(line) + "\n" for line in lines))
    adapters.require_saved(weights.named, len(lines))
    return weights.save(folder)
