"""Trace the files and classes that one epoch of a starter enters, and its moves between files.

    python scripts/measure/trace_epoch.py                  # the second of two epochs, two prompts, four samples each
    python scripts/measure/trace_epoch.py --first          # a run's first epoch: encodings, check of its first ratio
    python scripts/measure/trace_epoch.py --method flow_grpo  # another method, with its own parts
    python scripts/measure/trace_epoch.py --recipe starter_text  # another recipe of configs/, or a recipe's file

A move is a call of a function of the package in another file than the call before it. Only the thread of the training
loop is followed, and the model computes in fp32, so that the numbers are the same on every machine. The learning rate
is a number: `auto` measures the first updates of a run, and nothing later.
"""

import argparse
import sys
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

from common import RECIPE, make_trainer

import flowgrpo
from flowgrpo.config import Config, load
from flowgrpo.distributed.signals import Stop

PACKAGE = str(Path(flowgrpo.__file__).parent)
WAITING = Stop.check.__code__  # called while a reward is waited for, as often as that takes
SMALL = {"train.prompts": 2, "train.group": 4, "train.micro_batch": 8, "train.updates": 1, "tracker": "none",
         "train.lr": 1e-3, "precision": "fp32", "device": "cpu"}


class Trace:
    """Files, classes and moves between files of the calls that it sees, as a profiler of `sys.setprofile`."""

    def __init__(self) -> None:
        self.files: Counter[str] = Counter()
        self.classes: set[type] = set()
        self.moves: Counter[tuple[str, str]] = Counter()
        self.last = ""

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        file = frame.f_code.co_filename
        if event != "call" or not file.startswith(PACKAGE) or frame.f_code is WAITING:
            return
        file = file[len(PACKAGE) + 1:]
        self.files[file] += 1
        own = frame.f_locals.get("self")
        if own is not None and type(own).__module__.startswith("flowgrpo"):
            self.classes.add(type(own))
        if file != self.last:
            self.moves[self.last, file] += 1
            self.last = file

    @property
    def counts(self) -> tuple[int, int, int]:
        """Numbers of files, classes and moves."""
        return len(self.files), len(self.classes), self.moves.total()


def configuration(recipe: str | Path = RECIPE, method: str | None = None) -> Config:
    """Configuration of a small run on the CPU. recipe: a file, or its name in configs/. method: in place of the
    recipe's method and parts."""
    file = RECIPE.with_name(f"{recipe}.yaml") if Path(recipe).suffix == "" else recipe
    return load(file, SMALL | ({"method": method, "parts": {}} if method else {}))


def traced(config: Config, first: bool = False) -> Trace:
    """Trace of the second epoch of a run, or of its first one."""
    trainer, trace = make_trainer(config), Trace()
    if not first:
        trainer.run_epoch()
        trainer.epoch += 1
    sys.setprofile(trace)
    try:
        trainer.run_epoch()
    finally:
        sys.setprofile(None)
    return trace


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--first", action="store_true", help="the first epoch of a run")
    parser.add_argument("--recipe", default=RECIPE, help="a file, or its name in configs/")
    parser.add_argument("--method", help="in place of the recipe's method and parts")
    args = parser.parse_args()
    trace = traced(configuration(args.recipe, args.method), args.first)
    print("{} files, {} classes, {} moves".format(*trace.counts))
    for (before, after), count in trace.moves.most_common(20):
        print(f"{count:>4}  {before} -> {after}")


if __name__ == "__main__":
    main()
