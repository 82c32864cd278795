"""Plan of an evaluation (model, medium and digest) and its ledger on disk: a PNG per image, or a line per text, and a
line of scores, written immediately.
"""

import contextlib
import functools
import hashlib
import json
import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import torch

from flowgrpo.config.schema import Config
from flowgrpo.config.sections import Load
from flowgrpo.data.open_image import open_checked
from flowgrpo.errors import UserError
from flowgrpo.evaluation.image_files import weight_files
from flowgrpo.evaluation.pages.clips import as_image, save_clip, save_png, tall, untall
from flowgrpo.files import unfit
from flowgrpo.policies.pipelines.load import rate_ahead
from flowgrpo.storage import atomic
from flowgrpo.storage.json_files import read_object
from flowgrpo.types import Completion

SETTINGS, CODE = "settings.json", "code"
PIXELS = 2**28  # of an image, in which a clip's frames stand below each other
BASE, TUNED = "base", "tuned"


class Place(NamedTuple):
    """Key of a sample: "base" or "tuned", the number of its prompt, its number within the prompt."""

    arm: str
    prompt: int
    sample: int


class BaseLedger:
    """Folder of an evaluation, as one process writes it: settings and scores."""

    def __init__(self, folder: Path, rank: int = 0):
        self.folder, self.own = folder, folder / f"scores-{rank}.jsonl"

    def check(self, settings: dict[str, Any]) -> None:
        """Raise UserError if the folder holds an evaluation with other settings; rewards may be added to it.

        Settings without a sample, such as those of a model that could not be loaded, bind nothing.
        """
        path = self.folder / SETTINGS
        if not path.is_file() or all(file == path for file in self.folder.rglob("*") if file.is_file()):
            return
        known = self._settings()
        for key in dict.fromkeys([*settings, *known]):
            was, value = known.get(key), settings.get(key)
            if key == CODE:  # `rewards.edited_rewards` compares it
                continue
            if key == "rewards":  # others may be added
                assert isinstance(was, dict) and isinstance(value, dict)
                was = was | {name: rule for name, rule in value.items() if name not in was}
                value = was | value
            if was != value:
                raise UserError(f"{self.folder} holds an evaluation with another {key} ({was}, now {value}): give "
                                "another --output, or remove that folder")

    def code(self) -> dict[str, str]:
        """Hashes of the rewards' files when they scored."""
        return self._settings().get(CODE, {}) if (self.folder / SETTINGS).is_file() else {}

    def settle(self, settings: dict[str, Any], code: dict[str, str] | None = None, edited: Collection[str] = ()
               ) -> None:
        """Write settings and `rewards.code_hashes`, with those of earlier calls; remove scores of edited rewards."""
        path, code = self.folder / SETTINGS, self.code() | (code or {})
        self.folder.mkdir(parents=True, exist_ok=True)
        known = self._settings()["rewards"] if path.is_file() else {}
        for file in sorted(self.folder.glob("scores-*.jsonl")) if edited else ():
            lines = [entry | {"scores": {name: value for name, value in entry["scores"].items() if name not in edited}}
                     for entry in entries(self.folder, file.name)]
            atomic.write_text(file, "".join(json.dumps(line) + "\n" for line in lines))
        of_rewards = {"rewards": known | settings["rewards"], CODE: code}
        atomic.write_text(path, json.dumps(settings | of_rewards, indent=2) + "\n")

    def _settings(self) -> dict[str, Any]:
        return read_object(self.folder / SETTINGS, "give another --output, or remove that folder", rewards=dict)

    def read(self) -> dict[Place, dict[str, float]]:
        """Scores of all processes and earlier calls; NaN where a reward does not apply."""
        known: dict[Place, dict[str, float]] = {}
        for entry in entries(self.folder, "scores-*.jsonl"):
            scores = {name: math.nan if value is None else value for name, value in entry["scores"].items()}
            known.setdefault(Place(*entry["place"]), {}).update(scores)
        return known

    def write(self, place: Place, scores: dict[str, float]) -> None:
        """Add a line."""
        known = {name: None if math.isnan(value) else value for name, value in scores.items()}
        atomic.append_line(self.own, json.dumps({"place": place, "scores": known}))


