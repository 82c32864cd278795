"""Rules of a recipe around a reward, with the same facts.

Before all of them a batch of several sizes is split, by `by_size`.

Cached scores lie in `rewards.sqlite` in the folder `cache`, shared by runs. The key is a hash of the reward's name,
arguments and source file, those of the rewards and functions it is made of (attribute `made_of`), the image, the
prompt and its metadata. Anything else that a reward reads is not seen (weights changed under the same name, a replaced
server): delete the file then. SQLite locks the file for each write; a network file system may not honour that, so keep
the folder on a local disk.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import math
import sqlite3
import sys
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flowgrpo.config.reward_rules import WatchRule
from flowgrpo.errors import UserError
from flowgrpo.nouns import quantity
from flowgrpo.rewards.about import RewardFunction
from flowgrpo.rewards.failures import Failed, relabel_errors, score_with_policy, with_label, within
from flowgrpo.rewards.pairwise import WinRates, pairing
from flowgrpo.rewards.reward import BASE, FPS, Batch, Checked, Reward, Wrapped, as_reward

if TYPE_CHECKING:
    from torch import Tensor

    from flowgrpo.rewards.placement import Placement

FILE = "rewards.sqlite"


def ready(name: str, reward: Reward, rule: WatchRule = WatchRule(), kept: Scores | None = None,
          placement: Placement | None = None) -> Reward:
    """Reward of that label under its rule. kept: its cached scores. placement: of weights that have to be brought."""
    checked = Checked(name, WinRates(name, reward, pairing(reward)) if reward.unit == "pair" else reward)
    ruled = rule.when or rule.timeout or rule.on_error != "raise" or rule.use not in (None, name) or kept or placement
    return Ruled(name, checked, rule, kept, placement) if ruled else checked


class Ruled(Wrapped):
    """Reward under its rule: `when`, then cached scores, weights on their device, attempts, the time-out, and the label
    in errors, in this order."""

    def __init__(self, name: str, reward: Reward, rule: WatchRule, kept: Scores | None, placement: Placement | None
                 ) -> None:
        super().__init__(name, reward)
        self.rule, self.kept, self.placement = rule, kept, placement

    def __call__(self, batch: Batch) -> list[float | Failed]:
        """Scores for the prompts that the rule applies to; NaN for all others."""
        rows = [i for i, entry in enumerate(batch.metadata) if self.rule.applies(entry)]
        found = dict(zip(rows, self._unless_cached(batch.rows(rows)))) if rows else {}
        return [found.get(i, math.nan) for i in range(len(batch))]

    def _unless_cached(self, batch: Batch) -> list[float | Failed]:
        if self.kept is None:
            return self._ask(batch)
        bases = batch.base if BASE in self.reads and batch.base is not None else [None] * len(batch)
        fps = batch.fps if FPS in self.reads else None
        keys = [self.kept.key(*sample, fps) for sample in zip(batch.samples, batch.prompts, batch.metadata, bases)]
        known: dict[str, Any] = {**self.kept.read(keys)}
        if missing := [i for i, key in enumerate(keys) if key not in known]:
            fresh = list(zip((keys[i] for i in missing), self._ask(batch.rows(missing))))
            self.kept.write({key: value for key, value in fresh if not isinstance(value, Failed)})
            known |= fresh
        return [known[key] for key in keys]

    def _ask(self, batch: Batch) -> list[float | Failed]:
        if self.placement is not None:
            self.placement.bring()
        return score_with_policy(lambda rows: self._answer(batch.rows(rows)), range(len(batch)), self.rule.on_error,
                                 batch.group if self.unit == "group" else 1)

    def _answer(self, batch: Batch) -> list[float | Failed]:
        """Answer within the rule's time. Raises TimedOut."""
        message = (f"reward {self.name!r} hangs on {quantity(len(batch), 'sample')} (first prompt of the batch: "
                   f"{batch.prompts[0]!r})")
        return within(self.rule.timeout, message, lambda: self._named(batch))

    def _named(self, batch: Batch) -> list[float | Failed]:
        """Answer whose errors and failures have the label and the name of a reward that has both."""
        use = self.rule.use
        if use in (None, self.name):
            return self.reward(batch)
        with relabel_errors(self.name, use):
            values = self.reward(batch)
        for value in (*values, *batch.lost):
            if isinstance(value, Failed):
                value.args = (with_label(str(value), self.name, use),)
        return values


def by_size(batch: Batch, columns: Callable[[Batch], list[list[float | Failed]]]) -> list[list[float | Failed]]:
    """`columns` of images of several sizes: those of one size are scored together, in the order of the batch.
    Raises UserError for a group whose samples differ in size."""
    import torch

    alike: dict[tuple[int, ...], list[int]] = {}
    for row, output in enumerate(batch.samples):
        alike.setdefault(tuple(output.shape), []).append(row)
    if any(output.shape != batch.samples[row - row % batch.group].shape for row, output in enumerate(batch.samples)):
        raise UserError(f"the samples of a group of {batch.group} differ in size ({', '.join(map(str, alike))}): "
                        "expected one size in each group")
    scored: dict[int, tuple[float | Failed, ...]] = {}
    for rows in alike.values():
        scored |= zip(rows, zip(*columns(batch.rows(rows, torch.stack))))
    return [list(column) for column in zip(*(scored.get(row, ()) for row in range(len(batch))))]


# --- cached scores ---------------------------------------------------------------------------------------------------

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
