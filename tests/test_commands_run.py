"""Every command line of README.md and docs/ runs as it stands, shortened by further options, on packaged models and
small files. Those that cannot run here are listed with the reason."""

import itertools
import json
import re
import shlex
import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import huggingface_hub
import numpy as np
import pytest
from accelerate.commands.launch import launch_command_parser
from PIL import Image
from torch.distributed.run import get_args_parser

from flowgrpo import published
from flowgrpo.cli.options import recipe_and_options
from flowgrpo.cli.train import UNTRAINED
from flowgrpo.config import load
from flowgrpo.starter import scenes
from tests.helpers import chat_endpoint, stand_in_hub
from tests.helpers.commands import leaf
from tests.helpers.shown_commands import VISITED, Typed, value, words
from tests.test_docs import ROOT, command_lines
from tests.tools.dry_run.test_kinds import shallow


def write(files: dict[str, str], folder: Path) -> None:
    for name, content in files.items():
        (folder / name).write_text(content, encoding="utf-8")


def where(recipe: str) -> Path | str:
    """Return the file of a recipe, or the name of a packaged one."""
    return ROOT / recipe if recipe.endswith(".yaml") else recipe


def lines(rows: list[dict]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def picture(name: str, folder: Path) -> None:
    Image.new("RGB", (64, 64), "red").save(folder / name)


def starter_pairs(folder: Path) -> None:
    """Write pairs as those of scripts/build/make_starter_pairs.py: a scene as its prompt says, and another one."""
    place, rng = folder / "runs" / "starter_pairs", np.random.default_rng(0)
    place.mkdir(parents=True)
    for number, prompt in enumerate(TEXTS):
        drawn = (scenes.render(scenes.parse(prompt), rng) * 255).round().astype(np.uint8)
        Image.fromarray(drawn).save(place / f"{number}.png")
    rows = [{"prompt": prompt, "chosen": f"{number}.png", "rejected": f"{(number + 1) % len(TEXTS)}.png"}
            for number, prompt in enumerate(TEXTS)]
    write({"pairs.jsonl": lines(rows), "subjects.jsonl": lines(rows)}, place)


def shown_recipe(name: str, folder: Path) -> None:
    """Write the recipe that docs/get_started/one_gpu.md has the user save, beside the one that it extends."""
    page = (ROOT / "docs" / "get_started" / "one_gpu.md").read_text(encoding="utf-8")
    [content] = re.findall(rf"Save this as `{re.escape(name)}`.*?```yaml\n(.*?)```", page, re.S)
    shutil.copytree(ROOT / "configs", folder / "configs")
    write({name: content}, folder)


[RED] = re.findall(r"```python\n(# red\.py\n.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.S)
SUMS = [{"prompt": f"{i}+34+56=", "metadata": {"answer": str(i + 90)}} for i in range(11, 23)]
TEXTS = ("a red star", "a red star left of a ring", "a blue ring", "two green crosses")
SCENES = [{"prompt": prompt, "metadata": {"answer": "3"}} for prompt in TEXTS]
TRIED = [{"weights": [share / 5, 1 - share / 5], "score": share * (5 - share)} for share in range(6)]
PROMPTS = "".join(f"{prompt}\n" for prompt in TEXTS)
ASPECTS = {"aspects.yaml": "bright: {use: 'aspects.py:bright'}\nred: {use: 'aspects.py:red', weight: 2}\n",
           "aspects.py": "def bright(images, prompts):\n    return (1e4 * images.mean((1, 2, 3))).tolist()\n\n\n"
                         "def red(images, prompts):\n    return (1e4 * images[:, 0].mean((1, 2))).tolist()\n"}
ENHANCER = """model: starter_text
method: grpo
reward: {pictured: {args: {pipeline: starter, rewards: [sharpness], steps: 2}}}
prompts: prompts.txt
held_out: 0.25
text: {max_tokens: 4}
"""
RUN = ("flowgrpo train starter", "runs/starter")
TEXT_RUN = ("flowgrpo train starter_text", "runs/starter_text")
SAMPLES = "flowgrpo sample starter --prompts prompts.txt --count 2 --output samples"
FILES = {
    "configs": lambda folder: shutil.copytree(ROOT / "configs", folder / "configs"),
    "sdxl_pick.yaml": partial(shown_recipe, "sdxl_pick.yaml"),
    "prompts.txt": partial(write, {"prompts.txt": PROMPTS}),
    "prompts.jsonl": partial(write, {"prompts.jsonl": lines(SCENES)}),
    "scenes.jsonl": partial(write, {"scenes.jsonl": lines(SCENES)}),
    "sums.jsonl": partial(write, {"sums.jsonl": lines(SUMS)}),
    "gsm8k_test.jsonl": partial(write, {"gsm8k_test.jsonl": lines([{"question": "1+2=", "answer": "1+2=3\n#### 3"}])}),
    "tried.jsonl": partial(write, {"tried.jsonl": lines(TRIED)}),
    "aspects.yaml": partial(write, ASPECTS),
    "my_recipe.yaml": partial(write, {"my_recipe.yaml": "method: flow_grpo\ntrain: {lr: 1.0e-4}\n"}),
    "enhancer.yaml": partial(write, {"enhancer.yaml": ENHANCER, "prompts.txt": PROMPTS}),
    "red.py": partial(write, {"red.py": RED}),
    "a.png": partial(picture, "a.png"), "b.png": partial(picture, "b.png"),
    "runs/starter_pairs": starter_pairs,
    "runs": (RUN[0], "runs"), "runs/starter": RUN, "runs/one": RUN, "runs/two": RUN,
    "runs/sdxl_24gb": RUN, "runs/flux_dev_24gb": RUN,
    "runs/mine": ("flowgrpo compare grid runs/starter", "runs/starter"),
    "runs/starter_text": TEXT_RUN, "runs/enhancer": TEXT_RUN,
    "runs/fast": ("flowgrpo train starter --method=flow_grpo_fast --parts={} --name=fast",
                  "runs/fast"),
    "runs/lr": ("flowgrpo train starter --train.lr=1e-3 --name=lr", "runs/lr"),
    "runs/rates": ("flowgrpo train starter --prompts=clean.jsonl --parts.curriculum.type=Retention "
                   "--name=rates", "runs/rates"),
    "runs/enhancer1": ("flowgrpo train RECIPE --name=enhancer1", "runs/enhancer1"),
    "rewritten": ("flowgrpo sample runs/enhancer1 --prompts prompts.txt --count 4 --temperature 1 --key prompt "
                  "--output rewritten", "rewritten"),
    "samples": (SAMPLES, "samples"), "samples_a": (SAMPLES, "samples"), "samples_b": (f"{SAMPLES} --seed 1", "samples"),
    "pairs.jsonl": ("flowgrpo reward label samples --rewards aspects.yaml --all --tie 0.5", "pairs.jsonl", "samples"),
    "reward": ("flowgrpo reward train pairs.jsonl --output reward", "reward"),
    "soft.py": ("flowgrpo new method soft", "soft.py"), "my_loss.py": ("flowgrpo new method my_loss", "my_loss.py"),
    "clean.jsonl": ("flowgrpo prompts mix prompts.jsonl --dedupe --near 0.7 --output clean.jsonl", "clean.jsonl"),
    "one.jsonl": ("flowgrpo prompts mix clean.jsonl --rates runs/rates --by variance --keep 1 --output one.jsonl",
                  "one.jsonl"),
    "hub:me/starter": ("flowgrpo push runs/starter me/starter",),
    "me/starter@second": ("flowgrpo push runs/starter me/starter --private --revision second --message "
                          '"40 more epochs"',)}
STAND_INS = {
    "": {"RUN": "runs/starter", "PIPELINE": "starter", "MODEL": "starter", "RECIPE": "configs/starter.yaml", "K": "1"},
    "train RECIPE --name=enhancer1": {"RECIPE": "enhancer.yaml"},
    "(compare grid|eval) RUN .*rlg": {"RUN": "runs/fast"},  # which trained the denoiser alone
    "eval MODEL": {"MODEL": "starter_text"},
    "eval RUN --epoch": {"50": "1", "FILE": "scenes.jsonl", "FOLDER": "measured"},
    "list prompts FILE": {"FILE": "prompts.txt"},
    "(sample|export) RUN --epoch": {"50": "1", "TEXT": "a red star"},
    "check": {"MODEL": "stabilityai/stable-diffusion-xl-base-1.0", "RECIPE": "configs/sdxl_24gb.yaml"}}
TINY = "--train.epochs=1 --train.prompts=1 --train.group=4 --train.micro_batch=4 --eval.prompts=2"
PAIRS = "--train.epochs=1 --train.prompts=4 --train.micro_batch=8 --eval.prompts=2 --eval.steps=2 --preferences="
SMALL = ("--image.height=128 --image.width=128 --train.prompts=2 --train.group=4 --train.micro_batch=2 "
         "--train.steps=6")  # beside fewer blocks
OPTIONS = {
    "train (starter_text|enhancer)": f"{TINY} --train.updates=1",
    "(train (configs/starter.yaml|starter(_4steps)?(?= |$))|demo)": f"{TINY} --eval.steps=2",
    "train (configs/starter.yaml|starter) --name=painter1": "--reward=sharpness",  # rewrites of digits are no scenes
    "train starter_dpo": f"{PAIRS}runs/starter_pairs/pairs.jsonl",
    "train starter_rpo": f"{PAIRS}runs/starter_pairs/subjects.jsonl",
    "check .*--gpu": SMALL,
    "check .*(flux_dev_8x80|papers/)": "--train.updates=1",  # of two prompts on eight processes
    "compare methods": "--evaluations 100",
    "sample (starter|hub:|runs/(sdxl|flux))(?!.*text)": "--steps 2",
    "compare grid": "--count 2",
    "eval runs/starter --on": "--on-steps 2",
    "eval runs/(starter|fast) (?!--on)": "--steps 2 --suite scenes.jsonl",
    "eval starter --suite geneval": "--steps 2 --suite scenes.jsonl --rewards sharpness",  # its detector is downloaded
    "eval runs/starter_text": "--samples 2 --suite sums.jsonl",
    "prompts mix .*--measure": "--samples 1 --low 0 --high 1",
    "report .*--live|compare vote|reward serve": "--port 0",
    "compare vote starter": "--count 2",
    "reward train": "--epochs 1 --size 16 --batch 4 --held-out 0.5",
    "reward label starter_text": "--prompts sums.jsonl"}
# What a command promises: a file, or behind > what it says.
PROMISED = {
    "train ": "runs/{name}/summary.json", "reward train": "{output}/*.safetensors",
    "sample runs/enhancer1": "rewritten/prompts.jsonl", "sample starter_text": "> \\d",
    "sample": "samples/*.png", "compare grid .*--columns rlg": "runs/fast/grid-rlg.html",
    "compare grid hub:": "grid.png",
    "compare grid": "runs/starter/grid.png", "eval .*--rlg": "{output}/rlg.png", "eval": "{output}/table.md",
    "prompts mix": "{output}", "prompts write": "{output}", "reward label": "pairs.jsonl",
    "compare vote": "> share for", "demo": "runs/starter/summary.json",
    "reproduce": "> GPU-hours", "report .*--live": "> Ctrl-C ends it", "report runs/fast": "runs/fast-lr.html",
    "report": "runs/starter/report.html", "export .*card": "runs/starter/README.md",
    "export .*--epoch": "runs/starter/**/*-epoch-*.safetensors", "export .*kohya": "{first}/kohya.safetensors",
    "export": "{first}/comfyui/*.safetensors",
    "push .*--dry-run": "> nothing was uploaded",
    "push": "> /me/starter/commit/", "list runs": "> starter .* finished", "list methods": "> mix_grpo",
    "list rewards": "> what it does", "list parts": "> parts\\.",
    "list prompts prompts.txt": "> a red star left of a ring", "list prompts": "> position",
    "new": "{last}.py", "reward score sharpness": "> before_after.png", "reward score": "> 1\\.0000",
    "reward serve": "> Stopping", "check .*--json": '> "measured": false',
    "check .*--gpu": "> fits: .* \\(computed[,)]", "check": "> supported"}
# Lines that do not run to their end without a network, or within seconds: the reason, and the error in which they end.
LOADS = "weights of the hub"
CANNOT = {
    "reward serve pickscore|reward label samples_a": (LOADS, "PickScore_v1 cannot be loaded"),
    "train sd15_short|train .*--reward=pickscore": (LOADS, "yuvalkirstain/PickScore_v1, laion/CLIP-ViT-H-14"),
    "train (configs/)?(sdxl_24gb|wan22)": (LOADS, "trl-lib/ddpo-aesthetic-predictor: missing, and the hub does not"),
    "prepare sdxl_24gb": (LOADS, "the hub does not answer: where there is a network, `hf download stabilityai/"),
    "prompts encode configs/wan22.yaml": (LOADS, "cannot load the model 'Wan-AI/Wan2.2-T2V-A14B-Diffusers'"),
    "reward score http": ("a service that listens", "http://127.0.0.1:8000/score gave no answer"),
    "verify http": ("a service that listens", "fault: no answer: http://127.0.0.1:30000"),
    "eval runs/starter --on": ("a run that has learned; tests/contrib/test_sibling.py has one", "has no gain to keep"),
    "compare methods": ("minutes; its methods are planned, and tests/bench runs one",
                        "takes 1,068: expected at least as many")}
LAUNCHED = re.compile(r"(?:\w+=\S+ )*(accelerate launch|torchrun) ")  # on several GPUs


@pytest.fixture(scope="module")
def typed(tmp_path_factory) -> Iterator[Typed]:
    """A folder for the lines, beside a stand-in hub, an endpoint, and estimates of few blocks."""
    place = tmp_path_factory.mktemp("typed")
    two_prompts = itertools.repeat("a red hat\ntwo owls")
    with (stand_in_hub.served() as hub, chat_endpoint.served(two_prompts) as url,
          pytest.MonkeyPatch.context() as patch):
        stand_in_hub.reach(hub, patch, place / "cache")
        patch.setenv("HF_TOKEN", "hf_x")
        patch.setenv("BRAND_KEY", "key")
        for name, model in published.MODELS.items():
            patch.setitem(published.MODELS, name, shallow(model))
        yield Typed(place, FILES, STAND_INS, OPTIONS | {"prompts write": f"--url {url} --model m --count 2"})


def cannot(line: str) -> tuple[str, str] | None:
    """The entry of a line that does not run here."""
    return next((entry for pattern, entry in CANNOT.items() if re.match(pattern, " ".join(words(line)))), None)


SHOWN = list(dict.fromkeys(line.partition(" #")[0].rstrip() for line in command_lines()))
LAUNCHES = [line for line in SHOWN if LAUNCHED.match(line)]
LEFT = [line for line in SHOWN if line not in LAUNCHES and cannot(line)]


def promised(arguments: list[str]) -> str:
    """What the first entry for a command says, with its names."""
    typed = " ".join(arguments)
    entry = next((entry for pattern, entry in PROMISED.items() if re.match(pattern, typed)), None)
    assert entry is not None, f"{typed}: no entry in PROMISED says what it writes"
    if entry.startswith("> "):
        return entry
    return entry.format(output=value(arguments, "--output"), first=arguments[1], last=arguments[-1],
                        name=value(arguments, "--name") or Path(arguments[1]).stem)


# `taste` waits for clicks on its page; tests/cli/test_commands.py clicks.
RUN_LINES = [line for line in SHOWN if line not in LAUNCHES + LEFT and "flowgrpo taste" not in line]
# The fast tier runs one line of every command, the shortest.
FIRST = {leaf(words(line))[0]: line for line in sorted(RUN_LINES, key=len, reverse=True)}


@pytest.mark.parametrize("line", [pytest.param(line, marks=[pytest.mark.fast] if line in FIRST.values() else [])
                                  for line in RUN_LINES])
def test_a_shown_command_runs(line, typed):
    expected, made = promised(typed.arguments(line)), typed.run(line)
    fine = (130,) if "--live" in line else (0, UNTRAINED) if re.search(r" (train|demo)\b", line) else (0,)
    assert made.code in fine, made.err
    if expected.startswith("> "):
        assert re.search(expected[2:], made.out), made.out
    else:
        assert [file for file in made.folder.glob(expected) if file.stat().st_size], f"{expected} is missing"
    if set(words(line)) & VISITED.keys():
        assert made.status == 200


@pytest.mark.parametrize("line", LEFT)
def test_a_command_that_cannot_run_here_ends_in_one_line(line, typed, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    arguments, made = typed.arguments(line), typed.run(line)
    said = made.out if "--json" in arguments else made.err.splitlines()[-1]
    assert made.code == 2 and cannot(line)[1] in said
    assert "--json" in arguments or said.startswith("flowgrpo: error: ")
    if (command := leaf(arguments))[0] in ("train", "prompts encode"):
        recipe, options = recipe_and_options([word for word in command[1] if word != "--resume"])
        assert load(where(recipe), options).name == options.get("name", Path(recipe).stem)


@pytest.mark.parametrize("line", LAUNCHES)
def test_a_launch_line_names_a_recipe_that_loads(line, typed):
    launcher, program = (shlex.split(part) for part in re.split(r"(?<=-m )(?=flowgrpo )", line))
    at = next(i for i, word in enumerate(launcher) if word in ("accelerate", "torchrun"))
    launcher = ["1" if word == "K" else word for word in launcher[at:]]
    if launcher[0] == "accelerate":
        parsed = launch_command_parser().parse_args([*launcher[2:], *program])
    else:
        parsed = get_args_parser().parse_args([*launcher[1:], *program])
    assert parsed.module and parsed.training_script == "flowgrpo"
    name, *arguments = typed.arguments(line)
    recipe, options = recipe_and_options(arguments)
    assert name == "train" and load(where(recipe), options).name == options.get("name", Path(recipe).stem)


def test_entries_are_of_lines_that_are_shown():
    shown = [" ".join(words(line)) for line in SHOWN]
    assert [pattern for pattern in CANNOT if not any(re.match(pattern, line) for line in shown)] == []
