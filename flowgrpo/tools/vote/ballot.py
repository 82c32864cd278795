"""Ballot: the pairs to vote on, the verdicts so far, and the file of pairs that keeps them.

The file is that of flowgrpo/data/pairs.py. Rows of other pairs in it are kept.
"""

from __future__ import annotations

import json
import math
import os
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np

from flowgrpo.data.pairs import OVERALL, load_pairs
from flowgrpo.evaluation.statistics import ALL, WILSON, Interval, format_interval, interval
from flowgrpo.storage import atomic

CHOICES = ("left", "right", "tie", "skip")


@dataclass(frozen=True)
class Comparison:
    """Two images or clips of a prompt, A and B.

    category: of the prompt, if it has one. sources: files of images that the prompt brings.
    """

    prompt: str
    a: Path
    b: Path
    category: str | None = None
    sources: tuple[Path, ...] = ()

    @property
    def key(self) -> tuple[str, frozenset[Path]]:
        """Identity of a pair in the file, whichever is chosen."""
        return self.prompt.strip(), frozenset((self.a.resolve(), self.b.resolve()))


class Changed(Exception):
    """Error: another program has written to the file of pairs."""


class Ballot:
    """Pairs in random order with random sides, and the verdicts on them, written at each vote.

    names: of the sides A and B. seed: of order and sides.
    Raises UserError if `output` holds something else than pairs.
    """

    def __init__(self, comparisons: Sequence[Comparison], names: tuple[str, str], output: Path, seed: int = 0):
        self.comparisons, self.output, self.names = comparisons, output, names
        rng = random.Random(seed)
        self.b_left = [rng.random() < 0.5 for _ in comparisons]
        self.order = rng.sample(range(len(comparisons)), len(comparisons))
        self.verdicts: dict[int, float] = {}  # by pair: 1 for B, 0 for A, 1/2 for a tie
        self.history: list[int] = []  # votes and skips, the last one last
        self._lock, self._rows = Lock(), dict[int, dict[str, Any]]()  # by pair; rows of other pairs under -1, -2, ...
        self._read()
        self._stamp = self._file_stamp()

    def _read(self) -> None:
        if not self.output.is_file() or not self.output.read_bytes().strip():
            return
        numbers = {comparison.key: number for number, comparison in enumerate(self.comparisons)}
        known = load_pairs(self.output)
        lines = [line for line in self.output.read_text(encoding="utf-8-sig").split("\n") if line.strip()]
        for pair, line in zip(known, lines, strict=True):
            chosen, rejected = Path(pair.chosen).resolve(), Path(pair.rejected).resolve()
            key = (pair.prompt, frozenset((chosen, rejected)))
            number = numbers.get(key, -1)
            if number < 0 or number in self._rows:
                self._rows[-len(self._rows) - 1] = json.loads(line)
                continue
            chosen_b = chosen == self.comparisons[number].b.resolve()
            worth = pair.verdicts[OVERALL]
            self._rows[number], self.verdicts[number] = json.loads(line), worth if chosen_b else 1 - worth
            self.history.append(number)

    def state(self) -> dict[str, Any]:
        """Return what the page shows: progress, the present pair and the number of the next one; at the end the
        summary."""
        with self._lock:
            seen = set(self.history)
            waiting = [number for number in self.order if number not in seen]
            shown = self._question_json(waiting[0]) if waiting else None
            return {"done": len(self.verdicts), "total": len(self.comparisons), "undo": bool(self.history),
                    "skipped": len(self.history) - len(self.verdicts), "pair": shown,
                    "next": waiting[1] if len(waiting) > 1 else None, "summary": None if waiting else self.summary()}

    def _question_json(self, number: int) -> dict[str, Any]:
        return {"id": number, "prompt": self.comparisons[number].prompt,
                "sources": len(self.comparisons[number].sources),
                "video": {side: self.file(number, side, ".mp4") is not None for side in ("left", "right")}}

    def file(self, number: int, side: str, ending: str = "") -> Path | None:
        """Return the file on a side of a pair; ending: of the same clip in another form, None if there is none."""
        comparison = self.comparisons[number]
        path = comparison.b if (side == "left") == self.b_left[number] else comparison.a
        if ending:
            path = path.with_suffix(ending) if path.suffix == ".webp" else Path()
        return path if path.is_file() else None

    def source(self, number: int, place: int) -> Path | None:
        """Return the file of an image that a pair's prompt brings; None if there is none."""
        files = self.comparisons[number].sources
        return files[place] if place < len(files) and files[place].is_file() else None

    def vote(self, number: int, choice: str) -> None:
        """Keep a verdict of CHOICES, in place of an earlier one on the same pair; a skipped pair has none.

        Raises Changed, and OSError if the file cannot be written; then nothing is kept.
        """
        with self._lock:
            rows = {other: row for other, row in self._rows.items() if other != number}
            verdicts = {other: worth for other, worth in self.verdicts.items() if other != number}
            if choice != "skip":
                left = 1.0 if self.b_left[number] else 0.0
                verdicts[number] = 0.5 if choice == "tie" else left if choice == "left" else 1 - left
                rows[number] = self._row(self.comparisons[number], verdicts[number])
            self._write(rows)
            self.verdicts = verdicts
            self.history = [other for other in self.history if other != number] + [number]

    def undo(self) -> None:
        """Take back the last vote or skip, of earlier sessions too; raises as `vote` does."""
        with self._lock:
            if not self.history:
                return
            number = self.history[-1]
            self._write({other: row for other, row in self._rows.items() if other != number})
            self.verdicts.pop(number, None)
            self.history.pop()
            self.order = [number] + [other for other in self.order if other != number]

    def _row(self, comparison: Comparison, worth: float) -> dict[str, Any]:
        """Return a line of the file. worth: 1 for B, 0 for A, 1/2 for a tie."""
        chosen, rejected = (comparison.b, comparison.a) if worth == 1 else (comparison.a, comparison.b)
        row = {"prompt": comparison.prompt, "chosen": self._relative(chosen), "rejected": self._relative(rejected)}
        return row | ({"aspects": {OVERALL: "tie"}} if worth == 0.5 else {})

    def _relative(self, path: Path) -> str:
        return Path(os.path.relpath(path.resolve(), self.output.parent.resolve())).as_posix()

    def _write(self, rows: dict[int, dict[str, Any]]) -> None:
        """Write all rows, in place of the file."""
        if rows == self._rows:
            return
        if self._file_stamp() != self._stamp:
            raise Changed(f"another program has changed {self.output}: start `flowgrpo compare vote` again")
        atomic.write_text(self.output, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows.values()))
        self._rows, self._stamp = rows, self._file_stamp()

    def _file_stamp(self) -> tuple[int, int] | None:
        """Return time and size of the file; None without one."""
        if not self.output.is_file():
            return None
        facts = self.output.stat()
        return facts.st_mtime_ns, facts.st_size

    def summary(self) -> dict[str, Any]:
        """Return numbers of votes, and the share of those for A or B that prefer B, of all prompts and by category."""
        places: dict[str, list[float]] = {ALL: []}
        for number, worth in sorted(self.verdicts.items()):
            places[ALL].append(worth)
            if self.comparisons[number].category is not None:
                places.setdefault(str(self.comparisons[number].category), []).append(worth)
        rows = {name: count_votes(worths) for name, worths in places.items()}
        if len(rows) == 2:  # one category is all prompts
            rows = {ALL: rows[ALL]}
        return {"a": self.names[0], "b": self.names[1], "rows": rows,
                "skipped": len(self.history) - len(self.verdicts)}


def count_votes(worths: Sequence[float]) -> dict[str, Any]:
    """Return votes, ties, votes for B, and the share that prefers B with Wilson's 95 % interval; ties are left out."""
    decided = [worth for worth in worths if worth != 0.5]
    share = interval(np.array(decided, dtype=np.float64)[:, None], WILSON) if decided else \
        Interval(math.nan, math.nan, math.nan, WILSON, 0)
    text = format_interval(share.mean, share.low, share.high, 2) if decided else "-"
    return {"votes": len(worths), "ties": len(worths) - len(decided), "b": int(sum(decided)), "share": text}