class Ledger(BaseLedger):
    """Folder of an evaluation of images or clips, as one process writes it."""

    def has(self, place: Place) -> bool:
        return self.image(place).is_file()

    def image(self, place: Place) -> Path:
        return self.folder / "pictures" / place.arm / f"{place.prompt:05d}-{place.sample:02d}.png"

    def entry(self, place: Place) -> str:
        """The sample's entry in a prompt file: the absolute path of an image, or of a clip's animated WebP."""
        path = self.image(place).resolve()
        clip = path.with_suffix(".webp")
        return str(clip if clip.is_file() else path)

    def save(self, place: Place, sample: torch.Tensor, facts: str | None = None, fps: float | None = None) -> None:
        """Write an image [3, H, W], or a clip [F, 3, H, W] as one tall image, an animated one and an mp4.
        facts: the text chunk `parameters`, how it was drawn. fps: frames per second of a clip."""
        path, chunks = self.image(place), {} if facts is None else {"parameters": facts}
        path.parent.mkdir(parents=True, exist_ok=True)
        if sample.ndim == 4:
            chunks["frames"] = str(len(sample))
            save_clip(path.with_suffix(".webp"), sample, facts, fps)
        save_png(path, as_image(tall(sample)), chunks)

    def load(self, place: Place) -> torch.Tensor:
        """Load an image [3, H, W] or clip [F, 3, H, W] in [0, 1]. Raises UserError if the file is damaged."""
        from torchvision.transforms.functional import to_tensor

        path = self.image(place)
        try:
            with open_checked(path, PIXELS) as file:
                frames = file.info.get("frames")
                return untall(to_tensor(file.convert("RGB")), None if frames is None else int(frames))
        except (OSError, SyntaxError, ValueError) as error:  # Pillow's errors for a damaged file
            raise UserError(f"{path} is damaged ({' '.join(str(error).split())}): remove it, and the same command "
                            "generates it again") from None

    def batch(self, places: Sequence[Place]) -> torch.Tensor:
        return torch.stack([self.load(place) for place in places])


def entries(folder: Path, names: str) -> Iterator[dict[str, Any]]:
    """Yield the lines of all files that match, without lines that a kill cut off."""
    for file in sorted(folder.glob(names)):
        for line in () if unfit(file) else file.read_bytes().split(b"\n"):
            with contextlib.suppress(ValueError, RecursionError):
                yield json.loads(line)


class TextLedger(BaseLedger):
    """Folder of an evaluation of texts, as one process writes it: `texts-RANK.jsonl` in addition to its scores."""

    def __init__(self, folder: Path, rank: int = 0):
        super().__init__(folder, rank)
        self.written = folder / f"texts-{rank}.jsonl"

    @functools.cached_property
    def _texts(self) -> dict[Place, Completion]:
        return {Place(*entry["place"]): Completion(entry["text"], entry["tokens"], opened=entry.get("opened", ""))
                for entry in entries(self.folder, "texts-*.jsonl")}

    def has(self, place: Place) -> bool:
        """True if the text exists, from this process or an earlier call."""
        return place in self._texts

    def entry(self, place: Place) -> str:
        return str(self.load(place))

    def save(self, place: Place, sample: Completion, facts: str | None = None, fps: float | None = None) -> None:
        """Add a line. facts, fps: not stored."""
        opened = {"opened": sample.opened} if sample.opened else {}
        line = {"place": place, "text": str(sample), "tokens": sample.tokens} | opened
        atomic.append_line(self.written, json.dumps(line))
        self._texts[place] = sample

    def load(self, place: Place) -> Completion:
        """Return the text, of any process."""
        if not self.has(place):
            del self._texts  # other processes have written since
        return self._texts[place]

    def batch(self, places: Sequence[Place]) -> list[Completion]:
        return [self.load(place) for place in places]


