"""Prompts: reading them from a file, holding some out, and drawing those of an epoch.

A prompt file is one of
- `.txt`: one prompt per line; blank lines are passed over;
- `.jsonl`: one object per line with `prompt` and, where wanted, `negative_prompt`, `metadata` (an object that the
  rewards receive; those for text look for `answer` there), `image` (a path, relative to the prompt file; rewards find
  the picture's full path under `image` in the metadata) and `weight` (a positive number). Lines of GSM8K, with
  `question` and `answer` alone, are read as they are: the question is the prompt, and what stands after #### in the
  answer, without thousands separators, is metadata.answer. So are lines of GenEval, with `prompt`, `tag` and `include`:
  what stands beside the prompt is its metadata;
- `.csv`: the same names as columns; `metadata` cells hold JSON, empty cells count as absent;
- `.parquet` (of the hub's datasets; extra `parquet`): the same names as columns. Other columns go into the metadata, as
  those of `.csv` do; columns of bytes, such as pictures, are left out.
"""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import date, time
from decimal import Decimal
from pathlib import Path
from types import NoneType
from typing import Any

import numpy as np

from flowgrpo.config import Config, nearest
from flowgrpo.errors import UserError

KEYS = ("prompt", "negative_prompt", "metadata", "image", "weight")
GSM8K, GENEVAL = {"question", "answer"}, {"prompt", "tag", "include"}
STARTER = Path(__file__).parent / "starter"
# What the names of their files begin with.
PACKAGED = {"starter": "", "starter_video": "video_", "starter_text": "text_"}
LEAST = 1e-9  # of the largest number, what stands for 0 among those of how often prompts are wanted
SPLIT_SEED = 0  # the run's seed does not choose the held-out prompts: runs that differ in it are measured on the same


@dataclass(frozen=True)
class Prompt:
    """One prompt; `image` is the path of a reference picture, `weight` its relative frequency in training.

    The metadata tell the full path of the picture under `image`, unless they have such a key of their own.
    """

    text: str
    negative: str | None = None
    metadata: dict[str, Any] = field(default_factory=dict, hash=False)
    image: str | None = None
    weight: float = 1.0

    def __post_init__(self) -> None:
        if isinstance(self.image, str):
            object.__setattr__(self, "metadata", {"image": str(Path(self.image).resolve())} | self.metadata)

    @property
    def key(self) -> str:
        """By what prompts are told apart: the text, and the picture where there is one."""
        return self.text if self.image is None else f"{self.text}\n{self.image}"


def load_prompts(path: str | Path) -> list[Prompt]:
    """Read a .txt, .jsonl, .csv or .parquet file; UserError names the file and the line of a mistake."""
    path = Path(path)
    readers = {".txt": _read_txt, ".jsonl": _read_jsonl, ".csv": _read_csv, ".parquet": _read_parquet}
    if path.suffix not in readers:
        raise UserError(f"prompts {path}: expected a .txt, .jsonl, .csv or .parquet file, got "
                        f"{path.suffix or 'no ending'!r}")
    if not path.is_file():
        raise UserError(f"prompts {path}: no such file")
    try:
        text = path.read_text(encoding="utf-8-sig") if path.suffix != ".parquet" else ""
    except UnicodeDecodeError as error:
        raise UserError(f"prompts {path}: not UTF-8 text ({error.reason} at byte {error.start})") from None
    prompts = [_prompt(record, path, line) for line, record in readers[path.suffix](text, path)]
    if not prompts:
        raise UserError(f"prompts {path}: the file holds no prompt")
    return prompts


Records = Iterator[tuple[int, dict[str, Any]]]  # line number, counted from 1, and the record's keys


def _read_txt(text: str, path: Path) -> Records:
    for line, prompt in enumerate(text.split("\n"), 1):
        if prompt.strip():
            yield line, {"prompt": prompt}


def _read_jsonl(text: str, path: Path) -> Records:
    for line, record in enumerate(text.split("\n"), 1):
        if record.strip():
            found = _json(record, path, line)
            keys = found.keys() if isinstance(found, dict) else set()
            if keys == GSM8K:
                found = _gsm8k(found, path, line)
            elif GENEVAL <= keys and "metadata" not in keys:
                found = {"prompt": found.pop("prompt"), "metadata": found}
            yield line, found


def _gsm8k(record: dict[str, Any], path: Path, line: int) -> dict[str, Any]:
    """A line of GSM8K (2110.14168) as one of ours."""
    _, mark, answer = str(record["answer"]).rpartition("####")
    answer = answer.strip().replace(",", "")
    if not mark or not answer:
        raise _wrong(path, line, f"expected a solution that ends with '#### number' under 'answer', got "
                                 f"{str(record['answer'])[-60:]!r}: put other answers into `metadata`, and the "
                                 "question under 'prompt'")
    return {"prompt": record["question"], "metadata": {"answer": answer}}


