"""Rewards that `flowgrpo reward train` learned from preferences, each a folder named by its path.

The folder holds `reward.json` (aspects, scales, network, measurements) and `network.safetensors`. A network with its
own text encoder adds that one's configuration and tokenizer.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import torch
from safetensors.torch import save_file
from torch import Tensor

from flowgrpo.contrib.learned_rewards.denoiser_head import DENOISER, DenoiserHead, frozen_policy
from flowgrpo.contrib.learned_rewards.preference_networks import TEXT, TOKENIZER, ClipHead, Film, build_film
from flowgrpo.contrib.learned_rewards.text_network import LANGUAGE, TextHead, build_text_head, on_model
from flowgrpo.errors import UserError, nearest
from flowgrpo.files import tensors_of
from flowgrpo.rewards.about import TRAINED, About
from flowgrpo.rewards.clip import ClipScore
from flowgrpo.rewards.local_model import LocalModel, fill, loading
from flowgrpo.storage import atomic, paths
from flowgrpo.types import unwrap

FILE, WEIGHTS = TRAINED, "network.safetensors"
FORM = 1
Network: TypeAlias = "Film | ClipHead | TextHead | DenoiserHead"


@dataclass(frozen=True)
class Aspect:
    """One aspect's term of the reward: weight * (score - mean) / deviation."""

    weight: float = 1.0
    mean: float = 0.0
    deviation: float = 1.0


@dataclass(frozen=True)
class Description:
    """Content of `reward.json`: aspects in the order of the network's outputs, the network, and its measurements.

    network: {"kind": "film", "size": S}, {"kind": "clip", "model": NAME, "pretrained": TAG_OR_FILE}, {"kind":
    "denoiser", "model": SOURCE, "call": ARGUMENTS, "width": F, "evidence": BOOL, "sees": REWARD} of `flowgrpo
    taste`, or of texts {"kind": "language", "model": SOURCE, "frozen": BOOL}.
    """

    aspects: dict[str, Aspect]
    network: dict[str, Any]
    measured: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def read(cls, folder: Path) -> "Description":
        """Read a folder's `reward.json`. Raises UserError for a file not written by `flowgrpo reward train`."""
        with loading(f"reward {str(folder)!r}: {FILE}", "expected what `flowgrpo reward train` wrote"):
            record = json.loads((folder / FILE).read_text(encoding="utf-8"))
            if record.pop("form") != FORM:
                raise ValueError(f"expected form {FORM}")
            aspects = {name: Aspect(**numbers) for name, numbers in record.pop("aspects").items()}
            return cls(aspects, **record)


@dataclass(frozen=True)
class Preference(LocalModel):
    """Human or judge preference, learned from pairs of images by `flowgrpo reward train`.

    The sum over aspects of weight * (score - mean) / deviation. Mean and deviation are those of the held-out images,
    so aspects and other rewards have similar scales. One unit is no fixed odds.

    folder: written by `train-reward`. aspect: only this one, with the weight 1.
    weights: by aspect, in place of the folder's; omitted aspects get 0.
    dtype (fp32; the head's is always), device and batch_size (64): as in `LocalModel`.
    Raises UserError for an unreadable folder and for an unknown aspect.
    """

    folder: str
    aspect: str | None = None
    weights: dict[str, float] | None = None
    batch_size: int = field(default=64, kw_only=True)
    chosen: dict[str, float] = field(init=False, repr=False)
    known: Description = field(init=False, repr=False)
    about = About(modality="image", range=(None, None), needs="", licence="Apache-2.0, weights of your own")

    def __post_init__(self) -> None:
        known = Description.read(Path(self.folder))
        vars(self).update(known=known, chosen=_weights(self.folder, known, self.aspect, self.weights))
        super().__post_init__()

    @property
    def reward(self) -> str:  # type: ignore[override]  # of others the class states it
        return self.folder

    def _prepare(self, part: Any) -> Any:
        return part if isinstance(part, (ClipHead, TextHead, DenoiserHead)) else super()._prepare(part)

    def _load(self) -> tuple[Any, Tensor]:
        terms = [(self.chosen[name], term.mean, term.deviation) for name, term in self.known.aspects.items()]
        return (read_network(Path(self.folder), self.known, unwrap(self.device), self.dtype),
                torch.tensor(terms, dtype=torch.float64))

    def __call__(self, images: Tensor, prompts: Sequence[str]) -> Tensor:
        weight, mean, deviation = self.models[1].unbind(1)
        return ((self.scores(images, prompts).double() - mean) / deviation) @ weight

    def scores(self, shown: Tensor | Sequence[str], prompts: Sequence[str]) -> Tensor:
        """Network's raw scores [B, A]; their differences between images, or texts, of a prompt are log-odds."""
        return self.score_batches(self._scores, shown, prompts)

    def _scores(self, shown: Any, prompts: list[str]) -> Tensor:
        network = self.models[0]
        prepared = shown if isinstance(network, TextHead) else network.prepare(shown.to(self.device))
        return network(**network.rows(prepared, prompts))


