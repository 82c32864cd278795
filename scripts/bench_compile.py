"""How much faster `train.compile` makes an epoch: the same epoch with and without it, in turns in one process.

    python scripts/bench_compile.py                                          # the starter, on the CPU
    python scripts/bench_compile.py --device cuda --option precision=bf16 --option train.micro_batch=64

An epoch is rollout and update, as in bench_overhead.py; what compiling takes is told apart, as the seconds of the first
compiled epoch. Only the ratio is worth comparing: the seconds are those of the machine and its load.
"""

from __future__ import annotations

import time
from functools import partial

from bench_overhead import epoch, in_turns
from common import RECIPE, make_trainer, measuring, options

from flowgrpo.config import load


def main() -> None:
    args = measuring(__doc__).parse_args()
    settled = {"train.prompts": "2", "device": args.device} | options(args.option)
    trainers = {name: make_trainer(load(RECIPE, settled | {"train.compile": compiled}))
                for name, compiled in (("plain", "false"), ("compiled", "true"))}
    first = {}
    for name, trainer in trainers.items():
        start = time.perf_counter()
        epoch(trainer)
        first[name] = time.perf_counter() - start
    found = in_turns({name: partial(epoch, trainer) for name, trainer in trainers.items()}, args.repetitions,
                     trainers["plain"].policy.device)
    for name, seconds in found.items():
        print(f"{name:<9} {seconds:7.3f} s  {seconds / found['plain']:5.2f}, first epoch {first[name]:.1f} s")


if __name__ == "__main__":
    main()
