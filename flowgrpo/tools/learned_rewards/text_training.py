"""Training of a text reward on labelled texts: `flowgrpo reward train-text`.

Each aspect of each category has a linear head on frozen features. Labels that are all 0 or 1 are learned by logistic
regression (a discriminator), others by ridge regression, and pairs by logistic regression on differences of features.
A reward that prefers originals learns from texts that are degraded here.

A file of labelled texts is `.jsonl`, one object per line: `text` with `labels`, an object of names and numbers, or
`chosen` and `rejected`, two texts. Optional are `prompt`, whose lines are held out together, and `category`.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import softplus

from flowgrpo.data.pairs import OVERALL, records
from flowgrpo.errors import UserError
from flowgrpo.files import unsafe
from flowgrpo.storage.json_files import finite
from flowgrpo.text.rewards.embeddings import LearnedHeads, SemanticSimilarity, hash_words

KEYS = ("text", "labels", "chosen", "rejected", "prompt", "category")
_STEPS, _NUMBER = re.compile(r"(?<=[.!?\n])\s+"), re.compile(r"\d+")


@dataclass(frozen=True)
class LabelledText:
    """Text with numbers by aspect, or that is preferred to `rejected`, which labels the aspect `overall`."""

    text: str
    labels: dict[str, float] = field(default_factory=dict, hash=False)
    rejected: str | None = None
    prompt: str = ""
    category: str = ""


def load_labelled(path: str | Path) -> list[LabelledText]:
    """Read a .jsonl file of labelled texts. Raises UserError with the file and the line of a mistake."""
    texts = []
    for place, record in records(Path(path), "labelled completions", KEYS, "text, or chosen and rejected"):
        if ("text" in record) == ("chosen" in record) or ("chosen" in record) != ("rejected" in record):
            raise UserError(f"{place}: expected either 'text', or 'chosen' and 'rejected'")
        for key in record.keys() - {"labels"}:
            if not isinstance(record[key], str) or not record[key].strip() or unsafe(record[key]):
                raise UserError(f"{place}: expected a text under {key!r}, got {str(record[key])[:60]!r}")
        labels = record.get("labels", {OVERALL: 1.0} if "text" in record else {})
        if not isinstance(labels, dict) or not all(type(value) in (int, float) and math.isfinite(value)
                                                   for value in labels.values()):
            raise UserError(f"{place}: expected names and numbers under 'labels', got {str(labels)[:60]}")
        texts.append(LabelledText(record.get("text") or record["chosen"],
                                  {name: float(value) for name, value in labels.items()}, record.get("rejected"),
                                  record.get("prompt", ""), record.get("category", "")))
    if not texts:
        raise UserError(f"labelled completions {path}: the file holds no completion")
    if len({text.rejected is None for text in texts}) == 2:
        raise UserError(f"labelled completions {path}: some lines have labels and some pairs, expected one kind")
    return texts


def degrade(text: str, seed: int) -> str:
    """Text that argues worse: one of its sentences or lines left out, two of them exchanged, or a number changed, by
    the seed in turn; a text that has none of these loses its second half (Posterior-GRPO's degraded reasoning, by rules
    in place of a language model)."""
    rng, steps = np.random.default_rng(seed), [step for step in _STEPS.split(text) if step.strip()]
    numbers = [*_NUMBER.finditer(text)]
    for way in (number % 3 for number in range(seed, seed + 3)):
        if way == 0 and len(steps) > 1:
            place = int(rng.integers(len(steps)))
            return " ".join(steps[:place] + steps[place + 1:])
        if way == 1 and len(set(steps)) > 1:
            one = int(rng.integers(len(steps)))
            other = next(at % len(steps) for at in range(one + 1, one + len(steps)) if steps[at % len(steps)] !=
                         steps[one])
            steps[one], steps[other] = steps[other], steps[one]
            return " ".join(steps)
        if way == 2 and numbers:
            at = numbers[int(rng.integers(len(numbers)))]
            return text[:at.start()] + str(int(at[0]) + int(rng.integers(1, 10))) + text[at.end():]
    return text[:len(text) // 2]


SQUARED, LOGISTIC, PAIRS = "R2", "accuracy", "accuracy of pairs"  # what is measured, by the kind of labels


def fit(rows: Tensor, labels: Tensor, penalty: float, kind: str) -> Tensor:
    """Weights and intercept [D + 1] of a linear head with the least loss + penalty / 2 * |weights|^2.

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


