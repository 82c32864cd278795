"""Text encoders and rewards that read them: embeddings, similarity to a reference, diversity of a group, learned
scorers (`flowgrpo reward train-text`), and texts whose tokens carry a graph.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flowgrpo.data.selection import features
from flowgrpo.errors import UserError, nearest
from flowgrpo.rewards.about import About, built_in
from flowgrpo.rewards.guards import distances
from flowgrpo.rewards.local_model import LocalModel, load_parts, loading
from flowgrpo.storage import atomic
from flowgrpo.text.rewards.answer_keys import LICENCE, Metadata, Texts, final_answer, keys, several, strip_thoughts
from flowgrpo.text.rewards.rules import normalise


def mean_pool(states: Tensor, mask: Tensor) -> Tensor:
    """The mean of the states where the mask is 1, of length 1: [B, L, D], [B, L] -> [B, D] float32."""
    mean = (states.float() * mask[..., None]).sum(1) / mask.sum(1, keepdim=True).clamp(min=1)
    return torch.nn.functional.normalize(mean, dim=1)


def pad_rows(rows: Sequence[list[int]], device: Any, padding: int = 0) -> tuple[Tensor, Tensor]:
    """Token rows padded at their ends, and their mask, int64 [B,L] both; L is 1 at least."""
    length = max(1, *map(len, rows))
    return (torch.tensor([row + [padding] * (length - len(row)) for row in rows], device=device),
            torch.tensor([[1] * len(row) + [0] * (length - len(row)) for row in rows], device=device))


class TextEncoder(LocalModel):
    """Reward that embeds texts by a model of transformers; a subclass has `model` and `longest`."""

    longest: int

    def _load(self) -> tuple[Any, ...]:
        return load_parts(self, "AutoModel", "AutoTokenizer", dtype=self.float_type)

    @torch.no_grad()
    def embed(self, texts: Sequence[str]) -> Tensor:
        """The mean last states of B texts, of length 1: [B, D] float32 on the CPU. Tokens behind the first `longest`
        are not read; a text without tokens has zeros."""
        network, tokenizer = self.models[:2]
        rows = [tokenizer(text)["input_ids"][:self.longest] for text in texts]
        parts = []
        for at in range(0, len(rows), self.batch_size):
            ids, mask = pad_rows(rows[at:at + self.batch_size], self.device)
            parts.append(mean_pool(network(input_ids=ids, attention_mask=mask).last_hidden_state, mask).cpu())
        return torch.cat(parts)


@built_in("semantic_similarity", "meaning similar example reference paraphrase", eq=False)
class SemanticSimilarity(TextEncoder):
    """Cosine of the embeddings of a completion's answer and of its reference, of several the largest.

    The semantic side of MT-R1-Zero's mixed reward beside `translation`, which is lexical; the paper's is COMET.
    model: an encoder of transformers, its folder or name on the hub, multilingual for translations; its last states
        are averaged. revision: of the hub. longest: tokens that are read.
    key: of the metadata, a text or a list of references; None for a prompt without it. The answer is found as for
        `translation`.
    parts: model and tokenizer, ready-made. dtype (fp32), device and batch_size (32): as in `LocalModel`.
    """

    model: str = ""
    revision: str | None = None
    longest: int = 512
    key: str = "answer"
    batch_size: int = field(default=32, kw_only=True)
    about = About(modality="text", range=(-1, 1), needs="", licence=f"{LICENCE}, the model's")
    keyed = True  # nothing is scored without the key

    def __post_init__(self) -> None:
        if self.longest < 1 or not (self.model or self.parts):
            raise UserError(f"reward 'semantic_similarity': got model {self.model!r} and longest {self.longest}, "
                            "expected args: {model: FOLDER}, and longest from 1")
        super().__post_init__()

    def __call__(self, completions: Texts, prompts: Texts, metadata: Metadata) -> list[float | None]:
        references = keys(self.reward, metadata, self.key, prompts, several)
        answers = [final_answer(text) or strip_thoughts(text).strip() for text in completions]
        texts = sorted({*answers, *(text for accepted in references for text in accepted or ())})
        of = dict(zip(texts, self.embed(texts)))
        return [None if accepted is None else max(float(of[answer] @ of[text]) for text in accepted)
                for answer, accepted in zip(answers, references)]


def ngrams(text: str, most: int) -> set[tuple[str, ...]]:
    """The n-grams of a text's words, of 1 to `most` words, in lower case."""
    words = normalise(text).split()
    return {tuple(words[at:at + n]) for n in range(1, most + 1) for at in range(len(words) - n + 1)}


def likeness(one: set[tuple[str, ...]], other: set[tuple[str, ...]]) -> float:
    """The share of common n-grams among all of two texts, 1 for two empty ones (Jaccard)."""
    return len(one & other) / len(one | other) if one | other else 1.0


def lexical(texts: Sequence[str], most: int) -> list[float]:
    """The mean of 1 - `likeness` of each text to the others; 0 for a single one."""
    grams, count = [ngrams(text, most) for text in texts], max(len(texts) - 1, 1)
    return [sum(1 - likeness(one, other) for at, other in enumerate(grams) if at != row) / count
            for row, one in enumerate(grams)]


