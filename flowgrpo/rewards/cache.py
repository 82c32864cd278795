"""Scores that were given before, by content: `rewards.sqlite` in the folder `cache`, shared by runs.

The key is a hash of the reward's name, arguments and source file, those of the rewards and functions that it is made
of (`made_of`, an attribute), the picture, the prompt and its metadata. What a reward reads besides (weights that
changed under the same name, a server that was replaced) is not seen: delete the file then. SQLite locks it for each
write, which a network file system may not honour: keep the folder on a local disk.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import math
import sqlite3
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

from flowgrpo.errors import UserError

FILE = "rewards.sqlite"


class Scores:
    """The kept scores of one reward; NaN, not applicable, is kept as well.

    UserError for a reward whose source file cannot be found, and for a file that is no cache.
    """

    def __init__(self, folder: str | Path, name: str, function: Callable[..., Any], arguments: dict[str, Any]) -> None:
        self.path = Path(folder) / FILE
        self.identity = json.dumps([name, arguments, version(name, function)], sort_keys=True, default=str)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._with("CREATE TABLE IF NOT EXISTS scores (key TEXT PRIMARY KEY, identity TEXT, score REAL)")

    def key(self, output: Any, prompt: str, metadata: dict[str, Any], base: Any = None) -> str:
        """The hash of a sample, and of the base's where one is compared with it; a picture is hashed as the numbers
        that it holds, with their type and shape."""
        hashed = hashlib.sha256()
        for part in (self.identity.encode(), prompt.encode(),
                     json.dumps(metadata, sort_keys=True, default=str).encode(), *_content(output),
                     *(() if base is None else _content(base))):
            hashed.update(len(part).to_bytes(8, "little") + part)
        return hashed.hexdigest()

    def read(self, keys: list[str]) -> dict[str, float]:
        """The scores that are known, by key."""
        marks = ",".join("?" * len(keys))
        rows = self._with(f"SELECT key, score FROM scores WHERE key IN ({marks})", keys)
        return {key: math.nan if score is None else score for key, score in rows}

    def write(self, scores: dict[str, float]) -> None:
        """Keep scores by their keys."""
        rows = [(key, self.identity, None if math.isnan(score) else score) for key, score in scores.items()]
        self._with("INSERT OR REPLACE INTO scores VALUES (?, ?, ?)", rows, many=True)

    def _with(self, statement: str, values: list[Any] = (), many: bool = False) -> list[tuple]:
        """Run a statement in a connection of its own: those of SQLite belong to one thread."""
        try:
            with closing(sqlite3.connect(self.path, timeout=60)) as connection, connection:
                return (connection.executemany if many else connection.execute)(statement, values).fetchall()
        except sqlite3.Error as error:
            raise UserError(f"the kept scores {self.path} cannot be used ({error}): remove the file") from None


def version(name: str, function: Callable[..., Any]) -> str:
    """The hash of a reward's source file, with the version of its package where that states one; then those of what it
    is made of."""
    thing = inspect.unwrap(getattr(function, "__func__", function))
    thing = thing if inspect.isfunction(thing) else type(thing)
    try:
        source = Path(inspect.getsourcefile(thing) or "").read_bytes()
    except (TypeError, OSError):
        raise UserError(f"reward {name!r} has no source file by which its scores could be known again: set "
                        "cache: false") from None
    package = sys.modules.get(thing.__module__.partition(".")[0])
    own = f"{getattr(package, '__version__', '')} {hashlib.sha256(source).hexdigest()[:16]}"
    return " ".join([own, *(version(name, part) for part in getattr(function, "made_of", ()))])


def _content(output: Any) -> tuple[bytes, ...]:
    """A text, or the numbers of a picture or video, as bytes."""
    if isinstance(output, str):
        return (output.encode(),)
    import torch

    held = torch.as_tensor(output).detach().cpu().contiguous()
    return f"{held.dtype} {tuple(held.shape)}".encode(), held.view(torch.uint8).numpy().tobytes()
