"""Gain of a LoRA of the starter that its consistency sibling keeps: `python scripts/measure/worn.py --out FILE.jsonl`.

Trains the demo's recipe with a LoRA of the denoiser, in 16 epochs at the bench's rate, and measures 144 held-out
prompts before and after, on the starter at 20 steps and on the sibling at 4. --ways: `none`, or of `train.sibling`.
Writes a line per seed and way, with the commit. --table prints the lines of a file.
"""

import argparse
import json
import math
import time
from pathlib import Path
from typing import Any, cast

from common import RECIPE, make_trainer

from flowgrpo import rewards
from flowgrpo.config import load
from flowgrpo.contrib.sibling import OnSibling
from flowgrpo.evaluation import kept
from flowgrpo.evaluation.measured import Measured, measure, spread
from flowgrpo.evaluation.report import snapshots
from flowgrpo.train import Trainer

SETTINGS = {"method": "mix_grpo+grpo_guard", "adapter.targets": ["to_q", "to_k", "add_k_proj", "linear_1", "linear_2"],
            "train.lr": 2e-3, "train.epochs": 16, "eval.prompts": 144, "eval.rewards": [],
            "eval.on": {"model": "starter_consistency"}}
BATCH = 48  # images per call


def measured(trainer: Trainer, on: OnSibling | None) -> Measured:
    """Scores of the policy's present weights on the starter, or on its sibling."""
    config = trainer.config
    sampled: Any = config.eval if on is None else on.sibling
    return measure(cast(Any, trainer.policy), spread(trainer.held_out, config.eval.prompts),
                   rewards.compose(config.trained), steps=sampled.steps, guidance=sampled.guidance, samples=1,
                   micro_batch=BATCH, model=config.model)


def one(seed: int, way: str, known: Path | None) -> dict[str, Any]:
    """Train and measure. known: a run whose `before.json` has the base's scores, else they are measured."""
    began = time.perf_counter()
    config = load(RECIPE, SETTINGS | {"seed": seed} | ({} if way == "none" else {"train.sibling": way}))
    trainer = make_trainer(config)
    on = next(each for each in trainer.extensions.present if isinstance(each, OnSibling))
    assert on.worn is not None
    with trainer.policy.reference():
        before = read(known) if known else measured(trainer, None).scores
        with on.worn.on():
            base = measured(trainer, on)
    while trainer.epoch < config.train.epochs:
        trainer.run_epoch()
        trainer.epoch += 1
    after = measured(trainer, None)
    with on.worn.on():
        worn = measured(trainer, on)
    found = kept.record(config, on.sibling, (before, after.scores), base, {1.0: worn}, seed)
    return {"seed": seed, "way": way, "seconds": round(time.perf_counter() - began), "own": found["own"]["gain"],
            "before": {name: sum(values) / len(values) for name, values in before.items()}, "after": after.mean(),
            **snapshots.commit(), **found["weights"][0]}


def read(run: Path) -> dict[str, list[float]]:
    scores = json.loads((run / "before.json").read_text())["scores"]
    return {name: [math.nan if value is None else value for value in values] for name, values in scores.items()}


def table(lines: list[dict[str, Any]]) -> str:
    """Markdown table of the lines of a file."""
    rows = ["| train.sibling | seed | gain at 20 steps | gain on the sibling | kept | edge width | diversity |",
            "|---|---:|---:|---:|---:|---:|---:|"]
    for line in sorted(lines, key=lambda each: (("none", "orthogonal", "replay").index(each["way"]), each["seed"])):
        looks = (line["of_base"][name]["mean"] for name in ("edge_width", "diversity"))
        share = line["kept"]
        rows.append(f"| {line['way']} | {line['seed']} | {line['own']['mean']:.3f} | {line['gain']['mean']:.3f} | "
                    f"{share['mean']:.2f} [{share['low']:.2f}, {share['high']:.2f}] | "
                    + " | ".join(f"{value:.2f}" for value in looks) + " |")
    return "\n".join(rows)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--ways", nargs="+", default=["none", "orthogonal", "replay"])
    parser.add_argument("--base", type=Path, default=None, metavar="RUN", help="a run of these settings, whose "
                        "measurement of the base is read")
    parser.add_argument("--table", action="store_true")
    arguments = parser.parse_args()
    if not arguments.table:
        for seed in arguments.seeds:
            for way in arguments.ways:
                with arguments.out.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(one(seed, way, arguments.base)) + "\n")
    print(table([json.loads(line) for line in arguments.out.read_text().splitlines()]))
