"""Prompts from datasets of the hub: `hub:OWNER/NAME[:CONFIG][?column=..&split=..&revision=..&limit=..&streaming=true
&unique=true]`.

Columns named `negative_prompt`, `weight` and `metadata` are what they are in a prompt file; other columns of texts,
numbers, lists and structures become metadata. The library `datasets` (extra `datasets`) downloads once and caches.
"""

import itertools
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

from flowgrpo.data import inputs
from flowgrpo.data.prompts import Prompt, of_rows
from flowgrpo.errors import UserError, nearest
from flowgrpo.packages import import_optional

PREFIX = "hub:"
NAME = re.compile(r"(?P<id>\w[\w.-]*/\w[\w.-]*)(?::(?P<config>[\w.-]+))?")
OPTIONS = ("column", "split", "revision", "limit", "streaming", "unique")
# Columns of the prompt, the first there is.
COLUMNS = ("prompt", "Prompt", "prompts", "Prompts", "caption", "text", "question", "problem", "messages")


@dataclass(frozen=True)
class HubPrompts:
    """Dataset of the hub.

    id: OWNER/NAME, or a folder of that form. config: its configuration.
    column: of the prompts; None takes the first of `COLUMNS` that the dataset has. limit: number of rows, None for all.
    streaming: read rows as they arrive, in place of downloading the whole dataset first.
    unique: take each text once, without the other columns, which belong to one of its rows.
    """

    id: str
    config: str | None = None
    column: str | None = None
    split: str = "train"
    revision: str | None = None
    limit: int | None = None
    streaming: bool = False
    unique: bool = False


def is_dataset(source: Path | str) -> bool:
    return isinstance(source, str) and source.startswith(PREFIX)


def parse(source: str) -> HubPrompts:
    """Parse `hub:OWNER/NAME[:CONFIG][?OPTION=VALUE&...]`. Raises UserError with the part that is wrong."""
    name, _, query = source.removeprefix(PREFIX).partition("?")
    match = NAME.fullmatch(name)
    if not match:
        raise UserError(f"prompts {source!r}: expected hub:OWNER/NAME or hub:OWNER/NAME:CONFIG, got {name!r}")
    given = dict(parse_qsl(query, keep_blank_values=True))
    for key in given:
        if key not in OPTIONS:
            raise UserError(f"prompts {source!r}: unknown option {key!r}{nearest(key, list(OPTIONS))}; there are "
                            f"{', '.join(OPTIONS)}")
    typed: dict[str, Any] = {**given}
    if "limit" in given:
        if not (given["limit"].isdecimal() and int(given["limit"])):
            raise UserError(f"prompts {source!r}: limit is {given['limit']!r}, expected a number of rows above 0")
        typed["limit"] = int(given["limit"])
    for flag in ("streaming", "unique"):
        if given.get(flag, "false") not in ("true", "false"):
            raise UserError(f"prompts {source!r}: {flag} is {given[flag]!r}, expected true or false")
        typed[flag] = given.get(flag) == "true"
    return HubPrompts(match["id"], match["config"], **typed)


def load(source: str) -> list[Prompt]:
    """Prompts of a dataset. Raises UserError if it cannot be loaded or has no such column."""
    wanted = parse(source)
    rows = _rows(source, wanted)
    first = next(rows, None)
    if first is None:
        raise UserError(f"prompts {source}: the split {wanted.split!r} holds no row")
    column = wanted.column or next((name for name in COLUMNS if name in first), None)
    if column is None or column not in first:
        raise UserError(f"prompts {source}: there is no column {wanted.column or 'prompt'!r}; there are "
                        f"{', '.join(first)}: name one by ?column=NAME")
    whole: Iterable[dict[str, Any]] = itertools.chain([first], rows)
    if wanted.unique:
        texts = dict.fromkeys(str(row[column]).strip() for row in whole if row[column])
        whole = ({column: text} for text in texts)
    named = ({key: value for key, value in row.items() if key not in (column, "image")} | {"prompt": row[column]}
             for row in itertools.islice(whole, wanted.limit))
    return of_rows(named, Path(source))


def _rows(source: str, dataset: HubPrompts) -> Iterator[dict[str, Any]]:
    datasets = import_optional("datasets", "datasets", source)
    try:
        rows: Iterable[dict[str, Any]] = datasets.load_dataset(
            dataset.id, dataset.config, split=dataset.split, revision=dataset.revision, streaming=dataset.streaming)
    except Exception as error:  # of the hub, the file system, a parser
        raise UserError(f"prompts {source}: the dataset does not load ({' '.join(str(error).split())[:200]}): expected "
                        "a public dataset, or `hf auth login` before, and a network for the first time") from None
    features = getattr(rows, "features", None) or {}
    media = {name for name, feature in features.items() if type(feature).__name__ in ("Image", "Audio", "Video")}
    inputs.note_unread(f"prompts {source}", tuple(sorted(media)))
    yield from rows.remove_columns([*media]) if media else rows  # type: ignore[attr-defined]
