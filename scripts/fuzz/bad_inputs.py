"""Cases of try_bad_inputs.py: files with mistakes, and command lines by name."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

SHORT = [
    "--train.epochs=1",
    "--train.prompts=2",
    "--train.group=4",
    "--eval.prompts=4",
    "--eval.steps=2",
    "--precision=fp32",
    "--device=cpu",
]

FILES: dict[str, str | bytes] = {
    "broken.yaml": "train: {epochs: 1\nmodel: starter]\n",
    "list.yaml": "- model: starter\n",
    "binary.yaml": bytes(range(128, 256)),
    "tab.yaml": "train:\n\tepochs: 1\n",
    "empty.yaml": "",
    "twice.yaml": "train: {epochs: 1}\ntrain: {group: 4}\n",
    "number.yaml": "train: 3\n",
    "section.yaml": "train: null\n",
    "laughs.yaml": "a: &a [x, x]\nb: &b [*a, *a]\ntrain: *b\n",
    "tag.yaml": "model: !!python/object/apply:os.system ['true']\n",
    "anchor.yaml": "model: *nowhere\n",
    "broken.jsonl": '{"prompt": "a circle"}\n{"prompt": "a star" "metadata": {}}\n',
    "empty.txt": "",
    "binary.txt": b"\xff\xfe\x00\x01" * 9,
    "bom.txt": "\ufeff" + "a red circle\na blue star\na green square\n" * 3,
    "same.txt": "a red star\n" * 20,
    "utf16.txt": "a red star\n".encode("utf-16"),
    "blank.txt": "\n \n\t\n",
    "meta.jsonl": '{"prompt": "a star", "metdata": {}}\n',
    "wnan.jsonl": '{"prompt": "a star", "weight": NaN}\n',
    "weight.jsonl": '{"prompt": "a star", "weight": -1}\n',
    "noprompt.csv": "text,task\na star,single\n",
    "image.jsonl": '{"prompt": "a star", "image": "nope.png"}\n',
    "latin1.txt": "caf\xe9\n".encode("latin-1"),
    "array.jsonl": '[{"prompt": "a"}]\n',
    "number.jsonl": '{"prompt": 3}\n',
    "nokey.jsonl": '{"text": "a star"}\n',
    "x.pdf": "%PDF",
    "deep.jsonl": "[" * 100_000 + "\n",
    "nul.txt": "a red\0star\n",
    "garbage.parquet": b"PAR1 no",
    "metadata.jsonl": '{"prompt": "a star", "metadata": [1]}\n',
    "ragged.csv": "prompt,task\na,b,c,d\n",
    "twice.jsonl": '{"prompt": "a star", "prompt": "a circle"}\n',
    "one.txt": "a red star\n",
    "syntax.py": "def reward(images, prompts:\n",
    "exit_import.py": "raise SystemExit(5)\n",
    "imports.py": "import nosuchpackage\n",
    "loop.py": "import loop\nreward = loop.reward\n",
    "binary.py": b"\xff\0\xff",
    "afile": "text",
    "zero.png": b"",
    "broken.png": b"\x89PNG\r\n\x1a\nbroken",
    "none.jsonl": "",
    "pairs.jsonl": '{"prompt": "a star", "chosen": "nope.png", "rejected": "nope.png"}\n',
    "pairs_key.jsonl": '{"prompt": "a star", "better": "a.png"}\n',
    "garbage.safetensors": b"garbage",
}


def train(*options: str) -> list[str]:
    """Return a short run of the starter with the options."""
    return ["train", *SHORT, *options]


def reward(name: str, *options: str) -> list[str]:
    """Return a short run with a function of rewards.py."""
    return train(f"--reward=rewards.py:{name}", *options)


RECIPES: dict[str, list[str]] = {
    "unknown key": train("--train.learning_rate=1"),
    "wrong type": train("--train.epochs=ten"),
    "range": train("--train.group=1"),
    "lr nan": train("--train.lr=nan"),
    "broken YAML": ["train", "broken.yaml"],
    "recipe is a list": ["train", "list.yaml"],
    "binary recipe": ["train", "binary.yaml"],
    "duplicate key": ["train", "twice.yaml"],
    "cuda without a GPU": train("--device=cuda"),
    "height 65": train("--image.height=65"),
    "name outside": train("--name=../../evil"),
    "name ..": train("--name=.."),
    "targets match nothing": train("--adapter.targets=[nope]"),
    "rank 0 and int8": train("--adapter.rank=0", "--memory.weights=int8"),
    "best not measured": train("--eval.best=sharpness"),
    "tab": ["train", "tab.yaml"],
    "seed -1": train("--seed=-1"),
    "seed abc": train("--seed=abc"),
    "empty name": train("--name="),
    "two recipes": ["train", "number.yaml", "empty.yaml"],
    "missing recipe": ["train", "configs/nope.yaml"],
    "guidance inf": train("--train.guidance=inf"),
    "window too large": train("--method=mix_grpo", "--train.steps=6", "--parts={plan: {size: 99}}"),
    "broken parts": train("--parts={plan: ["),
    "micro_batch 0": train("--train.micro_batch=0"),
    "held_out 1.5": train("--held_out=1.5"),
    "resume nothing": train("--resume", "--name=never"),
}
PROMPTS: dict[str, list[str]] = {
    name: train(f"--prompts={name}")
    for name in (
        "broken.jsonl",
        "empty.txt",
        "binary.txt",
        "same.txt",
        "utf16.txt",
        "meta.jsonl",
        "wnan.jsonl",
        "noprompt.csv",
        "image.jsonl",
        ".",
        "array.jsonl",
        "number.jsonl",
        "latin1.txt",
        "x.pdf",
        "blank.txt",
        "weight.jsonl",
        "nokey.jsonl",
    )
}
REWARDS: dict[str, list[str]] = {
    name: reward(name)
    for name in (
        "raises",
        "short",
        "nan",
        "inf",
        "strings",
        "none",
        "exits",
        "coroutine",
        "generator",
        "meta",
        "one_argument",
        "nones",
        "two_dimensions",
        "dictionary",
        "complex_numbers",
        "scalar",
        "not_callable",
        "nosuch",
    )
}
REWARDS |= {
    "hangs": train('--reward={"rewards.py:hangs": {timeout: 1}}'),
    "syntax error": train("--reward=syntax.py:reward"),
    "exit on import": train("--reward=exit_import.py:reward"),
    "import error": train("--reward=imports.py:reward"),
    "missing file": train("--reward=nowhere.py:reward"),
}
COMMANDS: dict[str, list[str]] = {
    "command typo": ["trian"],
    "option typo": train("--resum"),
    "grid foo": ["compare", "grid", "runs/base", "--columns", "foo"],
    "count 0": ["sample", "starter", "--prompt", "a star", "--count", "0"],
    "output is a file": train("--output=afile"),
    "truncated LoRA": ["sample", "starter", "--prompt", "a star", "--lora", "runs/cut"],
    "broken checkpoint": train("--resume", "--name=broken"),
    "empty model folder": train("--model=hollow"),
    "export unfinished": ["export", "runs/unfinished"],
    "score broken": ["reward", "score", "sharpness", "broken.png"],
    "score missing": ["reward", "score", "sharpness", "nowhere.png"],
    "report on a file": ["report", "afile"],
    "bad port": ["reward", "serve", "sharpness", "--port", "99999"],
    "unknown suite": ["eval", "starter", "--suite", "nope", "--output", "e", "--rewards", "scene"],
    "unknown reward": ["eval", "starter", "--suite", "starter", "--output", "e", "--rewards", "nope"],
    "train-reward, empty": ["reward", "train", "empty.txt", "--output", "rw"],
}

# Not among the mistakes that three users tried.
NEW: dict[str, list[str]] = {
    "epochs 0": train("--train.epochs=0"),
    "lr -1": train("--train.lr=-1"),
    "guidance abc": train("--train.guidance=abc"),
    "precision fp8": train("--precision=fp8"),
    "device tpu": train("--device=tpu"),
    "method nope": train("--method=nope"),
    "method empty": train("--method="),
    "reward empty": train("--reward="),
    "reward {}": train("--reward={}"),
    "weight nan": train("--reward={scene: .nan}"),
    "weight inf": train("--reward={scene: .inf}"),
    "weight misspelt": train("--reward={scene: {weigth: 1}}"),
    "reward unclosed": train("--reward=[scene"),
    "section is a number": ["train", "number.yaml"],
    "section is a list": ["train", "laughs.yaml"],
    "YAML tag": ["train", "tag.yaml"],
    "YAML alias": ["train", "anchor.yaml"],
    "recipe is a folder": ["train", "hollow/"],
    "model empty": train("--model="),
    "model is a file": train("--model=afile"),
    "model is a dead link": train("--model=dead"),
    "output empty": train("--output="),
    "name with a slash": train("--name=a/b"),
    "name too long": train("--name=" + "n" * 300),
    "prompts from a pipe": train("--prompts=pipe.txt"),
    "prompts /dev/null": train("--prompts=/dev/null"),
    "deep JSON": train("--prompts=deep.jsonl"),
    "NUL in a prompt": train("--prompts=nul.txt"),
    "metadata is a list": train("--prompts=metadata.jsonl"),
    "ragged CSV": train("--prompts=ragged.csv"),
    "garbage parquet": train("--prompts=garbage.parquet"),
    "prompt twice": train("--prompts=twice.jsonl"),
    "one prompt": train("--prompts=one.txt"),
    "held_out missing": train("--held_out=missing.txt"),
    "rank -1": train("--adapter.rank=-1"),
    "height 0": train("--image.height=0"),
    "seed 1e400": train("--seed=1e400"),
    "eval.every -1": train("--eval.every=-1"),
    "weights int3": train("--memory.weights=int3"),
    "shard alone": train("--memory.shard=true"),
    "part nope": train("--parts={ratio: {type: Nope}}"),
    "slot nope": train("--parts={nope: {}}"),
    "recursion": reward("recursion"),
    "BaseException": reward("base_exception"),
    "array of objects": reward("objects"),
    "no scores": reward("empty"),
    "four arguments": reward("three_required"),
    "10**400": reward("huge"),
    "a set": reward("unordered"),
    "length alone": reward("length_alone"),
    "sparse": reward("sparse"),
    "binary reward file": train("--reward=binary.py:reward"),
    "reward imports itself": train("--reward=loop.py:reward"),
    "reward is a folder": train("--reward=hollow"),
    "no reward server": train("--reward=http://127.0.0.1:9/mine"),
    "eval nothing": ["eval"],
    "eval, no such run": ["eval", "runs/nope", "--suite", "starter", "--output", "e"],
    "grid, no such run": ["compare", "grid", "runs/nope"],
    "grid, steps a,b": ["compare", "grid", "runs/base", "--columns", "steps", "--values", "a,b"],
    "sample, no prompt": ["sample", "starter"],
    "sample, empty prompt": ["sample", "starter", "--prompt", ""],
    "sample, seed x": ["sample", "starter", "--prompt", "a star", "--seed", "x"],
    "sample, no such LoRA": ["sample", "starter", "--prompt", "a star", "--lora", "runs/nope"],
    "export --form nope": ["export", "runs/base", "--form", "nope"],
    "export, no run": ["export", "runs/nope"],
    "report, no run": ["report", "runs/nope"],
    "check, class misspelt": ["check", "StableDiffusion3Pipelin"],
    "check, no such model": ["check", "./nope"],
    "pairs without images": ["reward", "train", "pairs.jsonl", "--output", "rw"],
    "pairs, unknown key": ["reward", "train", "pairs_key.jsonl", "--output", "rw"],
    "score, no reward": ["reward", "score", "nope", "broken.png"],
    "score, wrong args": ["reward", "score", "sharpness", "zero.png", "--args", "{nope: 1}"],
    "serve, no reward": ["reward", "serve", "nope", "--port", "0"],
}

# Right, however unusual: they end with exit code 0.
RIGHT: dict[str, list[str]] = {
    "BOM": train("--prompts=bom.txt"),
    "reward prints": reward("prints"),
    "numpy scalars": reward("scalars"),
    "constant reward": reward("constant"),
    "reward in place": reward("in_place"),
    "reward with grad": reward("requires_grad"),
    "resume, nothing left": train("--resume", "--name=base"),
    "booleans": reward("booleans"),
    "clears metadata": reward("clears_metadata"),
    "decorated": reward("bluish"),
}

CASES = RECIPES | PROMPTS | REWARDS | COMMANDS | NEW | RIGHT
FINE = set(RIGHT)


def prepare(folder: Path, command: Callable[..., Any]) -> None:
    """Write the files, train the run `runs/base`, and make broken copies of it."""
    for name, text in FILES.items():
        content = text if isinstance(text, bytes) else text.encode()
        (folder / name).write_bytes(content)
    (folder / "hollow").mkdir()
    (folder / "dead").symlink_to("nowhere")
    os.mkfifo(folder / "pipe.txt")
    outcome = command(*train("--name=base"))
    if outcome.code:
        raise SystemExit(f"the run that the cases begin with failed: {outcome.lines[-1:]}")
    base, runs = folder / "runs" / "base", folder / "runs"
    for name in ("cut", "broken", "unfinished"):
        shutil.copytree(base, runs / name)
    weights = runs / "cut" / "pytorch_lora_weights.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    for state in (runs / "broken" / "checkpoints").rglob("*.json"):
        state.write_text("{" + json.dumps("cut"), encoding="utf-8")
    (runs / "unfinished" / "summary.json").unlink()
