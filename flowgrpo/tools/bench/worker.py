"""Process of a bench that trains a run: `python -m flowgrpo.tools.bench.worker KIND CONFIG RESULT`.

KIND is trial, run or sweep. The file RESULT is written when all of it is done; an error is a line on standard output.
What a run prints goes to standard error. At the end of standard input, which the end of the bench brings too, this
process gets SIGTERM, as from a job scheduler: a run saves its last whole epoch.
"""

import json
import os
import signal
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any

from flowgrpo.distributed.signals import leave
from flowgrpo.errors import UserError
from flowgrpo.storage import atomic

PATIENCE = 60  # seconds


def perform(kind: str, config: str, result: str) -> str:
    """Do a task; return its error in one line, empty without one."""
    try:
        from flowgrpo.config import parse
        from flowgrpo.tools.bench import probe

        made: dict[str, Any] = probe.trial(parse.load(config)) if kind == "trial" else _run(kind, config)
    except UserError as error:
        return " ".join(str(error).split())
    except Exception as error:
        traceback.print_exc()
        return f"{type(error).__name__}: {error}".splitlines()[0]
    atomic.write_text(Path(result), json.dumps(made))
    return ""


def _run(kind: str, recipe: str) -> dict[str, Any]:
    """Train, or go on with an interrupted run, then measure. A run that is trained already is only measured."""
    from flowgrpo.config import parse
    from flowgrpo.run import run
    from flowgrpo.storage import checkpoint, places
    from flowgrpo.tools.bench import probe

    config, begun = parse.load(recipe), time.monotonic()
    while places.is_held(config.folder) and time.monotonic() - begun < PATIENCE:
        time.sleep(0.2)  # a process of a killed bench saves this run
    if not (config.folder / "summary.json").is_file():
        run(config, resume=checkpoint.latest(config.folder / "checkpoints") is not None)
    return probe.final_measures(config.folder) if kind == "run" else {}


def _end_with_the_bench() -> None:
    sys.stdin.read()
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    from flowgrpo.log import silence

    silence()
    threading.Thread(target=_end_with_the_bench, daemon=True).start()
    answer = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what libraries print too
    try:
        answer.write(perform(*sys.argv[1:]))
        answer.close()
    except KeyboardInterrupt:  # a run that saved its last whole epoch
        leave(130)
