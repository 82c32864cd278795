"""Process of a bench that trains runs, one after the other: `python -m flowgrpo.tools.bench.worker`.

A line of JSON on standard input is a task: {"kind": "trial", "run" or "sweep", "config": FILE, "result": FILE, "log":
FILE}. Its answer is a line on standard output, {} or {"error": TEXT}. The result is written when all of the task is
done. What a run prints goes to the log. At the end of the input, which the end of the bench brings too, a run saves its
last whole epoch and the process ends.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from flowgrpo.distributed.signals import leave
from flowgrpo.errors import UserError
from flowgrpo.storage import atomic

Task = dict[str, str]
PATIENCE = 60  # seconds


class Tasks:
    """Tasks from a stream. When it ends during a task, this process gets SIGTERM, as from a job scheduler; a task that
    has not begun by then is left."""

    def __init__(self, stream: IO[str]):
        self.waiting: queue.Queue[Task | None] = queue.Queue()
        self.busy, self.ended = threading.Event(), threading.Event()
        self.reader = threading.Thread(target=self._read, args=(stream,), daemon=True)
        self.reader.start()

    def next(self) -> Task | None:
        """Next task, which goes on from here; None when the stream has ended."""
        task = self.waiting.get()
        self.busy.set()
        return None if self.ended.is_set() else task

    def _read(self, stream: IO[str]) -> None:
        for line in stream:
            self.waiting.put(json.loads(line))
        self.ended.set()
        self.waiting.put(None)
        if self.busy.is_set():
            os.kill(os.getpid(), signal.SIGTERM)


def main() -> int:
    """Do the tasks of standard input; return the exit code."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    tasks = Tasks(sys.stdin)
    while (task := tasks.next()) is not None:
        with _redirect_output(Path(task["log"])):
            answer = perform(task)
        tasks.busy.clear()
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
    return 0


@contextlib.contextmanager
def _redirect_output(log: Path) -> Iterator[None]:
    """Context manager: append to a file what is printed, by libraries too."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("a") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
        try:
            yield
        finally:
            sys.stdout.flush()
            sys.stderr.flush()


def perform(task: Task) -> dict[str, str]:
    """Do a task; return its answer. An error of one run leaves the others their turn."""
    try:
        from flowgrpo.config import parse
        from flowgrpo.tools.bench import probe

        result: dict[str, Any] = probe.trial(parse.load(task["config"])) if task["kind"] == "trial" else _run(task)
    except UserError as error:
        return {"error": " ".join(str(error).split())}
    except Exception as error:
        traceback.print_exc()
        return {"error": f"{type(error).__name__}: {error}".splitlines()[0]}
    atomic.write_text(Path(task["result"]), json.dumps(result))
    return {}


def _run(task: Task) -> dict[str, Any]:
    """Train, or go on with an interrupted run, then measure. A run that is trained already is only measured."""
    from flowgrpo.config import parse
    from flowgrpo.run import run
    from flowgrpo.storage import checkpoint, places
    from flowgrpo.tools.bench import probe

    config, begun = parse.load(task["config"]), time.monotonic()
    while places.is_held(config.folder) and time.monotonic() - begun < PATIENCE:
        time.sleep(0.2)  # a worker of a killed bench saves this run
    if not (config.folder / "summary.json").is_file():
        run(config, resume=checkpoint.latest(config.folder / "checkpoints") is not None)
    return probe.final_measures(config.folder) if task["kind"] == "run" else {}


if __name__ == "__main__":
    from flowgrpo.log import silence

    silence()
    try:
        sys.exit(main())
    except KeyboardInterrupt:  # a run that saved its last whole epoch
        leave(130)
