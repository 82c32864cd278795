"""Gates: every recipe trains three epochs on a CPU, and its metrics are those that were kept.

    python scripts/measure/gates.py                    # all recipes, about an hour of one core
    python scripts/measure/gates.py sdxl_24gb sana     # of these
    python scripts/measure/gates.py --tenth 3          # of a tenth of those that are kept, 0 to 9
    python scripts/measure/gates.py sdxl_24gb --write  # keeps what comes out, when a change is meant

A gate is the recipe's own configuration on a model of its own classes and widths, with one or two blocks and random
weights (scripts/docs/train_recipes.py has what a CPU changes), or on a starter's weights. Numbers are equal to the last
bit where the processor and the libraries are those of `tests/golden/gates.json`, and within `TOLERANCES` elsewhere.
Exit code 1 if a gate failed; the command prints the metric, what was expected and what came.
"""

import argparse
import json
import os
import platform
import re
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), *(str(ROOT / "scripts" / folder) for folder in ("docs", "build"))]
import train_recipes  # noqa: E402 -- of a folder beside
from revisions import commit  # noqa: E402

FILE = ROOT / "tests" / "golden" / "gates.json"
EPOCHS, SECONDS = 3, 1200.0  # of a gate, behind which it is stopped
METRICS = ("evaluations", "loss", "grad_norm", "log_ratio_max", "clip_fraction", "kl", "lr", "update")
# Their evaluations are tokens of completions, which end elsewhere where a processor rounds otherwise.
COMPLETIONS = ("starter_text", "starter_unified")
REWARDS = re.compile(r"reward/\w+/mean")
# On other processors, where bf16 rounds in another order. Relative to the larger of a value and the floor beside it: a
# loss is a difference of nearly equal terms, a first ratio is 1 but for rounding.
TOLERANCES = {"loss": (0.5, 0.05), "grad_norm": (0.5, 1e-4), "log_ratio_max": (1.0, 1e-3), "clip_fraction": (1.0, 1.0),
              "kl": (0.5, 1e-3), "reward": (0.2, 0.02)}
STARTER: dict[str, Any] = {"device": "cpu", "tracker": "none", "train.epochs": EPOCHS,
                           "eval.every": EPOCHS, "eval.prompts": 8, "eval.grid": 1}
PAIRS = {"starter_dpo": "pairs.jsonl", "starter_rpo": "subjects.jsonl", "starter_text_dpo": "texts.jsonl"}


def names() -> list[str]:
    return sorted(file.stem for file in (ROOT / "configs").glob("*.yaml"))


def machine() -> str:
    """The processor and the libraries, by which rounding differs."""
    import diffusers
    import torch
    import transformers

    info = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").is_file() else ""
    # "AMD EPYC" and the like name several generations, which round otherwise.
    told = re.findall(r"^(?:cpu family|model|model name)\s*: (.*)$", info.partition("\n\n")[0], re.MULTILINE)
    limits = [f"{key}={os.environ[key]}" for key in ("ONEDNN_MAX_CPU_ISA", "MKL_ENABLE_INSTRUCTIONS")
              if key in os.environ]
    return ", ".join([" ".join(told) or platform.processor(), torch.backends.cpu.get_cpu_capability(),
                      *limits, *(f"{each.__name__} {each.__version__}" for each in (torch, diffusers, transformers))])


def changed(name: str, folder: Path) -> dict[str, Any]:
    """Keys of a recipe that a gate changes."""
    from flowgrpo.config import load
    from flowgrpo.device import bf16_speed

    # Without bf16 units a gate can pass SECONDS in bf16; fp32 is another rounding, as on any other processor.
    precision = {"precision": "bf16" if bf16_speed() >= 1 else "fp32"}
    if name in PAIRS:
        return STARTER | precision | {"preferences": str(folder / PAIRS[name])}
    if name == "starter_unified":  # in fp32 by its recipe: its small steps would be rounded away
        return STARTER
    if name == "starter_4steps":  # an epoch of each of its three parts
        return STARTER | precision | {"parts.distil.after": 1, "parts.distil.alone": 1,
                                      "phases": [{"at": 1, "set": {"train.steps": 4, "train.shift": 1.0}}]}
    if name.startswith("starter"):
        return STARTER | precision
    keys = train_recipes.forced(name, folder) | precision | {"train.epochs": EPOCHS, "eval.every": 0}
    if "distil" in load(ROOT / "configs" / f"{name}.yaml").parts:  # a match has many calls of a wide block
        keys |= {"parts.distil.batch": 2, "parts.distil.updates": 1, "parts.distil.fake_updates": 1}
    if train_recipes.model_of(name) is None:  # random weights answer nothing right: a reward that tells samples apart
        keys |= {"reward": {"distinct": {"args": {"n": 1, "unit": "characters"}}}, "eval.best": None}
    if name == "janus_pro_1b":  # its detectors are not here; its own answers are all wrong of random weights
        keys |= {"prompts": "geneval", "reward": {"self_answers": 1.0, "sharpness": 1.0}}
        del keys["text.max_tokens"]
    return keys


