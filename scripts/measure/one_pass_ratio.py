"""Seconds of an epoch that replays over those of one with `train.one_pass`.

    python scripts/measure/one_pass_ratio.py                  # the starter, on the CPU: three cases, some minutes
    python scripts/measure/one_pass_ratio.py --cases window_2_of_6 --repetitions 1 --option train.prompts=1

Both kinds of epochs run in turns in one process, with the same prompts and seeds; every repetition gives one ratio of
rollout and update, without decoding and rewards, and the table has all of them. Only ratios are worth comparing: the
seconds are those of the machine and its load.
"""

import time
from collections.abc import Sequence
from statistics import median

import torch
from common import FIXED, RECIPE, make_trainer, measuring, options

from flowgrpo.config import load
from flowgrpo.train import Trainer

PHASES = ("seconds/rollout", "seconds/update")
# Of 6 or 10 steps, those that are trained: the longer the window, the more forwards are saved.
CASES = {"window_2_of_6": {"method": "mix_grpo", "parts": "{plan: {size: 2}}", "train.steps": "6"},
         "window_4_of_10": {"method": "mix_grpo", "parts": "{plan: {size: 4}}", "train.steps": "10"},
         "all_of_10": {"method": "flow_grpo", "parts": "{kl: {weight: 0.0}}", "train.steps": "10"}}
SMALL = FIXED | {"train.prompts": "2", "train.group": "8", "train.micro_batch": "16", "train.updates": "1"}


def epoch_seconds(trainer: Trainer) -> float:
    """Return the seconds of rollout and update of the trainer's next epoch."""
    trainer.clock.pop()
    trainer.run_epoch()
    trainer.epoch += 1
    if trainer.policy.device.type == "cuda":
        torch.cuda.synchronize()
    taken = trainer.clock.pop()
    return sum(taken.get(phase, 0.0) for phase in PHASES)


def ratios(replaying: Trainer, held: Trainer, repetitions: int) -> list[float]:
    """Return the ratio of each repetition, both trainers in turns, the first of them alternately."""
    found = []
    for repetition in range(repetitions):
        order = (replaying, held) if repetition % 2 == 0 else (held, replaying)
        seconds = {id(trainer): epoch_seconds(trainer) for trainer in order}
        found.append(seconds[id(replaying)] / seconds[id(held)])
    return found


def line(case: str, found: Sequence[float]) -> str:
    """Return a row of the table: the case, its median ratio, and all ratios."""
    return f"| {case} | {median(found):.2f} | {', '.join(f'{ratio:.2f}' for ratio in found)} |"


def main() -> None:
    parser = measuring(__doc__)
    parser.set_defaults(repetitions=3)
    parser.add_argument("--cases", nargs="+", choices=[*CASES], default=[*CASES])
    args = parser.parse_args()
    print(f"{torch.get_num_threads()} threads, {args.device}, {time.strftime('%Y-%m-%d')}")
    print("| case | replay over one pass, median | repetitions |\n|---|---:|---|")
    for case in args.cases:
        given = SMALL | CASES[case] | {"device": args.device} | options(args.option)
        replaying, held = (make_trainer(load(RECIPE, given | {"train.one_pass": str(one_pass).lower()}))
                           for one_pass in (False, True))
        for trainer in (replaying, held):
            epoch_seconds(trainer)  # the first one also checks the ratio, and warms everything up
        print(line(case, ratios(replaying, held, args.repetitions)), flush=True)


if __name__ == "__main__":
    main()
