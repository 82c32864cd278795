"""Further cases of try_bad_inputs.py: impossible sizes, broken LoRAs and prompt files, odd names and odd rewards."""

import json
import os
import re
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import yaml
from PIL import Image
from safetensors.torch import load_file, save_file

from flowgrpo.storage import manifest

LORA = "pytorch_lora_weights.safetensors"
BILLION = 10**9
Changed = Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]
DRAWN = ["sample", "starter", "--prompt", "a star"]


def header(content: dict[str, Any], data: bytes = b"") -> bytes:
    """Return a .safetensors file with this header, whatever it claims."""
    text = json.dumps(content).encode()
    return struct.pack("<Q", len(text)) + text + data


FILES: dict[str, str | bytes] = {
    "long.txt": "a red star\na blue circle\n" + "a" * 10_000_000 + "\n" + "a green square\n" * 3,
    "words.jsonl": json.dumps({"prompt": "star " * 6000}) + "\n" + '{"prompt": "a star"}\n{"prompt": "a circle"}\n',
    "digits.jsonl": '{"prompt": "a star", "metadata": {"n": ' + "9" * 5000 + "}}\n",
    "lone.jsonl": '{"prompt": "a \\ud800 star"}\n{"prompt": "a circle"}\n{"prompt": "a square"}\n',
    "escapes.txt": "a \x1b[31mred star\na circle\na \u202estar\na square\n",
    "nulled.csv": "prompt,task\na star,\0\n",
    "quotes.csv": 'prompt,task\n"a star,single\n',
    "wide.csv": "prompt\n" + "a" * 200_000 + "\n",
    "zipped.txt": b"PK\x03\x04" + bytes(60),
    "gzip.jsonl": b"\x1f\x8b\x08" + bytes(60),
    "cut.parquet": b"PAR1" + bytes(40) + b"PAR1",
    "unknown.yml": "prompt: a star\n",
    "negative.jsonl": '{"prompt": "a star", "negative": 3}\n',
    "suffix": "a star\na circle\n",
    "claims.safetensors": header({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}),
    "dtype.safetensors": header({"a": {"dtype": "F31", "shape": [1], "data_offsets": [0, 4]}}, bytes(4)),
    "shape.safetensors": header({"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}, bytes(4)),
    "length.safetensors": struct.pack("<Q", 2**60) + b"{}",
    "sexagesimal.yaml": "train: {epochs: 1:30}\n",
    "octal.yaml": "train: {group: 010}\n",
    "flag.yaml": "train: {epochs: true}\n",
    "yes.yaml": "train: {epochs: yes}\n",
    "home.yaml": "output: ~nobody-of-this-name/runs\n",
    "zeros.yaml": "reward: {scene: 0, scene_graded: 0.0}\n",
    "raises.py": "raise ValueError('\\x1b[31mno\\n')\n",
}


def size(*options: str) -> list[str]:
    """Return a short run of the starter with the options."""
    return ["train", "--train.epochs=1", "--train.prompts=2", "--train.group=4", "--eval.prompts=4", "--eval.steps=2",
            "--precision=fp32", "--device=cpu", *options]


def consistent(*options: str) -> list[str]:
    """Return a short run of the consistency starter with the options."""
    return size("--model=starter_consistency", "--method=rlcm", "--train.steps=4", "--train.grid=stock",
                "--eval.guidance=1", "--adapter.targets=[to_q]", *options)


def text(*options: str) -> list[str]:
    """Return a short run of the text starter with the options."""
    short = [option for option in size() if not option.startswith("--eval.steps")]
    return [*short, "--model=starter_text", "--method=grpo", "--reward=numeric_match", "--prompts=starter_text",
            *options]


def scored(name: str) -> list[str]:
    """Return a short run with a function of odd_rewards.py."""
    return size(f"--reward=odd_rewards.py:{name}")


SIZES: dict[str, list[str]] = {
    "group 10^9": size(f"--train.group={BILLION}"),
    "group 10^5": size("--train.group=10000000"),
    "prompts 10^9": size(f"--train.prompts={BILLION}"),
    "rank 10^6": size("--adapter.rank=1000000"),
    "rank 10^12": size(f"--adapter.rank={BILLION}000"),
    "steps 10^7": size("--train.steps=10000000"),
    "steps 10^18": size(f"--train.steps={BILLION}{BILLION}"),
    "eval.steps 10^8": size("--eval.steps=100000000"),
    "eval.samples 10^9": size(f"--eval.samples={BILLION}"),
    "image of 100000": size("--image.height=100000", "--image.width=100000"),
    "sizes of 100000": size("--image.sizes=[[100000,100000]]"),
    "image of 10^15": size(f"--image.height={BILLION}000000"),
    "frames 10^8": size("--model=starter_video", "--reward=motion", "--prompts=starter_video",
                        "--image.frames=100000000"),
    "updates 10^9": size(f"--train.updates={BILLION}"),
    "context_parallel 10^6": size("--memory.context_parallel=1000000"),
    "tokens 10^9": text(f"--text.max_tokens={BILLION}"),
    "text group 10^9": text(f"--train.group={BILLION}"),
    "text rank 10^6": text("--adapter.rank=1000000"),
    "alpha 1e308": size("--adapter.alpha=1e308"),
    "lr 1e308": size("--train.lr=1e308", "--reward=odd_rewards.py:forgiving", "--train.epochs=2"),
    "lr 1e39": size("--train.lr=1e39", "--train.epochs=2"),
    "seed 2**32": size("--seed=4294967296"),
    "digits of 5000": size("--train.group=" + "9" * 5000),
    "phase of 10^9": size(f"--phases=[{{at: 0, set: {{train.group: {BILLION}}}}}]"),
    "group of bool": size("--train.group=true"),
    "count 10^9": [*DRAWN, "--count", str(BILLION)],
    "count 3*10^7": [*DRAWN, "--count", "30000000"],
    "count 10^19": [*DRAWN, "--count", "1" + "0" * 19],
    "count 10^9, mp4": [*DRAWN, "--count", str(BILLION), "--output", "x.mp4"],
    "count 10^9 of a file": ["sample", "starter", "--prompts", "one.txt", "--count", str(BILLION)],
    "count 10^9 of texts": ["sample", "starter_text", "--prompt", "1+2=", "--count", str(BILLION)],
    "best of 10^9": [*DRAWN, "--best-of", str(BILLION), "--by", "scene"],
    "sample, steps 10^8": [*DRAWN, "--steps", "100000000"],
    "sample, steps 10^19": [*DRAWN, "--steps", "1" + "0" * 19],
    "sample, guidance 1e400": [*DRAWN, "--guidance", "1e400"],
    "sample, guidance nan": [*DRAWN, "--guidance", "nan"],
    "sample, prompt of 100000": ["sample", "starter", "--prompt", "a" * 100_000],
    "check, rank 10^6": ["check", "starter", "--adapter.rank=1000000"],
    "check, GPU, group 10^9": ["check", "--gpu", "H100", "--model=starter", f"--train.group={BILLION}"],
    "check, 10^9 processes": ["check", "--gpu", "H100", "--model=starter", "--processes", str(BILLION)],
}
STEPS: dict[str, list[str]] = {
    "consistency, sample --steps 1": ["sample", "starter_consistency", "--prompt", "a star", "--steps", "1"],
    "consistency, eval.steps 1": consistent("--eval.steps=1"),
    "eval, samples 10^9": ["eval", "starter", "--suite", "one.txt", "--output", "e1", "--rewards", "scene",
                           "--samples", str(BILLION)],
    "train.steps 1": size("--train.steps=1"),
    "consistency, train.steps 1": consistent("--train.steps=1"),
}
PROMPTS: dict[str, list[str]] = {name: size(f"--prompts={name}") for name in (
    "long.txt", "words.jsonl", "digits.jsonl", "nulled.csv", "wide.csv", "zipped.txt", "gzip.jsonl", "cut.parquet",
    "unknown.yml", "negative.jsonl", "suffix", "/dev/zero", "one.txt/", "hub:", "hub:../x")}
NAMES: dict[str, list[str]] = {
    "name with an escape": size("--name=\x1b[31mx"),
    "name with a newline": size("--name=a\nb"),
    "name that turns": size("--name=a\u202eb"),
    "name of a space": size("--name= "),
    "output with an escape": size("--output=\x1b[31mx"),
    "model with an escape": size("--model=\x1b[31mx"),
    "prompts with an escape": size("--prompts=\x1b[31mx.txt"),
    "recipe with an escape": ["train", "\x1b[31mx.yaml"],
}
LORAS: dict[str, list[str]] = {f"LoRA, {name}": [*DRAWN, "--steps", "2", "--lora", f"{name}.safetensors"] for name in (
    "nan", "inf", "without_b", "other_rank", "integers", "fp8_nan", "flat", "claims", "dtype", "shape", "length",
    "huge", "one_huge", "complex", "bool")}
LORAS |= {
    "run of NaN, sample": [*DRAWN, "--lora", "runs/of_nan"],
    "run of NaN, export": ["export", "runs/of_nan"],
    "run of NaN, grid": ["compare", "grid", "runs/of_nan"],
    "run of NaN, init": size("--adapter.init=runs/of_nan", "--adapter.rank=32"),
    "checkpoint of NaN, resume": size("--resume", "--name=state_of_nan", "--train.epochs=2"),
    "checkpoint of NaN, sample": [*DRAWN, "--lora", "runs/state_of_nan/checkpoints/epoch-00001"],
    "image run for texts": ["sample", "starter_text", "--prompt", "1+2=", "--lora", "runs/base"],
    "dpo without pairs": size("--method=dpo"),
}
REWARDS: dict[str, list[str]] = {name: scored(name) for name in (
    "silent", "masked", "long_message", "escaping", "lazy_raise", "bad_array", "bad_float", "fp8", "structured",
    "dates", "decimal_nan", "bytes_", "nested", "interrupts", "stops", "closes", "group_of_errors", "Unmade")}
REWARDS["raises on import"] = size("--reward=raises.py:reward")

YAML: dict[str, list[str]] = {
    **{name: ["train", f"{name}.yaml"] for name in ("sexagesimal", "octal", "flag", "yes", "home", "zeros")},
    "epochs True": size("--train.epochs=True"),
    "epochs 1:30": size("--train.epochs=1:30"),
    "group 010": size("--train.group=010"),
    "seed off": size("--seed=off"),
    "held_out yes": size("--held_out=true"),
    "size of bool": size("--parts.plan.size=true"),
    "size of an image, bool": size("--image.sizes=[[true, 64]]"),
    "weight of bool": size("--reward={scene: true}"),
    "weights of 0": size("--reward={scene: 0}"),
    "recipe that cannot be read": ["train", "/proc/self/mem"],
    "prompts that cannot be read": ["sample", "starter", "--prompts", "mem.txt"],
}
PATHS: dict[str, list[str]] = {
    "output of nobody": size("--output=~nobody-of-this-name/x"),
    "sample, output of nobody": [*DRAWN, "--output=~nobody-of-this-name/x"],
    "sample, star.png": [*DRAWN, "--output", "star.png"],
    "sample, x.exe": [*DRAWN, "--output", "x.exe"],
    "sample, x.PNG": [*DRAWN, "--output", "x.PNG"],
    "samples of a file, x.webp": ["sample", "starter", "--prompts", "one.txt", "--output", "x.webp"],
    "eval, x.json": ["eval", "starter", "--suite", "one.txt", "--output", "x.json", "--rewards", "scene"],
    "grid, x.exe": ["compare", "grid", "runs/base", "--output", "x.exe"],
    "prompts of http": size("--prompts=http://127.0.0.1:9/x.txt"),
    "sample, prompts of http": ["sample", "starter", "--prompts", "https://127.0.0.1:9/x.txt"],
    "prompts of nothing": size("--prompts="),
    "sample, prompts of nothing": ["sample", "starter", "--prompts="],
    "preferences of http": size("--preferences=http://127.0.0.1:9/x.jsonl", "--method=dpo"),
    "check, sdxl_24g": ["check", "sdxl_24g"],
    "check, sdxl_24g on a GPU": ["check", "sdxl_24g", "--gpu", "4090"],
    "check, startr": ["check", "startr"],
    "sample, seed 1.5": [*DRAWN, "--seed", "1.5"],
    "sample, steps 1.5": [*DRAWN, "--steps=1.5"],
    "sample, guidance x": [*DRAWN, "--guidance", "x"],
    "score, empty folder": ["reward", "score", "sharpness", "empty"],
    "score, two sizes": ["reward", "score", "sharpness", "sizes"],
}
CHECKPOINTS: dict[str, list[str]] = {f"resume, {name}": size("--resume", f"--name={name}", "--train.epochs=2")
                                     for name in ("epoch_3", "epoch_one", "no_moment", "bad_moment", "int_weights",
                                                  "update_text", "damaged")}
CHECKPOINTS |= {f"report, {name}": ["report", f"runs/{name}"] for name in ("metrics_nan", "metrics_text")}

# Right, however unusual, and those that have to run now.
RIGHT: dict[str, list[str]] = {
    "sample, seed 10^30": [*DRAWN, "--seed", "1" + "0" * 30],
    "sample --steps 1": [*DRAWN, "--steps", "1"],
    "video, sample --steps 1": ["sample", "starter_video", "--prompt", "a star", "--steps", "1"],
    "FP8 LoRA": [*DRAWN, "--steps", "2", "--lora", "fp8.safetensors"],
    "micro_batch 10^9": size(f"--train.micro_batch={BILLION}"),
    "escapes in prompts": size("--prompts=escapes.txt", "--reward=odd_rewards.py:forgiving"),
    "eval.grid 10^9": size(f"--eval.grid={BILLION}"),
    "resume=auto, nothing there": size("--resume=auto", "--name=fresh"),
    "resume=auto, a run there": size("--resume=auto", "--name=base"),
    "partly masked": scored("partly_masked"),
    "resume=auto, all damaged": size("--resume=auto", "--name=damaged_auto"),
    "resume, without before/": size("--resume", "--name=no_before", "--train.epochs=2"),
    "sample, folder v1.5": [*DRAWN, "--output", "v1.5"],
}

# Words that the line has to have, as another reason would mislead.
SAYS = {
    "consistency, sample --steps 1": "shift_terminal",
    "consistency, eval.steps 1": "shift_terminal",
    "dpo without pairs": "a method of language models",
    "image run for texts": "runs/base",
    "LoRA, without_b": "lora_B",
    "LoRA, nan": "finite",
    "LoRA, inf": "finite",
    "run of NaN, sample": "finite",
    "run of NaN, export": "finite",
    "checkpoint of NaN, resume": "NaN or an infinity",
    "lr 1e308": "finite",
    "LoRA, huge": "diverged",
    "LoRA, one_huge": "diverged",
    "LoRA, complex": "complex64",
    "LoRA, bool": "bool",
    "octal": "010",
    "flag": "expected a number",
    "zeros": "other than 0",
    "check, sdxl_24g": "sdxl_24gb",
    "check, sdxl_24g on a GPU": "sdxl_24gb",
    "check, startr": "starter",
    "sample, seed 1.5": "got '1.5'",
    "sample, guidance x": "got 'x'",
    "sample, star.png": "expected that of a folder",
    "prompts of http": "http://",
    "score, empty folder": "no file in it",
    "score, two sizes": "64 x 64",
    "resume, damaged": "--resume=auto",
    "report, metrics_nan": "line 1",
    "report, metrics_text": "line 1",
    "silent": "Silent",
    "masked": "had a score",
}

ELSEWHERE = Path("../elsewhere")  # of recipes that are not the user's own
_SINK = "http://127.0.0.1:9"
_KEY = {"url": f"{_SINK}/x", "key_env": "HOME"}
RECIPES: dict[str, dict[str, Any]] = {
    "a key": {"reward": {"e": {"use": "http", "args": _KEY}}},
    "a token file": {"reward": {f"{_SINK}/x": {"args": {"token_file": "/etc/hostname"}}}},
    "a judge": {"reward": {"judge": {"args": {"url": f"{_SINK}/v1"}}}},
    "a judge's key": {"reward": {"judge": {"args": {"key_env": "HOME"}}}},
    "a reward inside another": {"reward": {"g": {"use": "gated", "args": {"reward": {"use": "http", "args": _KEY}}}}},
    "a measured reward": {"eval": {"rewards": {"e": {"use": "http", "args": _KEY}}}},
    "a server": {"reward": f"{_SINK}/pickscore"},
    "an engine": {"rollout": {"engine": _SINK}},
    "a phase": {"phases": [{"at": 0.5, "set": {"rollout.engine": _SINK}}]},
    "a file": {"reward": "rewards.py:constant"},
    "a method's file": {"method": "mix_grpo+rewards.py:constant"},
    "code_run": {"reward": {"code_run": {"args": {"accept_risk": True}}}},
    "a model's code": {"trust_remote_code": True},
    "an output": {"output": "/etc/cron.d"},
    "an output above": {"output": "runs/../../x"},
    "an output at home": {"output": "~/.config/autostart"},
    "a cache": {"cache": "/var/tmp/c"},
    "an engine's folder": {"rollout": {"folder": "~/x"}},
}
FOREIGN = {f"elsewhere: {name}": ["train", f"{ELSEWHERE}/{name}.yaml"] for name in RECIPES} | {
    "elsewhere: check": ["check", f"{ELSEWHERE}/a key.yaml"],
    "elsewhere: encode": ["prompts", "encode", f"{ELSEWHERE}/a key.yaml", "--cache=c"],
    "elsewhere: methods": ["compare", "methods", "--methods", f"{ELSEWHERE}/a file.yaml", "--output", "bench"],
    "elsewhere: rules": ["eval", "starter", "--suite", "starter", "--rewards", f"{ELSEWHERE}/rules.yaml",
                         "--output", "e"],
    "elsewhere: extended": ["train", "extending.yaml"],
    "elsewhere: another address": ["train", f"{ELSEWHERE}/a key.yaml", f"--reward.e.args.url={_SINK}/y"],
}
_OPEN = "--reward={e: {use: NAME, args: {url: 'http://192.0.2.1/v1', key_env: HOME}}}"
OPEN = {f"key over http, {name}": size(_OPEN.replace("NAME", name)) for name in ("http", "judge", "deqa")}
JUDGES = {
    "judge without a path": size("--reward={judge: {args: {url: 'http://127.0.0.1:9'}}}"),
    "judge, key for a name": size("--reward={judge: {args: {key_env: sk-123}}}"),
    "judge, NaN": size("--reward={judge: {args: {extra: {x: .nan}}}}"),
    "http, NaN": size("--reward={e: {use: http, args: {url: 'http://127.0.0.1:9/x', request: {x: .nan}}}}"),
    "http, header": size("--reward={e: {use: http, args: {url: 'http://127.0.0.1:9/x', headers: {X: \u00e9}}}}"),
}
SAYS |= {name: "may not: read it" for name in FOREIGN} | {name: "unencrypted: use https://" for name in OPEN} | {
    "judge without a path": "expected http://host:port/v1", "judge, key for a name": "key_env is no name",
    "judge, NaN": "is not JSON", "http, NaN": "is not JSON", "http, header": "expected printable ASCII"}

CASES = (SIZES | STEPS | PROMPTS | NAMES | LORAS | REWARDS | YAML | PATHS | CHECKPOINTS | FOREIGN | OPEN | JUDGES
         | RIGHT)


def prepare(folder: Path) -> None:
    """Write the files, and break copies of the run `runs/base` and of its LoRA."""
    for name, content in FILES.items():
        (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    shutil.copy(Path(__file__).with_name("odd_rewards.py"), folder)
    elsewhere = folder / ELSEWHERE
    elsewhere.mkdir()
    for name, values in RECIPES.items():
        (elsewhere / f"{name}.yaml").write_text(yaml.safe_dump({"extends": "starter"} | values), encoding="utf-8")
    (elsewhere / "rules.yaml").write_text(yaml.safe_dump({"e": {"use": "http", "args": _KEY}}), encoding="utf-8")
    (folder / "extending.yaml").write_text(f"extends: {ELSEWHERE}/a key.yaml\n", encoding="utf-8")
    base = folder / "runs" / "base"
    for name, changed in LORA_FILES.items():
        _rewrite(base / LORA, folder / f"{name}.safetensors", changed)
    for name in ("of_nan", "state_of_nan"):
        shutil.copytree(base, folder / "runs" / name)
    _rewrite(base / LORA, folder / "runs" / "of_nan" / LORA, LORA_FILES["nan"])
    for state in (folder / "runs" / "state_of_nan" / "checkpoints").glob("epoch-*"):
        _rewrite(state / "state.safetensors", state / "state.safetensors", LORA_FILES["nan"])
        manifest.write(state)
    _prepare_checkpoints(base)
    (folder / "mem.txt").symlink_to("/proc/self/mem")
    (folder / "empty").mkdir()
    (folder / "sizes").mkdir()
    for number, side in enumerate((64, 32)):
        Image.new("RGB", (side, side)).save(folder / "sizes" / f"{number}.png")


def _prepare_checkpoints(base: Path) -> None:
    """Copy a run, and edit the copies' checkpoints under a fitting manifest, and other files."""
    values: dict[str, dict[str, Any]] = {"epoch_3": {"epoch": -3}, "epoch_one": {"epoch": "one"},
                                         "update_text": {"update": "five"}}
    tensors: dict[str, Changed] = {
        "no_moment": lambda old: {key: tensor for key, tensor in old.items() if key != "optimizer/0.exp_avg"},
        "bad_moment": lambda old: old | {"optimizer/0.exp_avg": torch.zeros(3)},
        "int_weights": lambda old: {key: tensor.long() if key.startswith("weights/") else tensor
                                    for key, tensor in old.items()}}
    for name in (*values, *tensors, "damaged", "damaged_auto", "no_before", "metrics_nan", "metrics_text"):
        run = base.with_name(name)
        shutil.copytree(base, run)
        for state in (run / "checkpoints").glob("epoch-*"):
            if name in values:
                file = state / "state.json"
                file.write_text(json.dumps(json.loads(file.read_text()) | values[name]))
            if name in tensors:
                _rewrite(state / "state.safetensors", state / "state.safetensors", tensors[name])
            manifest.write(state)
            if name.startswith("damaged"):
                (state / "state.json").write_text("[]")
    shutil.rmtree(base.with_name("no_before") / "before")
    for name, value in (("metrics_nan", "NaN"), ("metrics_text", '"high"')):
        file = base.with_name(name) / "metrics.jsonl"
        file.write_text(re.sub(r'("reward/[^"]+/mean": )[^,]+', rf"\1{value}", file.read_text()))


def _rewrite(source: Path, target: Path, changed: Changed) -> None:
    """Write changed tensors of a .safetensors file to another, with its metadata."""
    from safetensors import safe_open

    with safe_open(source, "pt") as file:
        metadata = file.metadata()
    tensors = changed(load_file(source))
    if target.is_file():
        os.unlink(target)
    save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, target, metadata)


def _all(change: Callable[[torch.Tensor], torch.Tensor]) -> Changed:
    return lambda tensors: {key: change(tensor) for key, tensor in tensors.items()}


def _one_inf(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    first = next(iter(tensors))
    changed = tensors[first].clone()
    changed.view(-1)[0] = float("inf")
    return tensors | {first: changed}


LORA_FILES: dict[str, Changed] = {
    "nan": _all(lambda tensor: torch.full_like(tensor, float("nan")) if tensor.is_floating_point() else tensor),
    "inf": _one_inf,
    "without_b": lambda tensors: {key: tensor for key, tensor in tensors.items() if "lora_B" not in key},
    "other_rank": lambda tensors: {key: tensor[:, :3] if "lora_B" in key else tensor for key, tensor in
                                   tensors.items()},
    "integers": _all(lambda tensor: tensor.to(torch.int64)),
    "fp8": _all(lambda tensor: tensor.to(torch.float8_e4m3fn)),
    "fp8_nan": _all(lambda tensor: torch.full_like(tensor, float("nan")).to(torch.float8_e4m3fn)),
    "flat": _all(lambda tensor: tensor.flatten()),
    "huge": _all(lambda tensor: tensor * 1e30 + 1e30),
    "one_huge": lambda tensors: tensors | {key: tensor + 1e7 for key, tensor in [next(iter(tensors.items()))]},
    "complex": _all(lambda tensor: tensor.to(torch.complex64)),
    "bool": _all(lambda tensor: tensor > 0),
}
