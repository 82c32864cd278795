"""Every packaged recipe of a diffusers model on a CPU: full width, few blocks, seeded random weights, and few pictures.

    python scripts/train_recipes.py sd15_24gb sana_24gb     # builds, checks, trains, draws, exports and compares
    python scripts/train_recipes.py --table                 # of what has run so far

The same command goes on where it stopped; it ends after `--seconds`, also within a step, which then begins anew.
Classes, widths and autoencoders are published ones (flowgrpo/dry_run/published.py), tokenizers stand-ins. What a CPU
forces is changed and listed; nothing else is.
"""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
STEPS = ("build", "check", "train", "sample", "grid", "export", "stock")
PROMPT = "a red fox in the snow"
# Depths by the name of their key; what a pipeline reads of its encoders' layers needs more.
DENOISER = {"num_layers": 2, "num_single_layers": 2, "n_layers": 2, "num_refiner_layers": 1, "n_refiner_layers": 1,
            "layers_per_block": 1}
ENCODER = {"num_hidden_layers": 2, "num_layers": 1, "depth": 1}
READ = {"Flux2KleinPipeline": 28, "HunyuanVideoPipeline": 4, "HunyuanSkyreelsImageToVideoPipeline": 4,
        "HunyuanVideo15Pipeline": 4, "LTX2Pipeline": 48}
FORCED = {"device": "cpu", "tracker": "none", "reward": "sharpness", "eval.rewards": "[]", "eval.every": "0",
          "eval.steps": "2", "eval.prompts": "1", "train.epochs": "1", "train.prompts": "1", "train.updates": "1",
          "train.micro_batch": "2", "train.compile": "false"}


def recipes() -> list[str]:
    """Return the names of the recipes whose model is published."""
    from flowgrpo.config import load
    from flowgrpo.dry_run import published

    return [file.stem for file in sorted((ROOT / "configs").glob("*.yaml"))
            if load(file).model in published.MODELS]


def forced(name: str) -> dict[str, str]:
    """Return the keys of a recipe that a CPU and few minutes change."""
    from flowgrpo.config import load

    config, keys = load(ROOT / "configs" / f"{name}.yaml"), dict(FORCED)
    keys |= {f"picture.{side}": "128" for side in ("height", "width") if getattr(config.picture, side)}
    if config.train.group > 4 and "preview" not in config.parts:  # a pool has the group's size
        keys["train.group"] = "4"
    if config.picture.frames:
        keys["picture.frames"] = "5"
    if config.picture.sizes:
        keys["picture.sizes"] = "[]"
    if config.memory.weights == "nf4":
        keys["memory.weights"] = "full"
    if config.memory.shard:
        keys["memory.shard"] = "false"
    if config.train.optimizer == "adamw8bit":
        keys["train.optimizer"] = "adamw"
    return keys


# --- the model -------------------------------------------------------------------------------------------------------

def shallow(kind: Any, config: dict[str, Any], depths: dict[str, int]) -> dict[str, Any]:
    """Return a configuration with the depths that its class takes, its sub-configurations included."""
    taken = inspect.signature(kind.__init__).parameters
    changed = {key: shallow(kind, value, depths) if key.endswith("_config") else value for key, value in config.items()}
    known = {key: depth for key, depth in depths.items() if key in taken or key in config}
    if "transformer_layers_per_block" in config:
        known["transformer_layers_per_block"] = [1] * len(config["transformer_layers_per_block"])
    return changed | known


