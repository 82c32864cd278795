"""Write the starter's prompts: flowgrpo/starter/train.jsonl and held_out.jsonl.

    python scripts/build/build_prompts.py

The two never overlap (`starter_scenes.is_reserved` parts them) and are the same on every run. Tasks share the training
prompts evenly, as far as a task has that many different ones; weights draw every task equally often. Every task has 40
held-out lines, so that a mean over lines is a mean over tasks; a task with fewer prompts repeats them (each line gets
its own noise). A file is in the order of the tasks, so that prompts picked evenly over it are spread evenly over them.
"""

import json
from itertools import cycle, islice
from pathlib import Path

import numpy as np
from starter_scenes import is_reserved, sample_prompt

from flowgrpo.starter import scenes

FOLDER = Path(scenes.__file__).parent
TRAIN, HELD_PER_TASK = 600, 40
DRAWS = 2000  # per task: enough to meet each of the 107 prompts of `two`, the largest task that is exhausted


def unique(task: str, held: bool) -> list[str]:
    """Different prompts of a task in the order they are drawn."""
    rng = np.random.default_rng([scenes.TASKS.index(task), held])
    return list(dict.fromkeys(sample_prompt(rng, task, held, is_reserved)[0] for _ in range(DRAWS)))


def shares(available: dict[str, int], total: int) -> dict[str, int]:
    """Return the number to take of each: the same number of all, less where there are fewer, `total` together."""
    taken: dict[str, int] = {}
    for rank, task in enumerate(sorted(available, key=available.get)):
        taken[task] = min(available[task], (total - sum(taken.values())) // (len(available) - rank))
    return taken


def build() -> dict[str, list[dict]]:
    """File name -> its records."""
    train, held = ({task: unique(task, split) for task in scenes.TASKS} for split in (False, True))
    take = shares({task: len(prompts) for task, prompts in train.items()}, TRAIN)
    return {
        "train.jsonl": [_record(text, task) | {"weight": round(TRAIN / len(scenes.TASKS) / take[task], 3)}
                        for task in scenes.TASKS for text in sorted(train[task][:take[task]])],
        "held_out.jsonl": [_record(text, task) for task in scenes.TASKS
                           for text in sorted(islice(cycle(held[task]), HELD_PER_TASK))],
    }


def _record(text: str, task: str) -> dict:
    return {"prompt": text, "metadata": {"task": task}}


def main() -> None:
    for name, records in build().items():
        (FOLDER / name).write_text("".join(json.dumps(record) + "\n" for record in records))
        counts = {task: sum(record["metadata"]["task"] == task for record in records) for task in scenes.TASKS}
        print(f"{name}: {len(records)} prompts, {counts}")


if __name__ == "__main__":
    main()
