"""Live ballot of `flowgrpo taste`: questions are added, a batch at a time, and votes are taken while it serves.

One thread asks, and learns from whole batches; those of the page show and vote. What is learned is not taken back.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from flowgrpo.contrib.taste.votes import SKIP, TIE, Question, Vote, VoteLog
from flowgrpo.evaluation.statistics import WILSON, format_interval, interval

RECENT = 20  # checks that the page counts: earlier ones are of weights that have changed since
TICK = 0.2  # seconds between two looks of the loop at its own stop


class Late(Exception):
    """Error: a vote on a question that is not asked, or whose batch is learned."""


class LiveBallot:
    """Questions in the order in which they were asked, and the votes on them, those of earlier sessions too.

    log: file of the votes. seed: of the sides of checks.
    clock: seconds that the session may take; it begins with the first question. None: no limit.
    facts: what the loop tells the page. ended: the user has finished, or the time is over.
    """

    def __init__(self, log: VoteLog, seconds: float | None = None, seed: int = 0,
                 clock: Callable[[], float] = time.monotonic):
        self.log, self.seconds, self.seed, self.clock = log, seconds, seed, clock
        self.questions: dict[str, Question] = {}
        self.facts: dict[str, Any] = {}
        self._begun: float | None = None
        self._learned = -1  # the last batch that was
        self._finished = False
        self._changed = threading.Condition()

    @property
    def output(self) -> Path:
        """Return the file of the votes."""
        return self.log.file

    # --- the loop ----------------------------------------------------------------------------------------------------

    def ask(self, questions: Sequence[Question]) -> None:
        """Add questions behind those that wait; votes on them that the log has already count."""
        with self._changed:
            if self._begun is None:
                print("the first images are on the page", flush=True)
            self.questions |= {question.name: question for question in questions}
            self._begun = self.clock() if self._begun is None else self._begun

    def wait(self, batch: int, check: Callable[[], None]) -> dict[int, Vote] | None:
        """Return the votes on a batch by their places once all of it has one, and close it; None if the session ends.

        check: called several times a second, may raise.
        """
        while True:
            check()
            with self._changed:
                if not self._open(batch):
                    self._learned = max(self._learned, batch)
                    return self.log.of(batch)
                if self.is_finished:
                    return None
                self._changed.wait(TICK)

    def _open(self, batch: int | None = None) -> list[str]:
        """Return the questions without a vote, of one batch or of all."""
        return [name for name, question in self.questions.items() if name not in self.log.votes
                and batch in (None, question.batch)]

    def tell(self, **facts: Any) -> None:
        """Show facts on the page, in the place of earlier ones."""
        with self._changed:
            self.facts = self.facts | facts

    @property
    def seconds_left(self) -> float | None:
        """Return the seconds that are left; None without a limit."""
        if self.seconds is None or self._begun is None:
            return self.seconds
        return max(0.0, self.seconds - (self.clock() - self._begun))

    @property
    def is_finished(self) -> bool:
        return self._finished or self.seconds_left == 0

    def finish(self) -> None:
        """End the session."""
        with self._changed:
            self._finished = True
            self._changed.notify_all()

    # --- the page ----------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Return what the page shows: the present question, the number of the next one, progress, and facts."""
        with self._changed:
            waiting = [] if self.is_finished else self._open()
            shown = self.questions[waiting[0]] if waiting else None
            of = [question for question in self.questions.values() if shown and question.batch == shown.batch]
            return {"question": shown and {"name": shown.name, "prompt": shown.prompt, "count": len(shown.files)},
                    "next": next(({"name": name, "count": len(self.questions[name].files)} for name in waiting[1:2]),
                                 None),
                    "clicks": sum(".q" in name for name in self.log.votes),
                    "total": len(of), "done": sum(each.name in self.log.votes for each in of),
                    "undo": self._last() is not None and not self.is_finished, "left": self.seconds_left,
                    "ended": self.is_finished,
                    "against": self.against(), **self.facts}

    def file(self, name: str, place: int) -> Path | None:
        """Return the image at a place of the page; of a check the sides are random."""
        question = self.questions.get(name)
        if question is None or place >= len(question.files):
            return None
        path = question.files[self._place(question, place)]
        return path if path.is_file() else None

    def _place(self, question: Question, place: int) -> int:
        flip = question.check and random.Random(f"{self.seed}/{question.name}").random() < 0.5
        return len(question.files) - 1 - place if flip else place

    def vote(self, name: str, shown: Sequence[int], choice: int | str) -> None:
        """Keep a vote. shown: places of the page; choice: one of them, TIE or SKIP.

        Raises Late, and OSError if it cannot be written; then nothing is kept.
        """
        with self._changed:
            question = self.questions.get(name)
            if question is None or question.batch <= self._learned or self.is_finished:
                raise Late("this question is closed: its batch is learned, or the session has ended")
            places = tuple(self._place(question, place) for place in shown)
            at = choice if isinstance(choice, str) else self._place(question, choice)
            self.log.add(question, Vote(places, at))
            self._changed.notify_all()

    def undo(self) -> None:
        """Take back the last vote of a batch that is not learned; raises OSError as `vote`."""
        with self._changed:
            if (name := self._last()) is not None and not self.is_finished:
                self.log.undo(name)

    def _last(self) -> str | None:
        return next((name for name in reversed(self.log.votes) if name in self.questions
                     and self.questions[name].batch > self._learned), None)

    def against(self) -> dict[str, Any] | None:
        """Return how often the present model won its last checks against the base, a tie as one half, with Wilson's 95
        % interval; None before the first."""
        worths = [1.0 if vote.choice == 1 else 0.5 if vote.choice == TIE else 0.0
                  for name, vote in self.log.votes.items() if ".c" in name and vote.choice != SKIP][-RECENT:]
        if not worths:
            return None
        share = interval(np.array(worths)[:, None], WILSON)
        return {"wins": sum(worths), "of": len(worths), "share": format_interval(share.mean, share.low, share.high, 2)}