def build(name: str, folder: Path) -> None:
    """Write a recipe's pipeline: every part of its class and width, random weights of seed 0 in bf16."""
    import diffusers
    import torch
    import transformers

    from flowgrpo.config import load
    from flowgrpo.dry_run import from_configs, published

    known = published.MODELS[load(ROOT / "configs" / f"{name}.yaml").model]
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    parts: dict[str, Any] = {}
    for part, (kind, config) in known.parts.items():
        if hasattr(diffusers, kind):
            cls = getattr(diffusers, kind)
            depths = DENOISER if part in ("unet", "transformer", "transformer_2") else {}
            parts[part] = cls(**shallow(cls, config, depths))
        elif hasattr(transformers, kind):
            cls = getattr(transformers, kind)
            layers = ENCODER | {"num_hidden_layers": READ.get(known.pipeline, ENCODER["num_hidden_layers"])}
            parts[part] = cls(cls.config_class(**shallow(cls.config_class, config, layers)))
        else:
            parts[part] = from_configs.part(kind, config, torch.bfloat16)
    readers = {reader: from_configs.tokenizer(length) for reader, length in known.tokenizers.items()}
    pipe = getattr(diffusers, known.pipeline)(**parts, **readers, **known.options)
    pipe.save_pretrained(folder)
    print(f"{sum(p.numel() for part in parts.values() if isinstance(part, torch.nn.Module) for p in part.parameters())}"
          " parameters")


# --- the stock pipeline ----------------------------------------------------------------------------------------------

def stock(run: Path, model: Path, pictures: Path) -> None:
    """Draw the sampled picture once more by stock diffusers with the run's LoRA, and print the largest difference."""
    import numpy as np
    import torch
    from diffusers import DiffusionPipeline
    from PIL import Image

    from flowgrpo.config import load
    from flowgrpo.device import DTYPES, drawing

    config = load(run / "config.yaml")
    dtype = DTYPES[drawing(config.precision, "cpu")]
    pipe = DiffusionPipeline.from_pretrained(model, dtype=dtype)
    pipe.load_lora_weights(run)
    files = [file for file in sorted(pictures.iterdir()) if file.suffix == ".png"]
    if not files:
        print("loads; a clip was not compared")
        return
    picture = Image.open(files[0])
    seed = int(re.search(r"Seed: (\d+)", str(picture.info["parameters"]))[1])  # type: ignore[index]
    accepted = inspect.signature(type(pipe).__call__).parameters
    scale = "true_cfg_scale" if "true_cfg_scale" in accepted and "true_cfg_scale" not in config.call else \
        "guidance_scale"
    again = pipe(PROMPT, num_inference_steps=2, generator=torch.Generator().manual_seed(seed),
                 **{scale: config.eval.guidance}, **config.call).images[0]
    apart = np.abs(np.asarray(again).astype(int) - np.asarray(picture.convert("RGB")).astype(int))
    print(f"largest difference {apart.max()} of 255, mean {apart.mean():.3g}")


# --- steps -----------------------------------------------------------------------------------------------------------

@dataclasses.dataclass
class Step:
    """One step that has run: exit code, seconds, peak of its resident memory in GiB, and the last line that it said."""

    code: int
    seconds: float
    peak: float
    said: str
    estimate: float | None = None  # GiB by `check`


def commands(name: str, folder: Path) -> dict[str, list[str]]:
    """Return the command of every step."""
    model, run, recipe = folder / "model", folder / "runs" / "run", ROOT / "configs" / f"{name}.yaml"
    keys = [f"--{key}={value}" for key, value in forced(name).items()]
    own = [sys.executable, str(Path(__file__).resolve())]
    flowgrpo = [sys.executable, "-m", "flowgrpo"]
    return {"build": [*own, f"--build={name}", f"--folder={folder}"],
            "check": [*flowgrpo, "check", str(model), f"--recipe={recipe}", "--device=cpu", "--json",
                      *(key for key in keys if not key.startswith("--device"))],
            "train": [*flowgrpo, "train", str(recipe), f"--model={model}", *keys, f"--output={folder / 'runs'}",
                      "--name=run"],
            "sample": [*flowgrpo, "sample", str(run), f"--prompt={PROMPT}", "--steps=2",
                       f"--output={folder / 'pictures'}"],
            "grid": [*flowgrpo, "grid", str(run), "--count=1", f"--output={folder / 'grid.png'}"],
            "export": [*flowgrpo, "export", str(run), f"--output={folder / 'lora.safetensors'}"],
            "stock": [*own, f"--stock={name}", f"--folder={folder}"]}


