"""Trace the files and classes that one epoch of the starter enters, and its moves between files.

    python scripts/trace_epoch.py             # the second of two epochs, two prompts with four pictures each
    python scripts/trace_epoch.py --first     # a run's first epoch, with its encodings and the check of its first ratio

A move is a call of a function of the package in another file than the call before it. Only the thread of the training
loop is followed.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

from common import RECIPE, make_trainer

import flowgrpo
from flowgrpo.config import load

PACKAGE = str(Path(flowgrpo.__file__).parent)
SMALL = {"train.prompts": "2", "train.group": "4", "train.micro_batch": "8", "tracker": "none", "precision": "fp32",
         "device": "cpu"}


class Trace:
    """Files, classes and moves between files of the calls that it sees, as a profiler of `sys.setprofile`."""

    def __init__(self) -> None:
        self.files: Counter[str] = Counter()
        self.classes: set[type] = set()
        self.moves: Counter[tuple[str, str]] = Counter()
        self.last = ""

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        file = frame.f_code.co_filename
        if event != "call" or not file.startswith(PACKAGE):
            return
        file = file[len(PACKAGE) + 1:]
        self.files[file] += 1
        own = frame.f_locals.get("self")
        if own is not None and type(own).__module__.startswith("flowgrpo"):
            self.classes.add(type(own))
        if file != self.last:
            self.moves[self.last, file] += 1
            self.last = file


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--first", action="store_true", help="the first epoch of a run")
    args = parser.parse_args()
    trainer, trace = make_trainer(load(RECIPE, SMALL)), Trace()
    if not args.first:
        trainer.run_epoch()
        trainer.epoch += 1
    sys.setprofile(trace)
    trainer.run_epoch()
    sys.setprofile(None)
    print(f"{len(trace.files)} files, {len(trace.classes)} classes, {trace.moves.total()} moves")
    for (before, after), count in trace.moves.most_common(20):
        print(f"{count:>4}  {before} -> {after}")


if __name__ == "__main__":
    main()