def train(name: str, folder: Path) -> list[dict[str, float]]:
    """The metrics of a gate's epochs. folder: empty; gets the model and the run."""
    from flowgrpo.cli import main
    from flowgrpo.cli.train import UNTRAINED

    recipe, keys = ROOT / "configs" / f"{name}.yaml", changed(name, folder)
    arguments = [f"--{key}={value if isinstance(value, str) else json.dumps(value)}" for key, value in keys.items()]
    if name == "starter_text_dpo":
        prompts = folder / "prompts.jsonl"
        some = (ROOT / "flowgrpo" / "starter" / "text_train.jsonl").read_text().splitlines()[:200]
        prompts.write_text("\n".join(some) + "\n")
        main(["reward", "label", "starter_text", f"--prompts={prompts}", "--rewards", "numeric_match", "--count=4",
              "--batch=256", f"--output={keys['preferences']}"])
    elif name in PAIRS:
        import make_starter_pairs

        make_starter_pairs.make(folder, prompts=8, rendered=64)
    elif name == "janus_pro_1b":
        import try_janus

        try_janus.build(folder / "model", layers=2, side=4)
    elif not name.startswith("starter"):
        train_recipes.build(name, folder, None)
    if not name.startswith("starter"):
        arguments.append(f"--model={folder / 'model'}")
    code = main(["train", str(recipe), *arguments, f"--output={folder / 'runs'}", "--name=gate"])
    if code not in (0, UNTRAINED):  # random weights may be left as they are
        raise SystemExit(f"{name}: exit code {code}")
    lines = (folder / "runs" / "gate" / "metrics.jsonl").read_text().splitlines()
    metrics = [key for key in METRICS if key != "evaluations" or name not in COMPLETIONS]
    return [{key: value for key, value in json.loads(line).items() if key in metrics or REWARDS.fullmatch(key)}
            for line in lines]


def differences(expected: dict[str, Any], epochs: list[dict[str, float]], here: str) -> list[str]:
    """What differs from a kept gate, a line each. here: this machine's `machine()`."""
    found = []
    if len(expected["epochs"]) != len(epochs):
        return [f"expected {len(expected['epochs'])} epochs, got {len(epochs)}"]
    for number, (wanted, got) in enumerate(zip(expected["epochs"], epochs), 1):
        if wanted.keys() != got.keys():
            found.append(f"epoch {number}: expected the metrics {sorted(wanted)}, got {sorted(got)}")
        for key in wanted.keys() & got.keys():
            share, floor = TOLERANCES.get(key.partition("/")[0], (0.0, 0.0))
            allowed = 0.0 if here == expected["machine"] else share * max(abs(wanted[key]), floor)
            if not abs(wanted[key] - got[key]) <= allowed:  # a NaN differs too
                found.append(f"epoch {number}: {key}: expected {wanted[key]!r}, got {got[key]!r}, "
                             f"{allowed:.2g} apart allowed")
    return found


def tenth(kept: dict[str, Any], number: int) -> list[str]:
    """The recipes of a tenth, so that all ten take about as long."""
    slowest = sorted(kept, key=lambda name: (-kept[name]["seconds"], name))
    rows = [slowest[at:at + 10] for at in range(0, len(slowest), 10)]
    return [row[place] for at, row in enumerate(rows) if (place := number if at % 2 == 0 else 9 - number) < len(row)]


def read() -> dict[str, Any]:
    kept: dict[str, Any] = json.loads(FILE.read_text(encoding="utf-8")) if FILE.is_file() else {}
    return kept


def gate(name: str, folder: Path) -> tuple[list[dict[str, float]], float, str]:
    """The metrics of a gate that ran in a process of its own, its processor seconds, and why it failed, or ""."""
    folder.mkdir(parents=True)

    def work() -> int:
        (folder / "epochs.json").write_text(json.dumps(train(name, folder)))
        return 0

    step = train_recipes.ran(work, folder / "log", SECONDS)
    if step is None:
        return [], SECONDS, f"stopped after {SECONDS:.0f} s"
    if step.code:
        return [], step.processor, "\n".join((folder / "log").read_text(errors="replace").splitlines()[-12:])
    return json.loads((folder / "epochs.json").read_text()), step.processor, ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="RECIPE", help="without: all")
    parser.add_argument("--tenth", type=int, choices=range(10))
    parser.add_argument("--write", action="store_true", help="keep what comes out")
    given = parser.parse_args()
    kept = read()
    chosen = given.names or (names() if given.tenth is None else tenth(kept, given.tenth))
    if unknown := {*chosen} - {*names()}:
        parser.error(f"no recipe {', '.join(sorted(unknown))}: expected some of {', '.join(names())}")
    train_recipes.load_libraries([name for name in chosen if not name.startswith("starter")])
    here, of, failed, began = machine(), commit(), 0, time.monotonic()  # the commit before --write changes the file
    for at, name in enumerate(chosen, 1):
        place = Path(tempfile.mkdtemp())
        epochs, seconds, why = gate(name, place / name)
        shutil.rmtree(place)
        if given.write and not why:
            kept = read() | {name: {"machine": here, "commit": of, "seconds": seconds, "epochs": epochs}}
            lines = (f" {json.dumps(key)}: {json.dumps(kept[key])}" for key in sorted(kept))
            FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
        wrong = [why] if why else (["not kept yet: --write"] if name not in kept
                                   else differences(kept[name], epochs, here))
        failed += bool(wrong)
        said = "; ".join(wrong) if wrong else "kept" if given.write else "equal" if here == kept[name]["machine"] else (
            "within tolerances")
        print(f"{at}/{len(chosen)} {name}: {seconds:.0f} s of the processor: {said}", flush=True)
    print(f"{len(chosen) - failed} of {len(chosen)} gates passed in {time.monotonic() - began:.0f} s")
    return 1 if failed else 0


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("DIFFUSERS_VERBOSITY", "error")
    sys.exit(main())
