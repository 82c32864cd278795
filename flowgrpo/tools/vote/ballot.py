"""Ballot: the pairs to vote on, the verdicts so far, and the file of pairs that keeps them.

The file is that of flowgrpo/data/pairs.py. Rows of other pairs in it are kept.
"""

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any

from flowgrpo.contrib.taste.votes import SKIP, TIE, relative
from flowgrpo.data.pairs import OVERALL, load_pairs
from flowgrpo.evaluation.statistics import ALL, format_share
from flowgrpo.loopback import Refused
from flowgrpo.storage import atomic


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


class Ballot:
    """Pairs in random order with random sides, and the verdicts on them, written at each vote.

    A pair's name is its number; its image at place 0 is the left one.
    names: of the sides A and B. seed: of order and sides.
    Raises UserError if `output` holds something else than pairs.
    """

    command = "flowgrpo compare vote"

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
        """JSON of the page: the next pair and the progress; at the end the table."""
        with self._lock:
            seen = set(self.history)
            waiting = [number for number in self.order if number not in seen]
            skipped, (a, b) = len(self.history) - len(self.verdicts), self.names
            shown: dict[str, Any] = {"title": "No pair is left", "question": None, "facts": (
                f"Share of the votes for {b} over {a}, without ties, with Wilson's interval. Ctrl-C ends the command."
                + " Skipped pairs are asked again at the next start." * bool(skipped))}
            if waiting:
                name, comparison = str(waiting[0]), self.comparisons[waiting[0]]
                shown = {"title": comparison.prompt, "facts": "", "question": {
                    "name": name, "count": 2, "sources": len(comparison.sources),
                    "video": [clip_of(file).is_file() for file in self.files(name)]}}
            return shown | {"done": len(self.verdicts), "total": len(self.comparisons), "undo": bool(self.history),
                            "progress": f"{len(self.verdicts)} of {len(self.comparisons)}"
                            + f", {skipped} skipped" * bool(skipped),
                            "next": {"name": str(waiting[1]), "count": 2} if len(waiting) > 1 else None,
                            "summary": None if waiting else self.table()}

    def files(self, name: str) -> tuple[Path, ...]:
        """Files of a pair, the left one first; none if there is no such pair."""
        if not name.isdecimal() or int(name) >= len(self.comparisons):
            return ()
        pair = self.comparisons[int(name)]
        return (pair.b, pair.a) if self.b_left[int(name)] else (pair.a, pair.b)

    def sources(self, name: str) -> tuple[Path, ...]:
        """Files of the images that a pair's prompt brings."""
        return self.comparisons[int(name)].sources if self.files(name) else ()

    def vote(self, name: str, shown: Sequence[int], choice: int | str) -> None:
        """Keep a verdict in place of an earlier one on the same pair: a place, TIE, or SKIP, which leaves it without.

        Raises Refused if another program has written to the file, and OSError if it cannot be written; then nothing is
        kept.
        """
        number = int(name)
        with self._lock:
            rows = {other: row for other, row in self._rows.items() if other != number}
            verdicts = {other: worth for other, worth in self.verdicts.items() if other != number}
            if choice != SKIP:
                worth = verdicts[number] = 0.5 if choice == TIE else float((choice == 0) == self.b_left[number])
                pair, folder = self.comparisons[number], self.output.parent
                chosen, rejected = (pair.b, pair.a) if worth == 1 else (pair.a, pair.b)
                rows[number] = {"prompt": pair.prompt, "chosen": relative(chosen, folder),
                                "rejected": relative(rejected, folder)} | (
                                    {"aspects": {OVERALL: TIE}} if worth == 0.5 else {})
            self._write(rows)
            self.verdicts = verdicts
            self.history = [other for other in self.history if other != number] + [number]

    def finish(self) -> None:
        raise Refused(404, "no such page: Ctrl-C ends the command")

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

    def _write(self, rows: dict[int, dict[str, Any]]) -> None:
        if rows == self._rows:
            return
        if self._file_stamp() != self._stamp:
            raise Refused(409, f"another program has changed {self.output}: start `{self.command}` again")
        atomic.write_text(self.output, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows.values()))
        self._rows, self._stamp = rows, self._file_stamp()

    def _file_stamp(self) -> tuple[int, int] | None:
        if not self.output.is_file():
            return None
        facts = self.output.stat()
        return facts.st_mtime_ns, facts.st_size

    def summary(self) -> dict[str, dict[str, Any]]:
        """`count_votes` of all prompts, and by category if there are several."""
        places: dict[str, list[float]] = {ALL: []}
        for number, worth in sorted(self.verdicts.items()):
            places[ALL].append(worth)
            if self.comparisons[number].category is not None:
                places.setdefault(str(self.comparisons[number].category), []).append(worth)
        rows = {name: count_votes(worths) for name, worths in places.items()}
        return {ALL: rows[ALL]} if len(rows) == 2 else rows  # one category is all prompts

    def table(self) -> list[list[str]]:
        a, b = self.names
        return [["prompts", "votes", f"for {b}", "ties", f"share for {b} over {a}, 95 %"],
                *([name, str(row["votes"]), str(row["b"]), str(row["ties"]), row["share"]]
                  for name, row in self.summary().items())]


def clip_of(file: Path) -> Path:
    """Video beside a clip's animated WebP; the current folder, which is no file, of anything else."""
    return file.with_suffix(".mp4") if file.suffix == ".webp" else Path()


def count_votes(worths: Sequence[float]) -> dict[str, Any]:
    """Votes, ties, votes for B, and the share that prefers B with Wilson's 95 % interval; ties are left out."""
    decided = [worth for worth in worths if worth != 0.5]
    return {"votes": len(worths), "ties": len(worths) - len(decided), "b": int(sum(decided)),
            "share": format_share(decided) if decided else "-"}
