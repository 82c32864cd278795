"""Scores of samples for `flowgrpo reward label`: groups of the samples of a prompt, and their rewards, kept in a file.

A group's scores are a line of the file as soon as they are known, so a killed command goes on. A line is known again by
the content of its samples and by the reward's name, arguments and `when`.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from flowgrpo.data.prompts import Prompt, as_line, load_prompts
from flowgrpo.distributed.signals import promptly
from flowgrpo.errors import UserError
from flowgrpo.evaluation.plan import append, entries
from flowgrpo.log import bar
from flowgrpo.rewards import Composed, Failed, Tally
from flowgrpo.rewards.preprocessing import read_output
from flowgrpo.rewards.score import columns
from flowgrpo.tools.vote.sources import ENDINGS, list_images, own_image

AT_ONCE = 32  # samples scored in one call, and a whole group at least
KEYS = ("base_text", "base_image")  # of the metadata in a folder's prompts.jsonl: a text, or the path of an image


@dataclass(frozen=True)
class Group:
    """Samples of one prompt: all texts, or all paths of images or clips. Equal ones are there once."""

    prompt: Prompt
    samples: tuple[str | Path, ...]

    @property
    def digest(self) -> str:
        """Identity of prompt and samples, by content."""
        contents = [sample if isinstance(sample, str) else hashlib.sha256(sample.read_bytes()).hexdigest()
                    for sample in self.samples]
        return _digest([as_line(self.prompt), contents])


def groups(folders: Sequence[Path], key: str | None = None) -> list[Group]:
    """Samples of folders by prompt, in order of appearance; prompts with one sample are left out.

    A folder is one of `flowgrpo sample --prompts`, or one of images that name their prompt (`sources.listed`).
    key: under which its prompts.jsonl names a sample; None: one of KEYS.
    Raises UserError for a folder without samples, for texts beside images, and if no prompt has two samples.
    """
    prompts: dict[str, Prompt] = {}
    samples: dict[str, dict[str | Path, None]] = {}
    for folder in folders:
        for prompt, sample in _of_folder(folder, key):
            prompts.setdefault(prompt.key, prompt)
            samples.setdefault(prompt.key, {})[sample] = None
    if len({type(sample) is str for several in samples.values() for sample in several}) > 1:
        raise UserError(f"{', '.join(map(str, folders))} hold completions and images: expected samples of one kind")
    several = [Group(prompts[name], tuple(given)) for name, given in samples.items() if len(given) > 1]
    if not several:
        raise UserError(f"no prompt in {', '.join(map(str, folders))} has two different samples: sample several per "
                        "prompt (--count), or name several folders")
    return several


def _of_folder(folder: Path, key: str | None) -> Iterator[tuple[Prompt, str | Path]]:
    """Yield the samples of a folder with their prompts, without the metadata that names the sample."""
    listing = folder / "prompts.jsonl"
    keys = (key,) if key else KEYS
    listed_here = False
    for prompt in load_prompts(listing) if listing.is_file() else ():
        name = next((name for name in keys if isinstance(prompt.metadata.get(name), str)), None)
        if name is not None:
            listed_here, sample = True, prompt.metadata[name]
            rest = {other: value for other, value in prompt.metadata.items() if other != name}
            # A key of the user's own names texts or images.
            if name == "base_image" or name != "base_text" and sample.endswith(ENDINGS) and Path(sample).is_absolute():
                path = own_image(folder, sample)
                if path is None:
                    raise UserError(f"no image at {folder / sample}, which prompts.jsonl names: sample it again, or "
                                    "remove its line")
                sample = path
            yield replace(prompt, metadata=rest), sample
    if not listed_here:
        if not folder.is_dir():
            raise UserError(f"no folder at {folder}: expected a folder of samples, or --prompts too, with a model")
        images = list_images(folder)
        if not images:
            raise UserError(f"{folder} holds no samples: expected what `flowgrpo sample --prompts` writes, or images")
        yield from ((prompt, path) for path, prompt in images.values())



class Scores:
    """Scores of groups by R rewards, kept in a file. failed: counts failures of this call."""

    def __init__(self, rewards: dict[str, Composed], file: Path):
        self.rewards, self.file, self.failed = rewards, file, Tally()
        self.rules = {name: _digest([reward.rule.use or name, reward.rule.args, reward.rule.when])
                      for name, reward in rewards.items()}
        known = entries(file.parent, file.name) if file.is_file() else ()
        self.known: dict[tuple[str, str], list[float]] = {
            (line["group"], line["rule"]): [math.nan if value is None else value for value in line["scores"]]
            for line in known if isinstance(line, dict) and {"group", "rule", "scores"} <= line.keys()}

    def __call__(self, groups: Sequence[Group]) -> list[torch.Tensor]:
        """Scores [G, R] of every group, NaN where a reward does not apply or has failed; missing ones are computed."""
        digests = [group.digest for group in groups]
        missing = [place for place, digest in enumerate(digests)
                   if any((digest, rule) not in self.known for rule in self.rules.values())]
        failed: dict[tuple[str, str], list[float]] = {}
        with bar(total=sum(len(group.samples) for group in groups), title="scoring", unit="sample",
                 done=sum(len(group.samples) for at, group in enumerate(groups) if at not in set(missing))) as shown:
            for places in _together(groups, missing):
                failed |= self._score([groups[at] for at in places], [digests[at] for at in places])
                shown.update(sum(len(groups[at].samples) for at in places))
        known = self.known | failed
        return [torch.tensor([known[digest, rule] for rule in self.rules.values()], dtype=torch.float64).T
                for digest in digests]

    def _score(self, groups: Sequence[Group], digests: Sequence[str]) -> dict[tuple[str, str], list[float]]:
        """Score groups of one size and keep what has not failed; return the columns with failures."""
        size, failed = len(groups[0].samples), dict[tuple[str, str], list[float]]()
        lacking = {name: reward for name, reward in self.rewards.items()
                   if any((digest, self.rules[name]) not in self.known for digest in digests)}
        outputs: Any = [sample if isinstance(sample, str) else read_output(sample)
                        for group in groups for sample in group.samples]
        prompts = [group.prompt for group in groups for _ in group.samples]
        table = promptly(partial(columns, lacking, outputs, [prompt.text for prompt in prompts],
                                 [prompt.metadata for prompt in prompts], group=size, tally=self.failed))
        for name, column in zip(lacking, table):
            for place, digest in enumerate(digests):
                values = column[place * size:(place + 1) * size]
                numbers = [math.nan if isinstance(value, Failed) else float(value) for value in values]
                if any(isinstance(value, Failed) for value in values):
                    failed[digest, self.rules[name]] = numbers
                    continue
                self.known[digest, self.rules[name]] = numbers
                append(self.file, {"group": digest, "rule": self.rules[name], "scores": [
                    None if math.isnan(number) else number for number in numbers]})
        return failed


def _together(groups: Sequence[Group], places: Sequence[int]) -> Iterator[list[int]]:
    """Yield the places of groups of one size that are scored in one call; the first call has one group."""
    some: list[int] = []
    for number, place in enumerate(places):
        size = len(groups[place].samples)
        if some and (number == 1 or size != len(groups[some[0]].samples) or (len(some) + 1) * size > AT_ONCE):
            yield some
            some = []
        some.append(place)
    if some:
        yield some


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:32]
