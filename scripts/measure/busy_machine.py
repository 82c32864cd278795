"""Seconds of a run alone and beside programs that keep processor cores busy.

    python scripts/measure/busy_machine.py                   # epochs of the starter: automatic, all threads, one thread
    python scripts/measure/busy_machine.py --demo            # the whole demo, automatic threads alone
    python scripts/measure/busy_machine.py --beside flowgrpo  # two runs side by side, in place of busy loops

Every setting runs alone and then beside others, so that the ratios hold on a machine that is busy already.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median

CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
SETTINGS = {"automatic": None, f"OMP_NUM_THREADS={CORES}": CORES, "OMP_NUM_THREADS=1": 1}
EPOCHS = ["train", "starter", "--tracker=none", "--train.lr=1e-3", "--eval.prompts=4"]


def started(command: list[str], folder: Path, threads: int | None) -> subprocess.Popen[bytes]:
    """Start a command of flowgrpo in a folder, its output in the file `log`. threads: None leaves them to it."""
    environment = {key: value for key, value in os.environ.items() if key not in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
    environment["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")])
    with (folder / "log").open("wb") as log:
        return subprocess.Popen([sys.executable, "-m", "flowgrpo", *command], cwd=folder, stdout=log, stderr=log,
                                env=environment | ({"OMP_NUM_THREADS": str(threads)} if threads else {}))


@contextmanager
def beside(kind: str, count: int, command: list[str]) -> Iterator[None]:
    """Context manager: so many busy loops, or further runs, are there."""
    with tempfile.TemporaryDirectory() as name:
        if kind == "loops":
            others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
        else:
            others = [started(command, folder(Path(name), str(i)), None) for i in range(count)]
        try:
            yield
        finally:
            for other in others:
                other.kill()
                other.wait()


def folder(within: Path, name: str) -> Path:
    (within / name).mkdir()
    return within / name


def run(command: list[str], threads: int | None) -> tuple[float, list[float], list[str]]:
    """Run a command; return its seconds, those of each epoch, and its lines on threads."""
    with tempfile.TemporaryDirectory() as name:
        begun = time.monotonic()
        if started(command, Path(name), threads).wait():
            sys.exit((Path(name) / "log").read_text()[-2000:])
        seconds, [metrics] = time.monotonic() - begun, Path(name).rglob("metrics.jsonl")
        ends = [json.loads(line)["seconds"] for line in metrics.read_text().splitlines()]
        said = (Path(name) / "log").read_text().replace("\r", "\n").splitlines()
    return seconds, [b - a for a, b in zip([0.0, *ends], ends)], [line for line in said if "threads: " in line]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--demo", action="store_true", help="the whole demo, in seconds from start to end")
    parser.add_argument("--beside", choices=("loops", "flowgrpo"), default="loops")
    parser.add_argument("--count", type=int, default=2, help="of the others")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--group", type=int, default=8)
    options = parser.parse_args()
    small = [*EPOCHS, f"--train.epochs={options.epochs}", f"--train.prompts={options.prompts}",
             f"--train.group={options.group}", f"--train.micro_batch={options.prompts * options.group}"]
    command = ["demo"] if options.demo else small
    print(f"{CORES} cores, load {os.getloadavg()[0]:.1f}; {' '.join(command)}")
    print("setting | alone, s | beside, s | ratio\n--- | --- | --- | ---")
    for name, threads in SETTINGS.items() if not options.demo else [("automatic", None)]:
        alone = run(command, threads)
        with beside(options.beside, options.count, [*EPOCHS, "--train.epochs=10000"]):
            busy = run(command, threads)
        pair = [each[0] if options.demo else median(each[1][1:] or each[1]) for each in (alone, busy)]
        print(f"{name} | {pair[0]:.2f} | {pair[1]:.2f} | {pair[1] / pair[0]:.2f}", flush=True)
        for line in busy[2]:
            print(f"  {line}", flush=True)


if __name__ == "__main__":
    main()