def _read_csv(text: str, path: Path) -> Records:
    reader = csv.DictReader(io.StringIO(text, newline=""), strict=True, skipinitialspace=True)
    try:
        if text.strip() and "prompt" not in reader.fieldnames:
            raise _wrong(path, 1, f"expected the heading 'prompt' in the first line, got {reader.fieldnames!r}")
        for record in reader:
            line = reader.line_num
            if None in record:
                raise _wrong(path, line, f"{len(reader.fieldnames) + len(record[None])} cells under "
                                         f"{len(reader.fieldnames)} headings: quote prompts that hold a comma")
            yield line, _with_facts({key: cell for key, cell in record.items() if cell}, path, line)
    except csv.Error as error:
        raise _wrong(path, reader.line_num, f"not valid CSV: {error}") from None


def rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a .parquet file as JSON has them, without columns that hold bytes: dates and times as ISO 8601 writes
    them, NaN as null. UserError where pyarrow is missing."""
    from flowgrpo.rewards.needs import needed

    parquet = needed("pyarrow.parquet", "parquet", str(path))
    try:
        columns = [field.name for field in parquet.read_schema(path) if "binary" not in str(field.type)]
        return [_plain(row) for row in parquet.read_table(path, columns=columns).to_pylist()]
    except (OSError, ValueError) as error:  # pyarrow's own are of the latter
        raise UserError(f"{path}: not a .parquet file that can be read ({' '.join(str(error).split())[:200]})"
                        ) from None


def _plain(value: Any) -> Any:
    """A cell's value as JSON has it; what JSON has nothing like, such as a duration, as its text."""
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(inner) for inner in value]
    if isinstance(value, (date, time)):  # a datetime is a date
        return value.isoformat()
    if isinstance(value, Decimal):
        return int(value) if value == int(value) else float(value)
    if isinstance(value, float) and math.isnan(value):
        return None
    return value if isinstance(value, (str, int, float, NoneType)) else str(value)


def _read_parquet(_: str, path: Path) -> Records:
    for line, row in enumerate(rows(path), 1):
        if "prompt" not in row and row.keys() != GSM8K:
            raise _wrong(path, line, f"expected the column 'prompt', got {', '.join(row)}")
        yield line, _gsm8k(row, path, line) if row.keys() == GSM8K else _with_facts(_known(row), path, line)


def _with_facts(row: dict[str, Any], path: Path, line: int) -> dict[str, Any]:
    """A row as one of our records: what is in no column of ours is metadata."""
    told = row.pop("metadata", {})
    if isinstance(told, str):
        told = _json(told, path, line)
    elif isinstance(told, dict):
        told = _known(told)  # a structure has the keys of all rows
    facts = {key: row.pop(key) for key in [*row] if key not in KEYS}
    return row | {"metadata": facts | told if isinstance(told, dict) else told}


def _known(row: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in row.items() if value is not None}


def _json(text: str, path: Path, line: int) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise _wrong(path, line, f"not valid JSON: {error.msg} (column {error.colno})") from None


def _prompt(record: Any, path: Path, line: int) -> Prompt:
    if not isinstance(record, dict):
        raise _wrong(path, line, f"expected an object with the key 'prompt', got {record!r}")
    for key in record:
        if key not in KEYS:
            raise _wrong(path, line, f"unknown key {key!r}{nearest(key, list(KEYS))} (other facts go into `metadata`)")
    text, negative, metadata = record.get("prompt"), record.get("negative_prompt"), record.get("metadata")
    if not isinstance(text, str) or not text.strip():
        raise _wrong(path, line, f"expected a text under 'prompt', got {text!r}")
    if not isinstance(negative, str | None):
        raise _wrong(path, line, f"expected a text under 'negative_prompt', got {negative!r}")
    if not isinstance(metadata, dict | None):
        raise _wrong(path, line, f"expected an object under 'metadata', got {metadata!r}")
    return Prompt(text.strip(), negative, metadata or {}, _image(record.get("image"), path, line),
                  _weight(record.get("weight"), path, line))


def _image(name: Any, path: Path, line: int) -> str | None:
    if name is None:
        return None
    if not isinstance(name, str):
        raise _wrong(path, line, f"expected a path under 'image', got {name!r}")
    if not (path.parent / name).is_file():
        raise _wrong(path, line, f"no image at {path.parent / name}")
    return str(path.parent / name)


def _weight(value: Any, path: Path, line: int) -> float:
    if value is None:
        return 1.0
    try:
        weight = float(value)
    except (TypeError, ValueError):
        weight = math.nan
    if isinstance(value, bool) or not 0 < weight < math.inf:
        raise _wrong(path, line, f"expected a positive number under 'weight', got {value!r}")
    return weight


