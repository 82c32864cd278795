"""Cut the power of short runs, kill others, resume them all, and compare each with the uninterrupted run.

    python scripts/fuzz/try_power_cuts.py [--cuts 100] [--kills 100] [--seconds S] [--threads] [--json FILE]
    python scripts/fuzz/try_power_cuts.py --features staleness,phases_of_prompts,group_replay

A cut is simulated (power_cuts.py): the run's files are those that had been forced to the disk at a random call, and
every second time a random part of the others too. A kill is SIGKILL to a process at a random moment. The model is tiny
and random, on the CPU. A resumed run is equal if its weights, its whole last checkpoint, its curves and its scores are.
With --features the cuts and kills are shared out over runs with these features of the loop, by their names in
tests/helpers/features.py; "plain" has none.
"""

import argparse
import contextlib
import io
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT))

import torch  # noqa: E402
from power_cuts import Recorder, build  # noqa: E402
from safetensors.torch import load_file  # noqa: E402
from tqdm import tqdm  # noqa: E402

from flowgrpo.cli import main as command  # noqa: E402
from flowgrpo.storage import checkpoint  # noqa: E402
from flowgrpo.storage.places import epoch_of  # noqa: E402
from flowgrpo.training import state  # noqa: E402
from tests.helpers import features, tiny  # noqa: E402

EPOCHS = 4
REWARD = "def red(images, prompts):\n    return images[:, 0].mean((1, 2))\n"
APART = ("second", "evaluations", "memory")  # of metrics: times, and counts since the process began


def prepare(folder: Path, feature: str) -> list[str]:
    """Write the model, the reward, the prompts and the recipe; return the arguments of a run, but its output."""
    own = features.options("image", *([] if feature == "plain" else [feature]))
    prompts = [{"prompt": prompt.text, "metadata": prompt.metadata} for prompt in features.prompts("image")]
    (folder / "reward.py").write_text(REWARD)
    (folder / "prompts.jsonl").write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts))
    settings = tiny.config(folder, **own | dict(
        model=str(tiny.save(tiny.flux(), folder / "model")), reward=f"{folder}/reward.py:red",
        prompts=str(folder / "prompts.jsonl"), train__epochs=EPOCHS, train__save_every=1, train__keep=2,
        train__ema=0.9, train__lr=0.02, eval__every=2, eval__weights="ema"))
    (folder / "recipe.yaml").write_text(settings.yaml())
    return ["train", str(folder / "recipe.yaml"), "--trust"]


