"""Text reward that `flowgrpo reward train-text` learned: a linear head per aspect, on hashed words or an encoder."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flowgrpo.data.text_features import features
from flowgrpo.errors import UserError, nearest
from flowgrpo.rewards.about import About
from flowgrpo.rewards.local_model import loading
from flowgrpo.storage import atomic
from flowgrpo.text.rewards.answer_keys import LICENCE, spoken
from flowgrpo.text.rewards.embeddings import TextEncoder

FORM, WIDTH = 1, 2048  # of the file; hashed words


@dataclass(frozen=True)
class LearnedHeads:
    """Heads of a text reward.

    aspects: their names, in the order of the heads. heads: by category, "" for texts without one, [A, D + 1], the last
    column being the intercept. encoder: a model of transformers; None for hashed words.
    measured: what the training measured on held-out texts.
    """

    aspects: list[str]
    heads: dict[str, list[list[float]]]
    encoder: str | None = None
    measured: dict[str, Any] = field(default_factory=dict)

    def write(self, file: Path) -> None:
        """Write the file of the reward."""
        atomic.write_text(file, json.dumps({"form": FORM, **asdict(self)}) + "\n")

    @classmethod
    def read(cls, file: Path) -> LearnedHeads:
        """Read the file of a reward. Raises UserError for one not written by `flowgrpo reward train-text`."""
        with loading(f"reward 'text_scorer': {file}", "expected what `flowgrpo reward train-text` wrote"):
            record = json.loads(file.read_text(encoding="utf-8"))
            if record.pop("form") != FORM:
                raise ValueError(f"expected form {FORM}")
            known = cls(**record)
            for head in known.heads.values():
                if np.array(head, dtype=float).shape[:1] != (len(known.aspects),):
                    raise ValueError("expected a head per aspect")
            return known


def hashed(texts: Sequence[str]) -> Tensor:
    """Return the hashed words of texts: [B, WIDTH] float32."""
    return torch.from_numpy(np.stack([features(text, WIDTH) for text in texts])).float()


@dataclass(frozen=True, eq=False)
class TextScorer(TextEncoder):
    """Weighted sum of the aspects that `flowgrpo reward train-text` learned from labelled completions.

    file: what it wrote. weights: of aspects; omitted ones get 0, and without weights all get 1.
    category: key of the metadata that names a text's category, of a reward with a head for each; a category without a
        head, or a prompt without one where all have one, gets no score.
    thoughts: read the <think> part.
    longest: tokens that its encoder reads. dtype (fp32), device and batch_size (32) of it: as in `LocalModel`.
    """

    file: str
    weights: dict[str, float] | None = None
    category: str = "category"
    thoughts: bool = False
    longest: int = 512
    batch_size: int = field(default=32, kw_only=True)
    known: LearnedHeads = field(init=False, repr=False)
    reward = "text_scorer"
    revision = None
    about = About(modality="text", range=(None, None), needs="", licence=f"{LICENCE}, weights of your own")

    def __post_init__(self) -> None:
        known = LearnedHeads.read(Path(self.file))
        for name in self.weights or ():
            if name not in known.aspects:
                raise UserError(f"reward 'text_scorer': {self.file} has no aspect {name!r}"
                                f"{nearest(name, known.aspects)}")
        object.__setattr__(self, "known", known)
        super().__post_init__()

    @property
    def model(self) -> str:  # type: ignore[override]
        return self.known.encoder or ""

    def _loaded(self) -> tuple[Any, ...]:
        return super()._loaded() if self.known.encoder else ()

    def __call__(self, completions: Sequence[str], prompts: Sequence[str],
                 metadata: Sequence[dict[str, Any]]) -> list[float | None]:
        given = self.weights or dict.fromkeys(self.known.aspects, 1.0)
        weight = torch.tensor([given.get(name, 0.0) for name in self.known.aspects], dtype=torch.float64)
        scores = self.scores(completions, [str(entry.get(self.category, "")) for entry in metadata])
        return [None if row is None else float(row @ weight) for row in scores]

    def scores(self, texts: Sequence[str], categories: Sequence[str]) -> list[Tensor | None]:
        """Return the aspects' scores of each text, [A] float64; None for a category without a head."""
        texts = texts if self.thoughts else [spoken(text) for text in texts]
        rows = (self.embedded(texts) if self.known.encoder else hashed(texts)).double()
        heads = {name: torch.tensor(head, dtype=torch.float64) for name, head in self.known.heads.items()}
        of = [heads.get(category, heads.get("")) for category in categories]
        return [None if head is None else head[:, :-1] @ row + head[:, -1] for head, row in zip(of, rows)]
