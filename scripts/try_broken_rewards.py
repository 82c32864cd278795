"""Train the starter with rewards that are broken, each in a process of its own, and print how soon the run says so.

    python scripts/try_broken_rewards.py [--only NAME ...]

Every row ends with exit code 2 and one line on stderr; the seconds from start count Python's imports, those from the
model being loaded are what the mistake costs. The last rows are settings of the run beside its rewards.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

REWARDS = '''
import time

import torch

from flowgrpo.rewards import differentiable


def raises(images, prompts):
    raise RuntimeError("my bug")


def wrong_count(images, prompts):
    return [0.5]


def strings(images, prompts):
    return ["good"] * len(prompts)


def nan(images, prompts):
    return images.mean((1, 2, 3)) * float("nan")


def inf(images, prompts):
    return [float("inf")] * len(prompts)


def nones(images, prompts):
    return [None] * len(prompts)


def meta(images, prompts):
    return torch.empty(len(prompts), device="meta")


def wrong_shape(images, prompts):
    return images.mean((2, 3))


def generator(images, prompts):
    return (image.mean() for image in images)


def hangs(images, prompts):
    time.sleep(3600)


def huge_ints(images, prompts):
    return [10**400] * len(prompts)


async def coroutine(images, prompts):
    return [0.5] * len(prompts)


@differentiable
def detached(images, prompts):
    return torch.ones(len(prompts), requires_grad=True)
'''

NAMES = ("raises", "wrong_count", "strings", "nan", "inf", "nones", "meta", "wrong_shape", "generator", "huge_ints",
         "coroutine")

# What other packages say while they are imported, of a run without a mistake too.
IMPORTS = re.compile(r"W\d{4} .*_pytree|Failed to load CPU gemm_4bit|Unable to import `torchao`")

# A command that says on stdout when the model was loaded, counted from when the process began.
CHILD = '''
import sys, time
began = float(sys.argv.pop(1))
from flowgrpo.policies import build
load = build.load

def told(config):
    found = load(config)
    print("LOADED", time.time() - began, flush=True)
    return found

build.load = told
from flowgrpo.cli import main
sys.exit(main(sys.argv[1:]))
'''


def cases(file: Path) -> dict[str, list[str]]:
    """By name, the options of the command."""
    found = {name: [f"--reward={file}:{name}"] for name in NAMES}
    found["hangs (timeout: 3)"] = [f'--reward={{"{file}:hangs": {{timeout: 3}}}}']
    found["watched: wrong_count"] = [f'--eval.rewards=["{file}:wrong_count"]']
    found["detached (draft)"] = [f"--reward={file}:detached", "--method=draft", "--parts={}"]
    found["no reward server"] = ["--reward=http://127.0.0.1:9/mine"]
    found["no judge (on_error: skip)"] = ['--reward={judge: {args: {url: "http://127.0.0.1:9/v1", model: m}, '
                                          "on_error: skip}}"]
    return found


def tried(options: list[str], folder: Path) -> tuple[int, float, float | None, list[str]]:
    """Exit code, seconds from start to end and from the model being loaded, and the lines on stderr that are no bar."""
    command = [sys.executable, "-c", CHILD, str(time.time()), "train", "configs/starter.yaml", *options,
               f"--output={folder}", "--device=cpu"]
    began = time.time()
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True,
                          env=os.environ | {"PYTHONPATH": str(ROOT)})
    whole = time.time() - began
    loaded = [float(line.split()[1]) for line in done.stdout.splitlines() if line.startswith("LOADED")]
    lines = [line for line in done.stderr.split("\n") if line.strip() and "\r" not in line and not IMPORTS.match(line)]
    return done.returncode, whole, whole - loaded[0] if loaded else None, lines


def main() -> int:
    """Run all cases. Returns how many did not end with exit code 2 and one line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="*", help="names of cases")
    only, wrong = parser.parse_args().only, 0
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "broken.py")
        file.write_text(REWARDS)
        print("| reward | exit code | lines | s from start | s from the model | line |\n|---|---:|---:|---:|---:|---|")
        for name, options in cases(file).items():
            if only and name not in only:
                continue
            code, whole, after, lines = tried(options, Path(folder, "runs"))
            wrong += code != 2 or len(lines) != 1
            line = (lines or ["-"])[-1].replace(f"{folder}/", "").removeprefix("flowgrpo: error: ").replace("|", "\\|")
            told = "before it" if after is None else f"{after:.1f}"
            print(f"| {name} | {code} | {len(lines)} | {whole:.1f} | {told} | {line} |", flush=True)
    print(json.dumps({"wrong": wrong}))
    return wrong


if __name__ == "__main__":
    sys.exit(main() > 0)
