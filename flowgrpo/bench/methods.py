"""Methods of a bench as they are given: a preset, presets joined by +, FILE.py:NAME, or a recipe file."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from flowgrpo import rewards
from flowgrpo.bench import models
from flowgrpo.bench.models import ADJUSTED, BenchModel
from flowgrpo.config import parse
from flowgrpo.errors import UserError
from flowgrpo.methods import overlay
from flowgrpo.methods.targets import LatentEdits

RECIPES = (".yaml", ".yml")
# Keys of a recipe that are the bench's.
SHARED = ("name", "output", "model", "prompts", "held_out", "seed", "tracker", "train.epochs", "train.save_every")
CLIPS = ("low", "high", "bound")  # fields of losses that bound a ratio


@dataclass(frozen=True)
class Entry:
    """Method of a bench. label: its name in tables. given: as the user wrote it. settings: dotted, over the shared
    ones. adjusted: those that the bench set beside the published parts; of a recipe file all that it sets."""

    label: str
    given: str
    settings: dict[str, Any]
    adjusted: dict[str, Any]


def entries(given: list[str], name: str, of: BenchModel, trusted: bool = False) -> list[Entry]:
    """Return the methods of a list.

    name: of the model. trusted: as of `parse.load`.
    Raises UserError for an unknown method, one for other models, and one that is given twice.
    """
    if twice := [text for text, count in Counter(given).items() if count > 1]:
        raise UserError(f"--methods: {twice[0]} is given twice, expected different methods")
    made = [_of_recipe(Path(text), name, trusted) if text.endswith(RECIPES) else _of_method(text, of) for text in given]
    for entry in made:
        _require(entry, name, of)
    common = {label for label, count in Counter(entry.label for entry in made).items() if count > 1}
    return [replace(entry, label=entry.given) if entry.label in common else entry for entry in made]


def _of_method(text: str, of: BenchModel) -> Entry:
    method = overlay.preset(text)
    adjusted: dict[str, Any] = {}
    for part in text.split("+"):
        adjusted |= {key: _merged(adjusted.get(key), value) for key, value in ADJUSTED.get(part, {}).items()}
    if method.target.follows_reward and of.gradient:
        adjusted["reward"] = of.gradient
    label = "+".join(part.rpartition(":")[2] if ".py:" in part else part for part in text.split("+"))
    return Entry(label, text, {"method": text} | adjusted, adjusted)


def _of_recipe(path: Path, name: str, trusted: bool) -> Entry:
    raw = parse.read_yaml(path)
    if not trusted:
        parse.require_own(path, raw)
    config = parse.validate(raw, where=str(path))
    if "model" in raw and config.model != name:
        raise UserError(f"{path}: its model is {config.model}, but the bench is of {name}: give --model "
                        f"{config.model}, or another recipe")
    settings = {key: value for key, value in models.flat(raw).items()
                if key not in SHARED and not key.startswith("eval.")}
    settings = {"method": config.method} | settings
    return Entry(path.stem, str(path), settings, settings)


def _require(entry: Entry, name: str, of: BenchModel) -> None:
    """Raise UserError for a method of another kind of model, and for rewards that it cannot follow."""
    method = overlay.preset(entry.settings["method"]).on(of.process)
    if method.target.follows_reward:
        given = parse.validate({"reward": entry.settings.get("reward", models.shared(name)["reward"])})
        with rewards.lazily():
            rewards.require_gradient(rewards.compose(given.trained, None))


def _merged(one: Any, other: Any) -> Any:
    """Return nested dictionaries joined; the other's values win."""
    if not (isinstance(one, dict) and isinstance(other, dict)):
        return other
    return one | {key: _merged(one.get(key), value) for key, value in other.items()}


# --- sweep -----------------------------------------------------------------------------------------------------------

def scaled(entry: Entry, rate: float, lr: float, clip: float) -> dict[str, Any]:
    """Return an entry's settings with factors on its learning rate and on its clip.

    rate: learning rate without factors. Raises UserError for a clip that the loss refuses.
    """
    settings = entry.settings | ({} if lr == 1 else {"train.lr": rate * lr})
    if clip == 1:
        return settings
    parts = _merged(settings.get("parts", {}), {"surrogate": clip_of(entry, clip)})
    overlay.with_parts(overlay.preset(entry.settings["method"]), parts)
    return settings | {"parts": parts}


def clip_of(entry: Entry, factor: float) -> dict[str, Any]:
    """Return the clip's fields of a method's loss times a factor; empty for a loss without a clip."""
    method = overlay.with_parts(overlay.preset(entry.settings["method"]), entry.settings.get("parts", {}))
    return {} if isinstance(method.target, LatentEdits) else _clip(method.loss.surrogate, factor)


def _clip(surrogate: Any, factor: float) -> dict[str, Any]:
    values = {field.name: getattr(surrogate, field.name) for field in dataclasses.fields(surrogate)}
    fields: dict[str, Any] = {key: _bound(key, values[key], factor) for key in CLIPS
                              if isinstance(values.get(key), float) and math.isfinite(values[key])}
    inner = _clip(values["surrogate"], factor) if dataclasses.is_dataclass(values.get("surrogate")) else {}
    return fields | ({"surrogate": inner} if inner else {})


def _bound(name: str, bound: float, factor: float) -> float:
    """Return a bound times a factor. A ratio is at least 0: a `low` of 1 bounds nothing, stays, and is the largest."""
    return bound if name == "low" and bound == 1 else min(bound * factor, 1.0 if name == "low" else math.inf)