@built_in("text_diversity", "variety varied different")
class TextDiversity:
    """Diversity: mean distance of a completion to the others of its group (MultiRole-R1).

    ngram: the distance is 1 - the share of common n-grams of up to so many words.
    features: `file.py:function`, texts to [B, D], for the distance of meanings or perspectives instead: Euclidean.
    """

    ngram: int = 2
    features: str | Callable[[Sequence[str]], Any] | None = None
    group = True
    about = About(modality="text", range=(0, None), needs="", licence=LICENCE)

    def __post_init__(self) -> None:
        if self.ngram < 1:
            raise UserError(f"reward 'text_diversity': ngram is {self.ngram}, expected 1 or more")
        if isinstance(self.features, str):
            from flowgrpo.user_code import load

            object.__setattr__(self, "features", load(self.features))

    def __call__(self, completions: Texts, prompts: Texts, metadata: Metadata, group: int) -> list[float]:
        if callable(self.features):
            features: Tensor = torch.as_tensor(self.features(completions))
            return distances(features.reshape(len(features) // group, group, -1)).flatten().tolist()
        return [score for at in range(0, len(completions), group)
                for score in lexical(completions[at:at + group], self.ngram)]


@built_in("reference_band")
class ReferenceBand:
    """Agreement with the reference answer, as good within a range of std as an exact copy, plus a bonus for
    diverse answers there (DARL).

    The deviation is 1 - the largest share of common n-grams with an accepted answer. Up to `deviation` the score is 1,
    plus `bonus` times the mean distance to the group's others. Beyond, it falls linearly to 0 at a deviation of 1. The
    paper measures agreement by the policy's likelihood of the reference; n-grams are a reconstruction.

    key: of the metadata, an answer or a list of them; None for a prompt without it.
    ngram: as in `text_diversity`.
    """

    deviation: float = 0.4
    bonus: float = 0.2
    key: str = "answer"
    ngram: int = 2
    group = True
    keyed = True
    about = About(modality="text", range=(0, None), needs="", licence=LICENCE)

    def __post_init__(self) -> None:
        if not 0 <= self.deviation < 1 or self.bonus < 0 or self.ngram < 1:
            raise UserError(f"reward 'reference_band': `deviation` is {self.deviation}, bonus {self.bonus} and ngram "
                            f"{self.ngram}, expected 0 to below 1, 0 or more, and 1 or more")

    def __call__(self, completions: Texts, prompts: Texts, metadata: Metadata, group: int) -> list[float | None]:
        references = keys("reference_band", metadata, self.key, prompts, several)
        apart = [score for at in range(0, len(completions), group)
                 for score in lexical(completions[at:at + group], self.ngram)]
        return [None if accepted is None else self._one(completion, accepted, distance)
                for completion, accepted, distance in zip(completions, references, apart)]

    def _one(self, completion: str, accepted: Sequence[str], distance: float) -> float:
        grams = ngrams(completion, self.ngram)
        deviation = 1 - max(likeness(grams, ngrams(answer, self.ngram)) for answer in accepted)
        if deviation <= self.deviation:
            return 1 + self.bonus * distance
        return (1 - deviation) / (1 - self.deviation)


@dataclass(frozen=True, eq=False)
class SoftTexts:
    """B texts as token weights.

    weights: [B,L,V], one-hot, with a graph, 0 after a text's end.
    tokens: the V strings.
    """

    weights: Tensor
    tokens: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.weights)

    def __getitem__(self, rows: Sequence[int]) -> "SoftTexts":
        return SoftTexts(self.weights[rows], self.tokens)


def letters(texts: SoftTexts | Sequence[str], alphabet: Sequence[str]) -> Tensor:
    """The weight of each of A letters at each place of B texts: [B,L,A], a column per letter of `alphabet`.

    Ordinary texts: float32, 1 or 0, L the length of the longest, a character per place. `SoftTexts`: a token per place,
    in the texts' graph. A reward that reads its texts only by this function is differentiable and works with any
    method.
    Raises UserError for a letter that is not a token.
    """
    if isinstance(texts, SoftTexts):
        if missing := [letter for letter in alphabet if letter not in texts.tokens]:
            raise UserError(f"{missing[0]!r} is none of the model's {len(texts.tokens)} tokens: a reward whose "
                            "gradient is followed reads whole tokens")
        return texts.weights[..., [texts.tokens.index(letter) for letter in alphabet]]
    weights = torch.zeros(len(texts), max((len(text) for text in texts), default=0), len(alphabet))
    for row, text in enumerate(texts):
        for place, character in enumerate(text):
            if character in alphabet:
                weights[row, place, alphabet.index(character)] = 1
    return weights


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
        atomic.write_text(file, json.dumps({"form": FORM, **asdict(self)}) + "\n")

    @classmethod
    def read(cls, file: Path) -> "LearnedHeads":
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


def hash_words(texts: Sequence[str]) -> Tensor:
    return torch.from_numpy(np.stack([features(text, WIDTH) for text in texts])).float()


@built_in("text_scorer", "own labels style learned", eq=False)
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
    def model(self) -> str:
        return self.known.encoder or ""

    def _load(self) -> tuple[Any, ...]:
        return super()._load() if self.known.encoder else ()

    def __call__(self, completions: Texts, prompts: Texts, metadata: Metadata) -> list[float | None]:
        given = self.weights or dict.fromkeys(self.known.aspects, 1.0)
        weight = torch.tensor([given.get(name, 0.0) for name in self.known.aspects], dtype=torch.float64)
        scores = self.scores(completions, [str(entry.get(self.category, "")) for entry in metadata])
        return [None if row is None else float(row @ weight) for row in scores]

    def scores(self, texts: Sequence[str], categories: Sequence[str]) -> list[Tensor | None]:
        """The aspects' scores of each text, [A] float64; None for a category without a head."""
        texts = texts if self.thoughts else [strip_thoughts(text) for text in texts]
        rows = (self.embed(texts) if self.known.encoder else hash_words(texts)).double()
        heads = {name: torch.tensor(head, dtype=torch.float64) for name, head in self.known.heads.items()}
        of = [heads.get(category, heads.get("")) for category in categories]
        return [None if head is None else head[:, :-1] @ row + head[:, -1] for head, row in zip(of, rows)]
