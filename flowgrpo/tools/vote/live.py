"""Live ballot of `flowgrpo taste`: questions are added, a batch at a time, and votes are taken while it serves.

One thread asks, and learns from whole batches; those of the page show and vote. What is learned is not taken back.
"""

import math
import random
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from flowgrpo.contrib.taste.votes import SKIP, TIE, Question, Vote, VoteLog
from flowgrpo.evaluation.statistics import format_share
from flowgrpo.loopback import Refused
from flowgrpo.nouns import quantity

RECENT = 100  # checks that are counted: 96 tell .60 from .50, and earlier ones are of weights that have changed since
LOOKS = {"edge_width": "width of edges", "diversity": "variety"}
TICK = 0.2  # seconds between two looks of the loop at its own stop


class LiveBallot:
    """Questions in the order in which they were asked, and the votes on them, those of earlier sessions too.

    log: file of the votes. seed: of the images' places on the page, which are random, so that a place tells nothing of
    an image.
    clock: seconds that the session may take; it begins with the first question. None: no limit.
    facts: what the loop tells the page. ended: the user has finished, or the time is over.
    """

    command = "flowgrpo taste"

    def __init__(self, log: VoteLog, seconds: float | None = None, seed: int = 0,
                 clock: Callable[[], float] = time.monotonic):
        self.log, self.seconds, self.seed, self.clock = log, seconds, seed, clock
        self.output = log.file
        self.questions: dict[str, Question] = {}
        self.facts: dict[str, Any] = {}
        self._begun: float | None = None
        self._learned = -1  # the last batch that was
        self._finished = False
        self._changed = threading.Condition()

    # --- the loop ----------------------------------------------------------------------------------------------------

    def ask(self, questions: Sequence[Question]) -> None:
        """Add questions behind those that wait; votes on them that the log has already count."""
        with self._changed:
            if self._begun is None:
                print("the first images are on the page", flush=True)
            self.questions |= {question.name: question for question in questions}
            self._begun = self.clock() if self._begun is None else self._begun

    def wait(self, batch: int, check: Callable[[], None]) -> dict[int, Vote] | None:
        """Close a batch once all of it has a vote: the votes by their places; None if the session ends.

        check: called several times a second, may raise.
        """
        while True:
            check()
            with self._changed:
                if not self._open(batch):
                    self._learned = max(self._learned, batch)
                    return self.log.in_batch(batch)
                if self.is_finished:
                    return None
                self._changed.wait(TICK)

    def _open(self, batch: int | None = None) -> list[str]:
        return [name for name, question in self.questions.items() if name not in self.log.votes
                and batch in (None, question.batch)]

    def tell(self, **facts: Any) -> None:
        with self._changed:
            self.facts = self.facts | facts

    @property
    def seconds_left(self) -> float | None:
        """The seconds that are left; None without a limit."""
        if self.seconds is None or self._begun is None:
            return self.seconds
        return max(0.0, self.seconds - (self.clock() - self._begun))

    @property
    def is_finished(self) -> bool:
        return self._finished or self.seconds_left == 0

    def finish(self) -> None:
        with self._changed:
            self._finished = True
            self._changed.notify_all()

    # --- the page ----------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """JSON of the page: the next two questions and the progress in their batch."""
        with self._changed:
            ended, waiting = self.is_finished, [] if self.is_finished else self._open()
            asked = [self.questions[name] for name in waiting[:2]]
            of = [question for question in self.questions.values() if asked and question.batch == asked[0].batch]
            clicks, left = sum(".q" in name for name in self.log.votes), self.seconds_left
            first, then = [{"name": each.name, "count": len(each.files)} for each in asked] + [None] * (2 - len(asked))
            return {"title": "The session has ended: the terminal says where the LoRA is" if ended else
                    asked[0].prompt if asked else "The next images are being generated",
                    "question": first, "next": then, "clicks": clicks, "live": not ended,
                    "progress": quantity(clicks, "click")
                    + (f", {math.ceil(left / 60)} min left" if left is not None else ""),
                    "total": len(of), "done": sum(each.name in self.log.votes for each in of),
                    "undo": self._last() is not None and not ended, "facts": self._facts()}

    def _facts(self) -> str:
        against, facts, said = self.against(), self.facts, []
        if against:
            said.append(f"against the base: {against['wins']:g} of {against['of']} blind pairs, {against['share']}")
        elif "evidence" in facts and not facts.get("updates"):
            said.append(f"evidence of a taste: {facts['evidence']:.2g} of {facts['needed']:g}, from where it trains")
        if foretold := facts.get("foretold"):
            said.append(f"{foretold['right']} of the last {foretold['of']} clicks were predicted")
        said += [f"{what} {facts['looks'][name]:.2f} of the base's" for name, what in LOOKS.items()
                 if facts.get("looks", {}).get(name)]
        if facts.get("updates"):
            said.append(quantity(facts["updates"], "update"))
        return " \u00b7 ".join(said)

    def files(self, name: str) -> tuple[Path, ...]:
        """Images of a question in the order of the page, which is random; none if it was not asked."""
        question = self.questions.get(name)
        return tuple(question.files[place] for place in self._order(question)) if question is not None else ()

    def sources(self, name: str) -> tuple[Path, ...]:
        return ()

    def _order(self, question: Question) -> list[int]:
        order = [*range(len(question.files))]
        random.Random(f"{self.seed}/{question.name}").shuffle(order)
        return order

    def vote(self, name: str, shown: Sequence[int], choice: int | str) -> None:
        """Keep a vote. shown: places of the page; choice: one of them, TIE or SKIP.

        Raises Refused for a question that is closed, and OSError if it cannot be written; then nothing is kept.
        """
        with self._changed:
            question = self.questions.get(name)
            if question is None or question.batch <= self._learned or self.is_finished:
                raise Refused(409, "this question is closed: its batch is learned, or the session has ended")
            order = self._order(question)
            at = choice if isinstance(choice, str) else order[choice]
            self.log.add(question, Vote(tuple(order[place] for place in shown), at))
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
        """Wins of the model in its last RECENT blind pairs with the base, with Wilson's 95 % interval.

        A tie is one half; the noises of a pair differ. None before the first vote.
        """
        worths = [1.0 if vote.choice == 1 else 0.5 if vote.choice == TIE else 0.0
                  for name, vote in self.log.votes.items() if ".c" in name and vote.choice != SKIP][-RECENT:]
        if not worths:
            return None
        return {"wins": sum(worths), "of": len(worths), "share": format_share(worths)}