def ran(command: list[str], log: Path, limit: float) -> Step | None:
    """Run a command with its output in a file; None if it took longer than `limit` seconds and was stopped."""
    began = time.monotonic()
    with log.open("w") as file:
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, cwd=ROOT,
                                   env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)})
        while True:
            pid, status, used = os.wait4(process.pid, os.WNOHANG)
            if pid:
                break
            if time.monotonic() - began > limit:
                process.kill()
                os.wait4(process.pid, 0)
                return None
            time.sleep(0.2)
    process.returncode = os.waitstatus_to_exitcode(status)
    said = log.read_text().replace("\r", "\n").strip().splitlines() or [""]
    return Step(process.returncode, round(time.monotonic() - began, 1),
                round(used.ru_maxrss / 2**20, 2), said[-1][:200])


def estimated(log: Path) -> tuple[float | None, str]:
    """Return the peak in GiB of a report of `check`, and whether the model is drivable."""
    text = log.read_text()
    report = json.loads(text[text.index("{"):text.rindex("}") + 1])
    phases = report.get("memory") or {}
    return max(phases.values(), default=None), report.get("reason") or f"first ratio {report.get('first_log_ratio')}"


def take(name: str, folder: Path, until: float) -> bool:
    """Take a recipe through the steps that are left. Return False if the time was over."""
    folder.mkdir(parents=True, exist_ok=True)
    done = read(folder)
    for step, command in commands(name, folder).items():
        if step in done and done[step].code == 0:
            continue
        left = until - time.monotonic()
        found = ran(command, folder / f"{step}.log", left) if left > 5 else None
        if found is None:
            return False
        if step == "check" and found.code == 0:
            found.estimate, found.said = estimated(folder / "check.log")
        done[step] = found
        content = {key: dataclasses.asdict(value) for key, value in done.items()}
        (folder / "steps.json").write_text(json.dumps(content, indent=2))
        print(f"{name}: {step}: {found.seconds:.0f} s, {found.peak} GiB, exit code {found.code}: {found.said}",
              flush=True)
        if found.code:
            break
    return True


def read(folder: Path) -> dict[str, Step]:
    """Return the steps that have run, from the folder of a recipe."""
    file = folder / "steps.json"
    return {key: Step(**value) for key, value in json.loads(file.read_text()).items()} if file.is_file() else {}


def table(names: list[str], root: Path) -> str:
    """Return a row per recipe: what ran, seconds, peak of the training against the estimate, the stock picture, and
    what a CPU forced.

    The estimate is of weights, activations and states in GiB; resident memory has Python and its libraries beside them.
    """
    lines = ["| recipe | ran | seconds | training, GiB | estimate, GiB | stock diffusers | forced |",
             "|---|---|---:|---:|---:|---|---|"]
    for name in names:
        if not (done := read(root / name)):
            continue
        good = [step for step in STEPS if step in done and done[step].code == 0]
        bad = next((f"; {step} failed: {done[step].said}" for step in STEPS if step in done and done[step].code), "")
        peak, estimate = done.get("train"), done.get("check")
        drawn = done["stock"].said if "stock" in good else "-"
        lines.append(f"| `{name}` | {', '.join(good)}{bad} | {sum(step.seconds for step in done.values()):.0f} | "
                     f"{peak.peak if peak else '-'} | {estimate.estimate if estimate else '-'} | {drawn} | "
                     f"{', '.join(f'{key}={value}' for key, value in forced(name).items())} |")
    return "\n".join(lines)


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="recipes; without: all")
    parser.add_argument("--folder", type=Path, default=Path("recipes"))
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--build", help=argparse.SUPPRESS)
    parser.add_argument("--stock", help=argparse.SUPPRESS)
    given = parser.parse_args()
    folder = given.folder.resolve()
    if given.build:
        build(given.build, folder / "model")
    elif given.stock:
        stock(folder / "runs" / "run", folder / "model", folder / "pictures")
    else:
        names, until = given.names or recipes(), time.monotonic() + given.seconds
        for name in () if given.table else names:
            if not take(name, folder / name, until):
                print(f"{name}: the time is over; the same command goes on", flush=True)
                break
        print(table(names, folder))


if __name__ == "__main__":
    main()