@dataclass(frozen=True)
class TextPreference(Preference):
    """Human or judge preference, learned from pairs of texts by `flowgrpo reward train --model`.

    Arguments and scores as of `Preference`.
    """

    about = About(modality="text", range=(None, None), needs="", licence="Apache-2.0, weights of your own")


def reward_factory(folder: Path, aspect: str | None) -> partial[Preference]:
    """Reward of a folder, or of one of its aspects, to be made. Raises UserError for an unknown aspect."""
    known = Description.read(folder)
    _weights(str(folder), known, aspect, None)
    options: dict[str, Any] = {} if aspect is None else {"aspect": aspect}
    kind = TextPreference if known.network["kind"] == "language" else Preference
    return partial(kind, str(folder), **options)


def _weights(folder: str, known: Description, aspect: str | None, weights: dict[str, float] | None) -> dict[str, float]:
    if aspect is not None and weights is not None:
        raise UserError(f"reward {folder!r}: got the aspect {aspect!r} and weights, expected one of them")
    given = weights or {} if aspect is None else {aspect: 1.0}
    for name in given:
        if name not in known.aspects:
            raise UserError(f"reward {folder!r} has no aspect {name!r}{nearest(name, list(known.aspects))}")
    others = {name: term.weight if weights is None and aspect is None else 0.0 for name, term in known.aspects.items()}
    return others | given


def save(folder: Path, network: Network, known: Description) -> None:
    """Write a reward's folder; `reward.json` comes last, so a folder with one is complete."""
    with atomic.filling(folder) as place:
        save_file({key: value.detach().cpu().clone() for key, value in network.state_dict().items()}, place / WEIGHTS)
        paths.readable(place / WEIGHTS)
        if isinstance(network, Film):
            network.text.config.save_pretrained(place / TEXT)
            network.tokenizer.save_pretrained(place / TOKENIZER)
        if isinstance(network, TextHead) and not network.frozen:
            network.config.save_pretrained(place / LANGUAGE)
            network.tokenizer.save_pretrained(place / TOKENIZER)
    atomic.write_text(folder / FILE, json.dumps({"form": FORM, **asdict(known)}, indent=2) + "\n")


def read_network(folder: Path, known: Description, device: str, dtype: str = "fp32") -> Network:
    """Load the network of a folder. Raises UserError if it is unreadable or does not fit."""
    with loading(f"reward {str(folder)!r}", "train it again, or copy its whole folder"):
        facts, count = known.network, len(known.aspects)
        if facts["kind"] == "film":
            network: Network = build_film(folder, count, facts["size"])
        elif facts["kind"] == "language":
            network = on_model(facts["model"], count, True) if facts["frozen"] else build_text_head(folder, count)
        elif facts["kind"] == DENOISER:
            policy = frozen_policy(facts["model"], facts["call"], device)
            network = DenoiserHead(policy, facts["width"], facts.get("evidence", False), facts.get("sees"))
        else:
            clip = ClipScore(facts["model"], facts["pretrained"], device=device, dtype=dtype)
            network = ClipHead(clip, count)
        state, _ = tensors_of(folder / WEIGHTS)
    fill(str(folder), network, state, str(folder / WEIGHTS))
    return network.eval().requires_grad_(False).to(device)