def run(arguments: list[str], output: Path, resume: bool = False) -> tuple[int, str]:
    """Run the command line in this process; return the exit code and what it printed."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        code = command([*arguments, f"--output={output}", *(["--resume"] if resume else [])])
    return code, said.getvalue()


def finish(arguments: list[str], output: Path) -> str:
    """Resume the run in `output`, or begin it anew if it has no checkpoint; return an error, or nothing."""
    last = checkpoint.latest(output / "run" / "checkpoints")
    code, said = run(arguments, output, resume=last is not None)
    return "" if code == 0 else f"exit code {code}: {said.strip().splitlines()[-1]}"


def difference(run: Path, whole: Path) -> str:
    """Return the first difference between a resumed run and the uninterrupted one; nothing if they are equal."""
    for file in ("pytorch_lora_weights.safetensors", f"checkpoints/epoch-{EPOCHS:05d}/state.safetensors"):
        ours, expected = load_file(run / file), load_file(whole / file)
        if ours.keys() != expected.keys() or not all(torch.equal(ours[key], expected[key]) for key in expected):
            return f"{file} differs"
    curves = [[{key: value for key, value in json.loads(line).items() if not any(word in key for word in APART)}
               for line in (folder / "metrics.jsonl").read_text().splitlines()] for folder in (run, whole)]
    if curves[0] != curves[1]:
        return "metrics.jsonl differs"
    summaries = [json.loads((folder / "summary.json").read_text()) for folder in (run, whole)]
    if any(summaries[0][key] != summaries[1][key] for key in ("before", "after", "epochs", "updates")):
        return "summary.json differs"
    return ""


def recorded(arguments: list[str], output: Path) -> tuple[Recorder, int]:
    """Run without interruption; return its recorder and the inode of `output`, which is there before."""
    output.mkdir()
    recorder = Recorder(output)
    with recorder.recording():
        code, said = run(arguments, output)
    if code:
        raise RuntimeError(said)
    return recorder, output.stat().st_ino


def cut(recorder: Recorder, root: int, index: int, arguments: list[str], folder: Path, whole: Path,
        chance: random.Random | None) -> str:
    """Cut the power after a recorded call, resume, and compare; return what is wrong, or nothing."""
    moment = recorder.moments[index]
    build(moment, root, folder, chance)
    announced = max((int(name.removeprefix("epoch-")) for names in moment.certain_names.values() for name in names
                     if name.startswith("epoch-") and name[6:].isdigit()), default=None)
    last = checkpoint.latest(folder / "run" / "checkpoints")
    if announced is not None and (last is None or epoch_of(last) < announced):
        return f"a checkpoint of epoch {announced} was lost"
    return finish(arguments, folder) or difference(folder / "run", whole)


def kill(arguments: list[str], folder: Path, whole: Path, delay: float) -> str:
    """Kill a run after so many seconds, resume it, and compare; return what is wrong, or nothing."""
    child = os.fork()
    if not child:
        tqdm.set_lock(threading.RLock())  # tqdm's is shared with this process, and a killed one keeps it
        with contextlib.suppress(BaseException):
            run(arguments, folder)
        os._exit(0)
    time.sleep(delay)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return finish(arguments, folder) or difference(folder / "run", whole)


def tried(base: Path, feature: str, kinds: list[str], chance: random.Random, until: float) -> list[dict[str, Any]]:
    """Cut or kill runs with a feature, as `kinds` says; return the results. until: of time.monotonic()."""
    arguments, results = prepare(base, feature), []
    recorder, root = recorded(arguments, base / "whole")
    start = time.monotonic()
    run(arguments, base / "second")
    length, calls = time.monotonic() - start, len(recorder.moments)
    shutil.rmtree(base / "second")
    for number, kind in enumerate(tqdm(kinds, desc=feature, unit="run")):
        if time.monotonic() > until:
            break
        folder, whole = base / f"{number}", base / "whole" / "run"
        if kind == "cut":
            at, part = chance.randrange(calls), chance if number % 2 else None
            wrong = cut(recorder, root, at, arguments, folder, whole, part)
        else:
            at = round(chance.uniform(0, length), 3)
            wrong = kill(arguments, folder, whole, at)
        results.append({"feature": feature, "kind": kind, "at": at, "wrong": wrong})
        if not wrong:
            shutil.rmtree(folder)
    return results


def main() -> int:
    """Try all cuts and kills, or as many as there is time for; return 1 if one was not resumed equal."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cuts", type=int, default=100)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--features", default="plain", help="names, parted by commas")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no further one after so many")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write all results to this file")
    parser.add_argument("--threads", action="store_true", help="checkpoints are written by a thread, as large ones are")
    args = parser.parse_args()
    if args.threads:
        state.LARGE = 0
    torch.set_num_threads(1)
    began, chance, results = time.monotonic(), random.Random(args.seed), []
    kinds, names = ["cut"] * args.cuts + ["kill"] * args.kills, args.features.split(",")
    chance.shuffle(kinds)
    for place, feature in enumerate(names):
        with tempfile.TemporaryDirectory() as name:
            results += tried(Path(name), feature, kinds[place::len(names)], chance, began + args.seconds)
    counts = {kind: [sum(each["kind"] == kind and not each["wrong"] for each in results),
                     sum(each["kind"] == kind for each in results)] for kind in ("cut", "kill")}
    print(f"resumed equal: {counts['cut'][0]} of {counts['cut'][1]} power cuts, "
          f"{counts['kill'][0]} of {counts['kill'][1]} kills; {time.monotonic() - began:.0f} s")
    wrong = [each for each in results if each["wrong"]]
    for each in wrong:
        print(f"{each['feature']}, {each['kind']} at {each['at']}: {each['wrong']}")
    if args.json:
        args.json.write_text(json.dumps({"counts": counts, "results": results}, indent=1) + "\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
