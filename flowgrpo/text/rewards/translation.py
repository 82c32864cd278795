"""Reward of a translation: BLEU or chrF to references, by sacrebleu (MT-R1-Zero)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from flowgrpo.errors import UserError
from flowgrpo.packages import needed
from flowgrpo.rewards.about import About
from flowgrpo.text.rewards.answer_keys import keys, several, spoken, stated

METRICS = ("chrf", "bleu")


@dataclass(frozen=True)
class Translation:
    """chrF or BLEU of a completion's answer to the references in the metadata, over 100.

    metric: "chrf" or "bleu", of sentences; BLEU is smoothed, and counts only the orders that the answer has. To mix
    them, name the reward twice; `gated` behind `format_tags` makes the format a condition.
    key: of the metadata, a text or a list of references; None for a prompt without it. The answer is the one that the
    completion states (see `answer_keys.stated`), or the text after its thoughts.
    """

    metric: str = "chrf"
    key: str = "answer"
    about = About(modality="text", range=(0, 1), needs="translation", licence="Apache-2.0")
    keyed = True  # nothing is scored without the key

    def __post_init__(self) -> None:
        if self.metric not in METRICS:
            raise UserError(f"reward 'translation': metric is {self.metric!r}, expected {' or '.join(METRICS)}")
        needed("sacrebleu", "translation", "reward 'translation'")

    def __call__(self, completions: Sequence[str], prompts: Sequence[str],
                 metadata: Sequence[dict[str, Any]]) -> list[float | None]:
        sacrebleu = needed("sacrebleu", "translation", "reward 'translation'")
        metric = sacrebleu.CHRF() if self.metric == "chrf" else sacrebleu.BLEU(effective_order=True)
        wanted = keys("translation", metadata, self.key, prompts, several)
        return [None if references is None else
                min(1.0, metric.sentence_score(stated(text) or spoken(text).strip(), references).score / 100)
                for text, references in zip(completions, wanted)]
