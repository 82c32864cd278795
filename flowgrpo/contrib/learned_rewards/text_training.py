"""Training of a text reward on labelled texts: `flowgrpo reward train-text`.

Each aspect of each category has a linear head on frozen features. Labels that are all 0 or 1 are learned by logistic
regression (a discriminator), others by ridge regression, and pairs by logistic regression on differences of features.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import softplus

from flowgrpo.contrib.learned_rewards.labelled_texts import OVERALL, LabelledText, degraded
from flowgrpo.errors import UserError
from flowgrpo.text.rewards.embeddings import LearnedHeads, SemanticSimilarity, hashed

SQUARED, LOGISTIC, PAIRS = "R2", "accuracy", "accuracy of pairs"  # what is measured, by the kind of labels


@dataclass(frozen=True)
class Settings:
    """Settings of a text reward's training.

    encoder: a model of transformers, frozen; None for hashed words. penalty: of the squared weights.
    held_out: share of the texts that measure it. degrade: texts become pairs with degraded copies of themselves.
    """

    encoder: str | None = None
    penalty: float = 1.0
    held_out: float = 0.1
    degrade: bool = False
    seed: int = 0


def fit(rows: Tensor, labels: Tensor, penalty: float, kind: str) -> Tensor:
    """Return weights and intercept [D + 1] of a linear head with the least loss + penalty / 2 * |weights|^2.

    rows: [N, D]; labels: [N]. The loss is half the squared errors, or the cross-entropies of labels 0 and 1; of pairs,
    rows are differences and the intercept is 0.
    """
    rows, labels = rows.double(), labels.double()
    if kind == SQUARED:
        centre, mean = rows.mean(0), labels.mean()
        centred = rows - centre
        kernel = centred @ centred.T + penalty * torch.eye(len(rows), dtype=torch.float64)
        weight = centred.T @ torch.linalg.solve(kernel, labels - mean)
        return torch.cat([weight, (mean - centre @ weight)[None]])
    head = torch.zeros(rows.shape[1] + 1, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.LBFGS([head], max_iter=500, tolerance_grad=1e-10, tolerance_change=0,
                                  line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        optimizer.zero_grad()
        logits = rows @ head[:-1] + (head[-1] if kind == LOGISTIC else 0)
        value = (softplus(logits) - labels * logits).sum() + penalty / 2 * head[:-1].square().sum()
        value.backward()
        return value

    optimizer.step(loss)  # type: ignore[arg-type]
    return head.detach()


def measured(rows: Tensor, labels: Tensor, head: Tensor, kind: str) -> float:
    """Return R2 of the labels, or the share of labels, or of pairs, on whose side the head is."""
    scores = rows.double() @ head[:-1] + head[-1]
    if kind == SQUARED:
        spread = (labels - labels.mean()).square().sum()
        return float(1 - (labels - scores).square().sum() / spread) if spread else float("nan")
    return float(((scores > 0) == (labels > 0.5)).double().mean())


def kind_of(labels: Sequence[float], pairs: bool) -> str:
    """Return what labels are learned by."""
    return PAIRS if pairs else LOGISTIC if set(labels) <= {0.0, 1.0} else SQUARED


def train(texts: Sequence[LabelledText], output: Path, settings: Settings) -> list[tuple[str, str, str, float, int]]:
    """Train a reward on labelled texts, write its file, and return (category, aspect, measure, value, held-out texts).

    Raises UserError for too few texts, for an aspect that not all texts of a category have, and for an output that is
    there.
    """
    if output.exists():
        raise UserError(f"{output} exists already: name another file, or remove that one")
    if settings.degrade:
        texts = [LabelledText(text.text, {}, degraded(text.text, number), text.prompt, text.category)
                 for number, text in enumerate(texts)]
    pairs = texts[0].rejected is not None
    texts = [LabelledText(text.text, {OVERALL: 1.0}, text.rejected, text.prompt, text.category) if pairs else text
             for text in texts]
    aspects = sorted({name for text in texts for name in text.labels})
    for text in texts:
        if sorted(text.labels) != aspects:
            raise UserError(f"the text {text.text[:40]!r} has the labels {', '.join(sorted(text.labels))}, expected "
                            f"{', '.join(aspects)}, as the others have")
    rows, held = _rows(texts, settings.encoder), _held_out(texts, settings)
    heads, results = {}, []
    for category in sorted({text.category for text in texts}):
        inside = torch.tensor([text.category == category for text in texts])
        fitted = []
        for aspect in aspects:
            labels = torch.tensor([text.labels[aspect] for text in texts], dtype=torch.float64)
            kind = kind_of(labels[inside].tolist(), pairs)
            head = fit(rows[inside & ~held], labels[inside & ~held], settings.penalty, kind)
            at = inside & held
            value = measured(rows[at], labels[at], head, kind) if at.any() else float("nan")
            fitted.append(head.tolist())
            results.append((category, aspect, kind, value, int(at.sum())))
        heads[category] = fitted
    LearnedHeads(aspects, heads, settings.encoder, {"held_out": [
        {"category": category, "aspect": aspect, "measure": measure, "value": None if value != value else value,
         "texts": count} for category, aspect, measure, value, count in results]}).write(output)
    return results


def _rows(texts: Sequence[LabelledText], encoder: str | None) -> Tensor:
    """Return the features of texts, or the differences of pairs: [N, D]."""
    embed = SemanticSimilarity(encoder).embedded if encoder else hashed
    rows = embed([text.text for text in texts])
    return rows - embed([text.rejected or "" for text in texts]) if texts[0].rejected is not None else rows


def _held_out(texts: Sequence[LabelledText], settings: Settings) -> Tensor:
    """Return the held-out texts, bool [N]; texts of one prompt are on one side."""
    labels = [text.prompt or f"\0{number}" for number, text in enumerate(texts)]
    different = sorted(set(labels))
    if len(different) < 2:
        raise UserError(f"{len(texts)} completions of one prompt cannot be split into training and held-out ones: "
                        f"give more")
    order = np.random.default_rng(settings.seed).permutation(len(different))
    count = min(max(1, round(settings.held_out * len(different))), len(different) - 1)
    chosen = {different[place] for place in order[:count]}
    return torch.tensor([label in chosen for label in labels])
