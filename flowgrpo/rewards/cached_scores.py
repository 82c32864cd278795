"""Cached scores, in `rewards.sqlite` in the folder `cache`, shared by runs.

The key is a hash of the reward's name, arguments and source file, those of the rewards and functions it is made of
(attribute `made_of`), the image, the prompt and its metadata. Anything else that a reward reads is not seen (weights
changed under the same name, a replaced server): delete the file then. SQLite locks the file for each write; a network
file system may not honour that, so keep the folder on a local disk.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import math
import sqlite3
import sys
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flowgrpo.errors import UserError
from flowgrpo.rewards.about import RewardFunction
from flowgrpo.rewards.reward import as_reward

if TYPE_CHECKING:
    from torch import Tensor

FILE = "rewards.sqlite"


class Scores:
    """Cached scores of one reward, including NaN (not applicable).

    Raises UserError for a reward whose source file cannot be found, and for a file that is not a cache.
    """

    def __init__(self, folder: str | Path, name: str, function: RewardFunction, arguments: dict[str, Any]) -> None:
        self.path = Path(folder) / FILE
        self.identity = json.dumps([name, arguments, version(name, function)], sort_keys=True, default=str)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._with("CREATE TABLE IF NOT EXISTS scores (key TEXT PRIMARY KEY, identity TEXT, score REAL)")

    def key(self, output: Tensor | str, prompt: str, metadata: dict[str, Any], base: Tensor | None = None,
            fps: float | None = None) -> str:
        """Hash of a sample, and of the base's sample if compared, and of the frames per second if read.

        An image is hashed by its numbers, dtype and shape.
        """
        hashed = hashlib.sha256()
        parts = [self.identity.encode(), prompt.encode(), json.dumps(metadata, sort_keys=True, default=str).encode(),
                 *_content(output)]
        parts += [] if base is None else _content(base)
        parts += [] if fps is None else [f"fps {fps:g}".encode()]
        for part in parts:
            hashed.update(len(part).to_bytes(8, "little") + part)
        return hashed.hexdigest()

    def read(self, keys: list[str]) -> dict[str, float]:
        marks = ",".join("?" * len(keys))
        rows = self._with(f"SELECT key, score FROM scores WHERE key IN ({marks})", keys)
        return {key: math.nan if score is None else score for key, score in rows}

    def write(self, scores: dict[str, float]) -> None:
        rows = [(key, self.identity, None if math.isnan(score) else score) for key, score in scores.items()]
        self._with("INSERT OR REPLACE INTO scores VALUES (?, ?, ?)", rows, many=True)

    def _with(self, statement: str, values: Sequence[Any] = (), many: bool = False) -> list[tuple]:
        """Run a statement in a new connection: SQLite connections belong to one thread."""
        try:
            with closing(sqlite3.connect(self.path, timeout=60)) as connection, connection:
                return (connection.executemany if many else connection.execute)(statement, values).fetchall()
        except sqlite3.Error as error:
            raise UserError(f"the kept scores {self.path} cannot be used ({error}): remove the file") from None


def version(name: str, function: RewardFunction) -> str:
    """Hash of a reward's source file, with its package's version if stated, and those of its parts."""
    thing = inspect.unwrap(getattr(function, "__func__", function))
    thing = thing if inspect.isfunction(thing) else type(thing)
    try:
        source = Path(inspect.getsourcefile(thing) or "").read_bytes()
    except (TypeError, OSError):
        raise UserError(f"reward {name!r} has no source file by which its scores could be known again: set "
                        "cache: false") from None
    package = sys.modules.get(thing.__module__.partition(".")[0])
    digest = f"{getattr(package, '__version__', '')} {hashlib.sha256(source).hexdigest()[:16]}"
    return " ".join([digest, *(version(name, part.origin) for part in as_reward(function).parts)])


def _content(output: Tensor | str) -> tuple[bytes, ...]:
    if isinstance(output, str):
        return (output.encode(),)
    import torch

    held = torch.as_tensor(output).detach().cpu().contiguous()
    return f"{held.dtype} {tuple(held.shape)}".encode(), held.view(torch.uint8).numpy().tobytes()
