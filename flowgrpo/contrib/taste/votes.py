"""Questions to the user, the votes, and the file that keeps them: a line per click, on disk before the next one."""

import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flowgrpo.data.pairs import OVERALL
from flowgrpo.errors import UserError
from flowgrpo.storage import atomic

TIE, SKIP = "tie", "skip"


@dataclass(frozen=True)
class Question:
    """Images of one prompt, of which the user chooses the best. batch, place: its number. check: the images are the
    base's and the present model's, and no training reads the vote."""

    batch: int
    place: int
    prompt: str
    files: tuple[Path, ...]
    check: bool = False

    @property
    def name(self) -> str:
        """Identity in the file of votes and in addresses, such as 3.q7; of a check 3.c0."""
        return f"{self.batch}.{'c' if self.check else 'q'}{self.place}"


@dataclass(frozen=True)
class Vote:
    """Vote on a question. shown: places of the shown images. choice: the place of the best of them, TIE or SKIP."""

    shown: tuple[int, ...]
    choice: int | str

    @property
    def target(self) -> list[float] | None:
        """The shares of the shown images, which sum to 1; None for a skipped question."""
        if self.choice == SKIP:
            return None
        return [1 / len(self.shown) if self.choice == TIE else float(place == self.choice) for place in self.shown]


class VoteLog:
    """File of votes, a line each, appended and synced: `votes` and their `questions`, by the question's name, in order.

    A line that a kill cut off is dropped. Raises UserError for a file of something else.
    """

    def __init__(self, file: Path):
        self.file, self.votes, self.questions = file, dict[str, Vote](), dict[str, Question]()
        content = file.read_bytes() if file.is_file() else b""
        whole = content[:content.rfind(b"\n") + 1]
        if whole != content:
            os.truncate(file, len(whole))
        for number, line in enumerate(whole.decode("utf-8", "replace").splitlines(), 1):
            try:
                self._read(json.loads(line))
            except (ValueError, LookupError, TypeError, AttributeError):
                raise UserError(f"{file}:{number} is no vote: expected the file that `flowgrpo taste` wrote") from None

    def _read(self, row: dict[str, Any]) -> None:
        if "undo" in row:
            del self.votes[row["undo"]]
            return
        batch, kind, place = re.fullmatch(r"(\d+)\.([cq])(\d+)", row["question"]).groups()  # type: ignore[union-attr]
        files = tuple(self.file.parent / name for name in row["files"])
        question = Question(int(batch), int(place), str(row["prompt"]), files, kind == "c")
        self.votes.pop(question.name, None)
        self.questions[question.name] = question
        self.votes[question.name] = Vote(tuple(map(int, row["shown"])), row["choice"])

    def add(self, question: Question, vote: Vote) -> None:
        """Keep a vote, in place of an earlier one. Raises OSError if it cannot be written; then nothing is kept."""
        self._append({"question": question.name, "prompt": question.prompt, "shown": vote.shown, "choice": vote.choice,
                      "files": [relative(file, self.file.parent) for file in question.files]})

    def undo(self, name: str) -> None:
        """Take a vote back; raises as `add`."""
        self._append({"undo": name})

    def _append(self, row: dict[str, Any]) -> None:
        atomic.append_line(self.file, json.dumps(row, ensure_ascii=False))
        self._read(row)

    def in_batch(self, batch: int) -> dict[int, Vote]:
        """The votes on a batch that is learned from, by their places."""
        return {question.place: self.votes[name] for name, question in self.questions.items()
                if name in self.votes and question.batch == batch and not question.check}

    def write_pairs(self, file: Path) -> int:
        """Write the votes as a file of pairs, and return their number: the best of four makes three pairs, ties of four
        and skipped questions none."""
        rows = [row for name, vote in self.votes.items() for row in _rows(self.questions[name], vote, file.parent)]
        atomic.write_text(file, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
        return len(rows)


def relative(file: Path, folder: Path) -> str:
    """The path of a file as a line in a folder's file of pairs has it."""
    return Path(os.path.relpath(file.resolve(), folder.resolve())).as_posix()


def _rows(question: Question, vote: Vote, folder: Path) -> Sequence[dict[str, Any]]:
    def row(chosen: int, rejected: int, **further: Any) -> dict[str, Any]:
        return {"prompt": question.prompt, "chosen": relative(question.files[chosen], folder),
                "rejected": relative(question.files[rejected], folder), **further}

    if isinstance(vote.choice, int):
        return [row(vote.choice, place) for place in vote.shown if place != vote.choice]
    tied = vote.choice == TIE and len(vote.shown) == 2
    return [row(*vote.shown, aspects={OVERALL: TIE})] if tied else []
