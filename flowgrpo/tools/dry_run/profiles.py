"""Counts of dry runs that were computed before, each for all GPUs: of packaged recipes in PACKAGED, which
`scripts/docs/dry_run_profiles.py` writes, and of other recipes in the user's cache.

A profile is found by a digest of what it depends on; a changed recipe is run anew.
"""

import hashlib
import json
import os
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import astuple
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from flowgrpo.config.schema import Config
from flowgrpo.gpus import GPU, GPUS
from flowgrpo.published import LANGUAGE, MODELS
from flowgrpo.starter import FOLDERS
from flowgrpo.storage import atomic
from flowgrpo.tools.dry_run.estimate import Estimate
from flowgrpo.tools.dry_run.meta_gpu import Phase

PACKAGED = Path(__file__).with_name("profiles.json")


class EveryGPU(GPU):
    """All GPUs at once, in the order of GPUS; its own memory and peaks are those of one, and not read."""

    def seconds(self, flops: float, traffic: int, half: bool, attention: bool) -> Any:
        """The roofline's seconds of a kernel [GPUs]."""
        return _seconds(flops, traffic, half, attention)


@lru_cache(2**16)
def _seconds(*kernel: Any) -> Any:
    return np.array([gpu.seconds(*kernel) for gpu in GPUS.values()])


def find(config: Config, gpu: GPU, processes: int, run: Callable[[GPU], Estimate], alone: bool) -> Estimate:
    """Counts of `run`, a recipe's dry run on a GPU: those known already, or else its result, which the cache keeps.
    alone: the counts depend on the GPU in more than their seconds."""
    place = next((place for place, known in enumerate(GPUS.values()) if known == gpu), None)
    digest = None if place is None else digest_of(config, processes, gpu if alone else None)
    if place is None or digest is None:
        return run(gpu)
    if (profile := packaged().get(digest)) is None:
        profile = _cached(digest, lambda: as_profile(run(gpu if alone else EveryGPU(*astuple(gpu)))))
    phases = {}
    for name, values in profile["phases"].items():
        seconds, waits = values["seconds"], Counter(values["waits"])
        phases[name] = Phase(**values | {"seconds": seconds[0 if alone else place % len(seconds)], "waits": waits})
    rest = {key: value for key, value in profile.items() if key not in ("commit", "recipe")}
    return Estimate(**rest | {"phases": phases, "away": frozenset(profile["away"])}, stored=profile.get("commit", ""))


def digest_of(config: Config, processes: int, gpu: GPU | None = None) -> str | None:
    """Digest of a recipe's values that are no defaults, its model's configuration, and the peaks of all GPUs; None for
    a model, or a recipe's code, that is not known here."""
    described = Path(FOLDERS.get(config.model, config.load.config or config.model))
    recipe = config.model_dump(mode="json", exclude_defaults=True, exclude={"name", "output", "tracker"})
    if ".py" in repr(recipe):
        return None
    if described.is_dir():
        model: Any = [(str(file.relative_to(described)), file.read_bytes())
                      for file in sorted(described.rglob("*.json")) if file.stat().st_size < 2**20]
    elif (model := repr(MODELS.get(config.model) or LANGUAGE.get(config.model))) == "None":
        return None
    return hashlib.sha256(repr([recipe, processes, gpu, model, GPUS]).encode()).hexdigest()[:32]


@lru_cache(1)
def packaged() -> dict[str, dict[str, Any]]:
    """Profiles of the packaged recipes by digest."""
    return json.loads(PACKAGED.read_text(encoding="utf-8")) if PACKAGED.exists() else {}


def _cached(digest: str, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Profile from the cache of this user, which it is put into; a damaged or closed cache is not used. Other sources
    or versions of packages make another profile."""
    root = Path(__file__).parents[2]
    sources = [(str(file), file.stat().st_mtime_ns, file.stat().st_size) for file in sorted(root.rglob("*.py"))]
    key = hashlib.sha256(repr([digest, sources, [version(name) for name in (
        "torch", "diffusers", "transformers", "peft")]]).encode()).hexdigest()
    file = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "flowgrpo" / f"profile-{key[:32]}.json"
    with suppress(OSError, ValueError, AttributeError, KeyError):
        found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        if found["key"] == key:
            return found["profile"]
    profile = make()
    with suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        atomic.write_text(file, json.dumps({"key": key, "digest": digest, "profile": profile}), shared=True)
    return profile


def as_profile(counts: Estimate) -> dict[str, Any]:
    phases = {name: vars(phase) | {"seconds": [float(each) for each in np.atleast_1d(phase.seconds)]}
              for name, phase in counts.phases.items()}
    own = {key: value for key, value in vars(counts).items() if key not in ("phases", "factors", "source", "stored")}
    return own | {"phases": phases, "away": sorted(counts.away)}
