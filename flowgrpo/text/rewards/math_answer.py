"""Reward of a mathematical answer that equals the one in the prompt's metadata, by the package math-verify.

It runs in a separate process, which is killed if an answer takes too long: no signals or abandoned threads.
"""

from __future__ import annotations

import contextlib
import json
import queue
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from flowgrpo.errors import UserError
from flowgrpo.packages import needed
from flowgrpo.rewards.about import About
from flowgrpo.rewards.failures import Failed
from flowgrpo.text.rewards.answer_keys import abstains, keys, marked, several, spoken

WORKER = Path(__file__).with_name("math_worker.py")
START = 300.0  # seconds for the process to be ready: it imports sympy
LONGEST = 20_000  # characters at the end of a completion that are searched for its answer


class Worker:
    """Process that answers each JSON line with one; killed and restarted if an answer takes too long."""

    def __init__(self, *command: str) -> None:
        self._command, self._lock = command, threading.Lock()
        self._process: subprocess.Popen[str] | None = None
        self._answers: queue.Queue[str] = queue.Queue()

    def ask(self, question: Sequence[str | None], seconds: float) -> str | None:
        """Return the answer to a question; None if none comes within the time, or the process dies of it.
        Raises Failed if the process does not start."""
        with self._lock:
            if self._process is None:
                self._start()
            try:
                self._process.stdin.write(json.dumps(question) + "\n")
                self._process.stdin.flush()
            except OSError:
                self._end()
                return None
            answer = self._answer(seconds)
            if not answer:
                self._end()
            return answer or None

    def _start(self) -> None:
        self._answers = queue.Queue()
        self._process = subprocess.Popen(self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                                         encoding="utf-8", stderr=subprocess.DEVNULL)
        threading.Thread(target=_read, args=(self._process.stdout, self._answers), daemon=True).start()
        if (answer := self._answer(START)) != "ready":
            self._end()
            raise Failed(f"the process {' '.join(self._command[1:])[:200]} does not start ({answer})")

    def _answer(self, seconds: float) -> str | None:
        try:
            line = self._answers.get(timeout=seconds)
        except queue.Empty:
            return None
        return json.loads(line) if line else None

    def _end(self) -> None:
        self._process.kill()
        self._process.wait()
        with contextlib.suppress(OSError):  # input that was never read
            self._process.stdin.close()
        self._process = None


def _read(lines: IO[str], answers: queue.Queue[str]) -> None:
    """Put each line into the queue, and "" at the end."""
    with lines:
        for line in lines:
            answers.put(line)
    answers.put("")


@dataclass(frozen=True, eq=False)
class MathAnswer:
    """1 if a completion's mathematical answer equals the one in the metadata, by math-verify, otherwise 0.

    The answer is the one that the completion marks (see `answer_keys.marked`: tags, \\boxed{}, ####), or else the one
    that math-verify finds after the thoughts. LaTeX, sets, intervals, equations and matrices can be compared.

    key: of the metadata, LaTeX with or without $, a number, or a list of accepted ones; None for a prompt without it.
    timeout: seconds for one answer, which scores 0 after that. memory: of the process, in MiB.
    abstain: as in `exact_match`.
    Raises UserError for a key that math-verify cannot read.
    """

    key: str = "answer"
    timeout: float = 5.0
    memory: int = 2048
    abstain: bool = False
    worker: Worker = field(init=False, repr=False)
    _readable: set[str] = field(init=False, repr=False)
    about = About(modality="text", range=(0, 1), needs="text", licence="Apache-2.0, MIT packages")
    keyed = True  # nothing is scored without the key

    def __post_init__(self) -> None:
        if not (self.timeout > 0 and self.memory > 0):
            raise UserError(f"reward 'math_answer': timeout is {self.timeout} and memory {self.memory}, expected both "
                            "above 0")
        needed("math_verify", "text", "reward 'math_answer'")
        object.__setattr__(self, "worker", Worker(sys.executable, str(WORKER), str(self.memory),
                                                  str(self.timeout)))
        object.__setattr__(self, "_readable", set())

    def __call__(self, completions: Sequence[str], prompts: Sequence[str],
                 metadata: Sequence[dict[str, Any]]) -> list[float | None]:
        references = keys("math_answer", metadata, self.key, prompts, self._accepted)
        return [None if accepted is None or (self.abstain and abstains(completion)) else self._one(completion, accepted)
                for completion, accepted in zip(completions, references)]

    def _accepted(self, value: object) -> list[str]:
        """Return an answer key as LaTeX.
        Raises ValueError if math-verify cannot read it."""
        accepted = [latex(text) for text in several(value)]
        for text in accepted:
            if text not in self._readable and self.worker.ask([text, None], self.timeout) != "yes":
                raise ValueError("expected mathematics that math-verify reads, such as 1/2, \\frac{1}{2} or (0, 1]")
            self._readable.add(text)
        return accepted

    def _one(self, completion: str, accepted: Sequence[str]) -> float:
        text = spoken(completion)[-LONGEST:]
        statement = marked(text)
        answer = text if statement is None else latex(statement)
        return float(any(self.worker.ask([key, answer], self.timeout) == "yes" for key in accepted))


def latex(text: str) -> str:
    """Return mathematics in a form that math-verify always finds: in a \\boxed{}, unless it is between dollars."""
    return text if "$" in text.replace("\\$", "") or "\\boxed" in text else f"\\boxed{{{text}}}"