def _wrong(path: Path, line: int, what: str) -> UserError:
    return UserError(f"prompts {path}, line {line}: {what}")


def split(prompts: list[Prompt], held_out: float | str, seed: int) -> tuple[list[Prompt], list[Prompt]]:
    """Part prompts into (train, held out); no text is ever on both sides, or none with the same picture.

    A share holds out that part of the different texts (rounded, at least one), chosen by a permutation that depends on
    the texts and the seed alone. A path is read as the held-out prompts, and their texts leave the training side. A
    text with another picture is another text. UserError where a side is left empty.
    """
    if isinstance(held_out, str):
        held = load_prompts(held_out)
        keys = {prompt.key for prompt in held}
    else:
        keys = _share(sorted({prompt.key for prompt in prompts}), held_out, seed)
        held = [prompt for prompt in prompts if prompt.key in keys]
    train = [prompt for prompt in prompts if prompt.key not in keys]
    if not train:
        raise UserError(f"held_out: {held_out!r} holds out every prompt and leaves none to train on")
    return train, held


def _share(texts: list[str], share: float, seed: int) -> set[str]:
    if not 0 < share < 1:
        raise UserError(f"held_out: got {share!r}, expected a share between 0 and 1, or a prompt file")
    if len(texts) < 2:
        raise UserError(f"held_out: {len(texts)} different prompts cannot be parted into training and held-out ones: "
                        f"give more prompts, or a file of held-out prompts")
    count = max(1, round(share * len(texts)))
    return {texts[i] for i in np.random.default_rng(seed).permutation(len(texts))[:count]}


def draw(prompts: list[Prompt], count: int, epoch: int, seed: int,
         wanted: Sequence[float] | None = None) -> list[Prompt]:
    """The prompts of one epoch: a pure function of its arguments, so that a resumed run needs no state, and every
    process draws the same.

    No prompt comes twice in an epoch unless `count` exceeds their number n; then each comes count // n times, and only
    the rest is drawn. Where all weights are equal, epochs walk through the data: every n draws in a row, counted from
    the start, are one permutation. Otherwise an epoch is drawn with probabilities in proportion to the weights.

    wanted: how often the method wants each prompt drawn, numbers from 0 up by which the prompts' own weights are
    multiplied. While all are equal they change nothing; a prompt of 0 comes when the others do not suffice.
    """
    whole, rest = divmod(count, len(prompts))
    weights = np.array([prompt.weight for prompt in prompts])
    if wanted is not None and min(wanted) < max(wanted):
        weights = weights * np.maximum(wanted, LEAST * max(wanted))
    if (weights == weights[0]).all():
        chosen = _walk(len(prompts), rest, epoch, seed)
    else:
        rng = np.random.default_rng([seed, epoch])
        chosen = rng.choice(len(prompts), rest, replace=False, p=weights / weights.sum())
    return prompts * whole + [prompts[i] for i in chosen]


def _walk(n: int, count: int, epoch: int, seed: int) -> np.ndarray:
    """Indices [count] at `epoch * count` of an endless row of permutations of n > count.

    Where an epoch runs over the end of one permutation, the next begins with others than that epoch already has.
    """
    if not count:
        return np.empty(0, int)
    start, order = epoch * count, np.empty(0, int)
    last = (start + count - 1) // n
    for number in range(last + 1):
        before, order = order, np.random.default_rng([seed, number]).permutation(n)
        given = number * n % count  # how many of the epoch at hand came from the permutation before
        fresh = order[~np.isin(order, before[n - given:])][:count - given]
        order = np.concatenate([fresh, order[~np.isin(order, fresh)]])
    offset = start - max(last - 1, 0) * n
    return np.concatenate([before, order])[offset:offset + count]


def require_no_share(config: Config) -> None:
    """UserError for packaged prompts and a share of them to hold out, which would be without effect; a run's saved
    configuration says the usual share."""
    usual = config.held_out == Config.model_fields["held_out"].default
    if config.prompts in PACKAGED and isinstance(config.held_out, float) and not usual:
        raise UserError(f"held_out: got {config.held_out!r}, but prompts: {config.prompts} brings held-out prompts of "
                        "its own: leave it out, or name a file")


def resolve(config: Config) -> tuple[list[Prompt], list[Prompt]]:
    """The (training, held-out) prompts of a configuration.

    `prompts: starter`, `starter_video` and `starter_text` mean the files that come with the package: their own held-out
    file takes the place of a share.
    """
    if config.prompts not in PACKAGED:
        return split(load_prompts(config.prompts), config.held_out, SPLIT_SEED)
    train, own = (STARTER / f"{PACKAGED[config.prompts]}{side}.jsonl" for side in ("train", "held_out"))
    return split(load_prompts(train), config.held_out if isinstance(config.held_out, str) else str(own), SPLIT_SEED)