AnyLedger: TypeAlias = Ledger | TextLedger


@dataclass(frozen=True)
class Arm:
    """Weights to sample from, and the settings of a call.

    weights: a run's folder, one of its checkpoints, a LoRA, or None for the base.
    asked: arguments of a pipeline's call, or a language model's `text` settings.
    rlg: draw with base + rlg * (tuned - base); None: with the weights.
    """

    weights: Path | None
    asked: dict[str, Any]
    rlg: float | None = None


@dataclass(frozen=True)
class Medium:
    """Kind of sample.

    unit: name of a sample.
    together: default number of samples per call.
    modality: as in rewards; None if the samples show it (images or clips).
    """

    unit: str
    ledger: type[Ledger] | type[TextLedger]
    together: int
    modality: str | None


@dataclass(frozen=True)
class Plan:
    """Models to sample (the base, weights tuned from it, or both), and settings.

    config: of the run that tuned the weights.
    asked: arguments of the pipeline's calls, or a language model's `text` settings.
    medium: images or texts.
    arms: weight of the tuned model by arm: 0 for the base, 1, or an RLG weight.
    rlg: requested RLG weights: None, one, or "sweep" for several, to which others may be added.
    precision: None takes the run's, or the device's default.
    best: `best_of.BestOf`, how each sample is chosen among several draws; None: it is drawn once.
    enhancer: `samplers.Enhancer`, which rewrites the prompts that images are drawn from; rewards and pages read the
        user's.
    """

    model: str
    tuned: Path | None
    arms: dict[str, float]
    rlg: float | str | None
    config: Config | None
    asked: dict[str, Any]
    samples: int
    seed: int
    medium: Medium
    precision: str | None = None
    best: Any = None
    enhancer: Any = None

    def arm(self, name: str) -> Arm:
        """Arm of that name. With RLG all arms but the base are blends of one loaded pair."""
        weight = self.arms[name]
        return Arm(self.tuned if weight else None, self.asked) if self.rlg is None else Arm(
            self.tuned, self.asked, weight)

    @property
    def negative(self) -> str:
        return self.config.negative_prompt if self.config else ""

    @functools.cached_property
    def fps(self) -> float | None:
        """Frames per second of clips; None for completions."""
        if self.medium.modality is not None:
            return None
        files = self.config.load if self.config is not None and self.config.model == self.model else Load()
        return rate_ahead(self.model, files, self.asked, self.asked.get("fps"))

    @property
    def base_arm(self) -> str | None:
        """First arm that draws with the base, if any."""
        return next((arm for arm, weight in self.arms.items() if weight == 0), None)

    def as_json(self) -> dict[str, Any]:
        """Settings that the images depend on, besides the prompts."""
        return {"model": self.model, "tuned": str(self.tuned) if self.tuned else None,
                "weights": weights_digest(self.tuned),
                "samples": self.samples, "seed": self.seed, "call": self.asked, "negative_prompt": self.negative,
                "rlg": self.rlg, **({"precision": self.precision} if self.precision else {}),
                **(self.best.as_json() if self.best else {}), **(self.enhancer.as_json() if self.enhancer else {})}


def weights_digest(path: Path | None) -> str | None:
    """Digest of the weights of a run, a checkpoint or a LoRA; exports beside them do not change it."""
    return None if path is None else digest([file.read_bytes() for _, file in weight_files(path)])


def digest(parts: Sequence[str | bytes]) -> str:
    """Sixteen hexadecimal digits that identify contents."""
    hashed = hashlib.sha256()
    for part in parts:
        hashed.update(part.encode() if isinstance(part, str) else part)
    return hashed.hexdigest()[:16]
