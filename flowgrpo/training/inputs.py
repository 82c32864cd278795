"""Inputs of a run by hash, to report on resuming what changed besides the configuration."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from flowgrpo.config.schema import Config
from flowgrpo.data.prompts import Prompt
from flowgrpo.errors import UserError
from flowgrpo.packages import version
from flowgrpo.rewards.find import GROUP
from flowgrpo.storage import atomic
from flowgrpo.storage.json_files import read_object
from flowgrpo.storage.manifest import sha256
from flowgrpo.user_code import packaged

FILE = "inputs.json"  # in the run's folder
PACKAGES = ("flowgrpo", "torch", "diffusers", "transformers", "peft", "accelerate", "safetensors")

Split = tuple[list[Prompt], list[Prompt]]


def of_run(config: Config, split: Split) -> dict[str, Any]:
    """Return hashes of the user's code files by path, versions of packages, and hashes of the prompts.

    split: training and held-out prompts.
    """
    files = sorted({path for path in code_files(config.model_dump(mode="json")) if path.is_file()})
    rules = config.trained | config.watched
    points = packaged(GROUP)
    named = {rule.use or label for label, rule in rules.items()}
    dists = {point.dist.name for name, point in points.items() if name in named and point.dist}
    return {"code": {str(path): sha256(path) for path in files},
            "packages": {name: version(name) for name in (*PACKAGES, *sorted(dists))},
            "prompts": {side: prompt_hashes(prompts) for side, prompts in zip(("training", "held-out"), split)}}


def code_files(value: object) -> Iterator[Path]:
    """Yield the files of all names FILE.py:NAME in keys and values of a configuration."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from code_files(key)
            yield from code_files(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from code_files(inner)
    elif isinstance(value, str) and ".py:" in value:
        yield Path(value.rpartition(":")[0]).resolve()


def prompt_hashes(prompts: Sequence[Prompt]) -> dict[str, str]:
    """Return the hashes of the prompts' texts, and of all that stands beside the texts."""
    texts = [[prompt.text, prompt.negative] for prompt in prompts]
    beside = [[prompt.metadata, prompt.weight] for prompt in prompts]
    return {"texts": _hashed(texts), "metadata": _hashed(beside)}


def _hashed(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()


def write(folder: Path, inputs: dict[str, Any]) -> None:
    """Write the inputs of a run into its folder."""
    atomic.write_text(folder / FILE, json.dumps(inputs, indent=1) + "\n")


def changes(folder: Path, now: dict[str, Any]) -> list[str]:
    """Return in words what differs from the inputs that the run in the folder began or went on with.

    Empty for a run of an earlier version, which has not recorded them.
    """
    if not (folder / FILE).is_file():
        return []
    try:
        was = read_object(folder / FILE, "it is written anew", code=dict, packages=dict, prompts=dict)
    except UserError as error:
        return [f"unknown inputs: {error}"]
    said = [f"other code in {path}" for path, digest in now["code"].items() if was["code"].get(path, digest) != digest]
    said += [f"{name} {number}, was {was['packages'][name]}" for name, number in now["packages"].items()
             if was["packages"].get(name, number) != number]
    for side, hashes in now["prompts"].items():
        before = was["prompts"].get(side)
        before = before if isinstance(before, dict) else {}
        said += [f"other {kind} of the {side} prompts" for kind, digest in hashes.items()
                 if before.get(kind, digest) != digest]
    return said
