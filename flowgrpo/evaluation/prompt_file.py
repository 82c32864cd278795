"""Samples of every prompt of a file, and a prompt file that names them: the base model's pictures for
`base_similarity`, or texts of a model."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from flowgrpo.data import sources
from flowgrpo.data.prompts import USER_PROMPT, Prompt, as_line, load_prompts
from flowgrpo.device import require_generators
from flowgrpo.errors import UserError
from flowgrpo.evaluation import draw, images
from flowgrpo.evaluation.evaluate import make_plan
from flowgrpo.evaluation.ledger import BaseLedger, Place
from flowgrpo.evaluation.plan import Plan, digest
from flowgrpo.policies import loading
from flowgrpo.storage import atomic, paths

FILE = "prompts.jsonl"
PROMPT = "prompt"  # the key that makes a text the prompt of its line
KEYS = {draw.PICTURES: "base_image", draw.TEXTS: "base_text"}


@loading.memory_told()
def sample(source: str, prompts: str | Path, output: str | Path, *, lora: str | Path | None = None, count: int = 1,
           seed: int = 0, steps: int | None = None, guidance: float | None = None, rlg: float | None = None,
           batch: int | None = None, temperature: float | None = None, key: str | None = None,
           precision: str | None = None, best_of: int = 1, by: str | dict[str, Any] = "",
           enhancer: str | None = None) -> Path:
    """Draw `count` samples of each prompt of a file, as `evaluate` does; returns `output`/prompts.jsonl.

    That file has a line per sample: the prompt with its metadata, and under `key` the absolute path of the picture (of
    a clip's animated WebP), or the text itself. key: None means "base_image" or "base_text";
    with "prompt" a text becomes the line's prompt (see `_named`). Existing samples in the folder are kept. Other
    arguments: see `evaluate`.
    Raises UserError as `evaluate` does, for a folder with samples of other settings, and for pictures as prompts.
    """
    plan = make_plan(source, lora, False, count, steps, guidance, seed, [] if rlg is None else [rlg], temperature,
                     precision=precision, best_of=best_of, by=by, enhancer=enhancer)
    if key == PROMPT and plan.medium is draw.PICTURES:
        raise UserError("--key prompt: makes a text the prompt of its line, and the model generates images: name "
                        "another key")
    paths.require_folder(output)
    given, [arm] = load_prompts(prompts), plan.arms
    sources.require(given)
    images.require_disk(output, len(given) * count)
    require_generators(len(given) * count, "samples")
    ledger = plan.medium.ledger(Path(output))
    settings = plan.as_json() | {"prompt file": digest([repr(prompt) for prompt in given]), "rewards": {}}
    ledger.check(settings)
    ledger.settle(settings)
    places = [Place(arm, i, k) for i in range(len(given)) for k in range(count)]
    _draw(plan, given, places, ledger, batch or plan.medium.together)
    name, path = key or KEYS[plan.medium], ledger.folder / FILE
    lines = [as_line(_named(given[place.prompt], name, ledger.told(place))) for place in places]
    atomic.write_text(path, "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines))
    return path


def _named(prompt: Prompt, key: str, sample: str) -> Prompt:
    """Return a prompt whose metadata has a sample under `key`. For PROMPT: with the sample as its text, and the user's
    text in its metadata; a sample without a text changes nothing."""
    if key != PROMPT:
        return replace(prompt, metadata=prompt.metadata | {key: sample})
    from flowgrpo.text.rewards.pictured import rewritten

    text = rewritten(sample) or prompt.text
    return replace(prompt, text=text, metadata={USER_PROMPT: prompt.text} | prompt.metadata)


def _draw(plan: Plan, prompts: Sequence[Prompt], places: Sequence[Place], ledger: BaseLedger, batch: int) -> None:
    """Make the missing samples, `batch` per call, and save each call's immediately."""
    hand = plan.drawer(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    missing = [place for place in places if not ledger.has(place)]
    with tqdm(total=len(places), initial=len(places) - len(missing), desc="sampling", unit=plan.medium.unit,
              leave=False, disable=None) as bar:
        for first in range(0, len(missing), batch):
            some = missing[first:first + batch]
            for place, drawn in zip(some, hand.draw(some[0].arm, [prompts[place.prompt] for place in some], some)):
                ledger.save(place, drawn, hand.facts(place.arm, prompts[place.prompt], place, drawn),
                            hand.fps)
            bar.update(len(some))
