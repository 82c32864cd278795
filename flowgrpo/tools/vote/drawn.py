"""Pairs drawn for a vote: the same prompts and seeds with two LoRAs of a model, with the base and one, or two samples
of a model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from flowgrpo.data import sets
from flowgrpo.data.prompts import to_jsonl
from flowgrpo.errors import UserError
from flowgrpo.evaluation import images
from flowgrpo.evaluation.measured import spread
from flowgrpo.policies import loading
from flowgrpo.policies.checkpoints import config_of
from flowgrpo.storage import atomic, paths
from flowgrpo.tools.vote.ballot import Comparison
from flowgrpo.tools.vote.sources import Sides, of_folders


def pairs(source: Path, loras: Sequence[Path], prompts: Path | None, count: int, seed: int, folder: Path
          ) -> tuple[list[Comparison], Sides]:
    """Draw at most `count` prompts for each side into `folder`, and return the pairs; existing images are kept.

    source: a run, for its model and held-out prompts, or a model. loras: one, which is compared with the base, or two;
    none: both sides are the model's, from the seeds `seed` and `seed` + 1.
    prompts: a file or a set of prompts in place of the run's held-out ones.
    Raises UserError as `images.sample_file` does, for a model without `prompts`, and for weights that are missing.
    """
    config = config_of(source)
    if len(loras) > 2:
        raise UserError(f"--lora: got {len(loras)}, expected one, which is compared with the base, or two")
    if prompts is not None:
        chosen = spread(sets.resolve_prompts(prompts), count)
    elif config is not None:
        chosen = spread(sets.resolve(config)[1], count)
    else:
        raise UserError(f"{source} is no run, whose held-out prompts could be used: expected --prompts FILE too")
    for lora in loras:
        loading.require_weights(lora)
    listing = folder / "prompts.jsonl"
    model = config.model if config is not None else str(source)
    sides: list[Path | None] = [None] * (2 - len(loras)) + [*loras]
    with paths.undone(folder):
        atomic.write_text(listing, to_jsonl(chosen))
        for number, (name, side) in enumerate(zip("ab", sides)):
            own = seed if loras else seed + number
            images.sample_file(model, listing, folder / name, lora=side, seed=own, key="base_image")
    names = [side.resolve().name if side is not None else "base" for side in sides] if loras else \
        [f"seed {seed}", f"seed {seed + 1}"]
    return of_folders(folder / "a", folder / "b")[0], (names[0], names[1])
