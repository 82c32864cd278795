"""Scores of samples for `flowgrpo reward label`: groups of the samples of a prompt, and their rewards, kept in a file.

A group's scores are a line of the file as soon as they are known, so a killed command goes on. A line is known again by
the content of its samples and by the reward's name, arguments and `when`.
"""

import hashlib
import itertools
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
from flowgrpo.evaluation.plan import entries
from flowgrpo.log import bar
from flowgrpo.rewards import Composed, Failed, Tally
from flowgrpo.rewards.preprocessing import read_output
from flowgrpo.rewards.score import columns
from flowgrpo.storage import atomic
from flowgrpo.storage.json_files import finite, json_digest
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
        return json_digest([as_line(self.prompt), contents])[:32]


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


def score(groups: Sequence[Group], rewards: dict[str, Composed], file: Path, tally: Tally) -> list[torch.Tensor]:
    """Scores [G, R] of every group by R rewards, NaN where one does not apply or has failed.

    Those that `file` lacks are computed, several groups of one size in a call, and kept there, but for a group's with a
    failure. tally: counts failures.
    """
    rules = {name: json_digest([reward.rule.use or name, reward.rule.args, reward.rule.when])[:32]
             for name, reward in rewards.items()}
    known: dict[tuple[str, str], list[float]] = {
        (line["group"], line["rule"]): [math.nan if value is None else value for value in line["scores"]]
        for line in (entries(file.parent, file.name) if file.is_file() else ())
        if isinstance(line, dict) and {"group", "rule", "scores"} <= line.keys()}
    digests = [group.digest for group in groups]
    missing = [place for place, digest in enumerate(digests)
               if any((digest, rule) not in known for rule in rules.values())]
    calls = [missing[:1]] if missing else []  # the first group alone, which finds mistakes
    for size, places in itertools.groupby(missing[1:], lambda place: len(groups[place].samples)):
        alike, count = list(places), max(AT_ONCE // size, 1)
        calls += [alike[start:start + count] for start in range(0, len(alike), count)]
    total = sum(len(group.samples) for group in groups)
    with bar(total=total, title="scoring", unit="sample",
             done=total - sum(len(groups[place].samples) for place in missing)) as shown:
        for call in calls:
            lacking = {name: reward for name, reward in rewards.items()
                       if any((digests[place], rules[name]) not in known for place in call)}
            outputs: Any = [sample if isinstance(sample, str) else read_output(sample)
                            for place in call for sample in groups[place].samples]
            prompts = [groups[place].prompt for place in call for _ in groups[place].samples]
            size = len(groups[call[0]].samples)
            table = promptly(partial(columns, lacking, outputs, [prompt.text for prompt in prompts],
                                     [prompt.metadata for prompt in prompts], group=size, tally=tally))
            for name, column in zip(lacking, table):
                for number, place in enumerate(call):
                    values = column[number * size:(number + 1) * size]
                    numbers = [math.nan if isinstance(value, Failed) else float(value) for value in values]
                    known[digests[place], rules[name]] = numbers
                    if not any(isinstance(value, Failed) for value in values):
                        atomic.append_line(file, json.dumps(
                            {"group": digests[place], "rule": rules[name], "scores": finite(numbers)}))
            shown.update(len(outputs))
    return [torch.tensor([known[digest, rule] for rule in rules.values()], dtype=torch.float64).T
            for digest in digests]