def evaluate_head(rows: Tensor, labels: Tensor, head: Tensor, kind: str) -> float:
    """R2 of the labels, or the share of labels, or of pairs, on whose side the head is."""
    scores = rows.double() @ head[:-1] + head[-1]
    if kind == SQUARED:
        spread = (labels - labels.mean()).square().sum()
        return float(1 - (labels - scores).square().sum() / spread) if spread else float("nan")
    return float(((scores > 0) == (labels > 0.5)).double().mean())


def train(texts: Sequence[LabelledText], output: Path, encoder: str | None = None, penalty: float = 1.0,
          held_out: float = 0.1, degraded: bool = False, seed: int = 0) -> list[tuple[str, str, str, float, int]]:
    """Train a reward on labelled texts, write its file, and return (category, aspect, measure, value, held-out texts).

    encoder: a model of transformers, frozen; None for hashed words. penalty: of the squared weights.
    held_out: share of the texts that measure it. degraded: texts become pairs with degraded copies of themselves.
    Raises UserError for too few texts, for an aspect that not all texts of a category have, and for an output that is
    there.
    """
    if output.exists():
        raise UserError(f"{output} exists already: name another file, or remove that one")
    # Damaged copies stand in for the rejected texts that unlabelled ones lack.
    if degraded:
        texts = [replace(text, rejected=degrade(text.text, number)) for number, text in enumerate(texts)]
    pairs = texts[0].rejected is not None
    if pairs:
        texts = [replace(text, labels={OVERALL: 1.0}) for text in texts]
    aspects = sorted({name for text in texts for name in text.labels})
    for text in texts:
        if sorted(text.labels) != aspects:
            raise UserError(f"the text {text.text[:40]!r} has the labels {', '.join(sorted(text.labels))}, expected "
                            f"{', '.join(aspects)}, as the others have")
    # Texts are encoded once: all heads of all categories read the same rows.
    embed = SemanticSimilarity(encoder).embed if encoder else hash_words
    rows = embed([text.text for text in texts])
    if pairs:
        rows = rows - embed([text.rejected or "" for text in texts])
    # Texts of one prompt are all held out, or none of them.
    prompts = [text.prompt or f"\0{number}" for number, text in enumerate(texts)]
    different = sorted(set(prompts))
    if len(different) < 2:
        raise UserError(f"{len(texts)} completions of one prompt cannot be split into training and held-out ones: "
                        f"give more")
    count = min(max(1, round(held_out * len(different))), len(different) - 1)
    chosen = {different[place] for place in np.random.default_rng(seed).permutation(len(different))[:count]}
    held = torch.tensor([prompt in chosen for prompt in prompts])
    heads, results = {}, []
    for category in sorted({text.category for text in texts}):
        inside = torch.tensor([text.category == category for text in texts])
        fitted = []
        for aspect in aspects:
            labels = torch.tensor([text.labels[aspect] for text in texts], dtype=torch.float64)
            kind = PAIRS if pairs else LOGISTIC if {*labels[inside].tolist()} <= {0.0, 1.0} else SQUARED
            head = fit(rows[inside & ~held], labels[inside & ~held], penalty, kind)
            at = inside & held
            value = evaluate_head(rows[at], labels[at], head, kind) if at.any() else float("nan")
            fitted.append(head.tolist())
            results.append((category, aspect, kind, value, int(at.sum())))
        heads[category] = fitted
    told = [dict(zip(("category", "aspect", "measure", "value", "texts"), result)) for result in results]
    LearnedHeads(aspects, heads, encoder, finite({"held_out": told})).write(output)
    return results
