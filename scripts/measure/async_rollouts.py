"""Evaluations per second and final accuracy of four processes: in lockstep, and with `train.rollout_ranks`.

    python scripts/measure/async_rollouts.py [--seeds 3] [--epochs 24] [--held-out 180] [--only lockstep async]

A LoRA of the starter's denoiser learns `scene` and `scene_graded`. The latter sleeps, per image as long as a process
takes to sample one in lockstep, which a first run measures: so a reward takes as long as the rollout. Two of 12 steps
are trained, the share of MixGRPO's 4 of 25. Three of the four processes sample in the arm `async`. Both arms have the
same samples an epoch, and one thread a process. Speed: evaluations over seconds of all epochs but the first two.
Accuracy: the share of held-out samples that `scene` scores 1.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import mean, median

HERE, SLEEP = Path(__file__).resolve(), "SECONDS_PER_IMAGE"
PROCESSES = 4
ARMS = {"lockstep": [], "async": ["--train.staleness=2", "--train.rollout_ranks=3"]}
LAUNCH = ["-m", "flowgrpo.distributed.launchers", "torchrun", "--standalone", f"--nproc_per_node={PROCESSES}",
          "-m", "flowgrpo", "train", "starter", "--trust"]


def slow(images, prompts, metadata):
    """`scene_graded` after a sleep, as of a judge that takes images one by one."""
    from flowgrpo.rewards.starter.scene import scene_graded

    time.sleep(float(os.environ[SLEEP]) * len(images))
    return scene_graded(images, prompts, metadata)


def train(name: str, folder: Path, seed: int, epochs: int, held_out: int, sleep: float, *options: str) -> list[dict]:
    """The lines of metrics of a run, which ends well."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", SLEEP: str(sleep), "PYTHONPATH": str(HERE.parents[2])}
    told = [f"--output={folder}", f"--name={name}", f"--seed={seed}", f"--train.epochs={epochs}", "--train.group=6",
            "--train.prompts=12", "--train.micro_batch=36", "--train.lr=2e-3", "--tracker=none", "--eval.rewards=[]",
            "--method=mix_grpo+grpo_guard", "--train.steps=12", "--parts.plan.size=2",
            f'--reward={{"scene": 1.0, "{HERE}:slow": 1.0}}', f"--eval.prompts={held_out}", "--train.save_every=1000"]
    subprocess.run([sys.executable, *LAUNCH, *told, *options], check=True, env=environment, cwd=folder,
                   stdout=(folder / f"{name}.log").open("w"), stderr=subprocess.STDOUT)
    return [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]


def speed(lines: list[dict]) -> float:
    """Evaluations per second behind the first two epochs."""
    return (lines[-1]["evaluations"] - lines[1]["evaluations"]) / (lines[-1]["seconds"] - lines[1]["seconds"])


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--seeds", type=int, default=3)
    arguments.add_argument("--epochs", type=int, default=24)
    arguments.add_argument("--held-out", type=int, default=180)
    arguments.add_argument("--only", nargs="*", choices=ARMS, default=list(ARMS))
    given = arguments.parse_args()
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        lines = train("first", folder, 0, 4, 0, 0.0)
        sleep = median(line["seconds/rollout"] for line in lines[1:]) / (12 * 6 / PROCESSES)
        print(f"a process samples an image in {sleep:.3f} s, for which its reward sleeps; "
              f"{len(os.sched_getaffinity(0))} cores", flush=True)
        speeds: dict[str, list[float]] = {arm: [] for arm in given.only}
        for seed in range(given.seeds):
            for arm in given.only:
                lines = train(f"{arm}-{seed}", folder, seed, given.epochs, given.held_out, sleep, *ARMS[arm])
                speeds[arm].append(speed(lines))
                summary = json.loads((folder / f"{arm}-{seed}" / "summary.json").read_text())
                scored = {when: summary.get(when, {}).get("scene", float("nan")) for when in ("before", "after")}
                ages = mean(line.get("staleness/epochs", 0) for line in lines)
                print(f"seed {seed}, {arm}: {speeds[arm][-1]:.1f} evaluations a second, age {ages:.2f}, accuracy "
                      f"{scored['before']:.3f} to {scored['after']:.3f}", flush=True)
        if len(given.only) == len(ARMS):
            ratios = [fast / plain for fast, plain in zip(speeds["async"], speeds["lockstep"])]
            print(f"async over lockstep: {median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})")


if __name__ == "__main__":
    main()
