"""Every packaged recipe on a CPU: full width, few blocks, seeded random weights, and few samples.

    python scripts/docs/train_recipes.py sd15_24gb sana_24gb     # builds, checks, trains, samples, exports and compares
    python scripts/docs/train_recipes.py --language FOLDER        # language recipes on the model of a folder
    python scripts/docs/train_recipes.py sdxl_24gb --whole        # of the published depth and vocabulary too
    python scripts/docs/train_recipes.py --table                  # of what has run so far

The same command goes on where it stopped; it ends after `--seconds`, also within a step, which then begins anew. A step
is what a user's command runs, in a process of its own that has the libraries loaded. Classes, widths and autoencoders
are published ones (flowgrpo/published.py), tokenizers stand-ins, and an encoder's vocabulary is theirs. What a
CPU forces is changed and listed; nothing else is. `--json FILE` writes the table's rows, each with its commit;
`scripts/docs/recipe_table.py --none` names those of docs/data/recipe_round.json in docs/recipes.md.
"""

import argparse
import dataclasses
import inspect
import json
import os
import re
import sys
import textwrap
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from revisions import commit

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
STEPS = ("build", "check", "train", "sample", "grid", "export", "stock")
PROMPT = "a red fox in the snow"
SIDE, FRAMES, VOCABULARY, TOKENS = 64, 5, 512, 32  # pixels, frames, words of an encoder, tokens of a prompt
# Depths by the name of their key. An encoder whose layers the pipeline reads keeps those, with a narrow feed-forward.
DENOISER = {"num_layers": 2, "num_single_layers": 1, "n_layers": 2, "num_refiner_layers": 1, "n_refiner_layers": 1,
            "layers_per_block": 1}
ENCODER = {"num_hidden_layers": 2, "num_layers": 1, "depth": 1}
READ = {"Flux2KleinPipeline": 28, "Flux2Pipeline": 30, "Flux3ModularPipeline": 32, "Krea2Pipeline": 35,
        "HunyuanVideoPipeline": 4, "HunyuanSkyreelsImageToVideoPipeline": 4, "HunyuanVideo15Pipeline": 4,
        "LTX2Pipeline": 48}
NARROW = {"intermediate_size": 256, "num_attention_heads": 2, "num_key_value_heads": 1}
DEEP = 8  # layers, from which an encoder is narrow
WIDE = 2500  # width of a denoiser, from which it has one block
FORCED: dict[str, Any] = {
    "device": "cpu", "tracker": "none", "reward": "sharpness", "eval.rewards": [], "eval.every": 0, "eval.steps": 2,
    "eval.prompts": 1, "eval.grid": 1, "train.epochs": 1, "train.prompts": 1, "train.group": 2, "train.updates": 1,
    "train.micro_batch": 2, "train.steps": 4, "train.compile": False}
LANGUAGE: dict[str, Any] = {
    "device": "cpu", "tracker": "none", "eval.every": 2, "eval.prompts": 2, "eval.grid": 2, "train.epochs": 2,
    "train.prompts": 2, "train.group": 4, "train.updates": 1, "train.micro_batch": 4, "text.max_tokens": 16,
    "train.compile": False}

# Areas to which a pipeline brings a reference image, constants of its module.
AREAS = {"QwenImageEditPlusPipeline": {"CONDITION_IMAGE_SIZE": SIDE * SIDE, "VAE_IMAGE_SIZE": SIDE * SIDE}}

ROUND = ROOT / "docs" / "data" / "recipe_round.json"
SAME = ("0 of 255", "the same text")
SECTION = """`scripts/docs/train_recipes.py` took {count} recipes through `check`, `train`, `sample`, `compare grid`,
`export` and the lines of the model card, with published classes and widths, one or two blocks, random weights and small
images. This says nothing about quality, speed or a GPU. {failed}Images by the card equal those of `flowgrpo sample` in
every pixel{others}. `docs/data/recipe_round.json` has peaks, commits and changed keys."""


def recipes() -> list[str]:
    """Return the names of the recipes of published models and of language models."""
    return [file.stem for file in sorted((ROOT / "configs").glob("*.yaml")) if not file.stem.startswith("starter")]


def model_of(name: str) -> Any:
    """Return the published configuration of a recipe's model; None for a language model."""
    from flowgrpo import published
    from flowgrpo.config import load

    return published.MODELS.get(load(ROOT / "configs" / f"{name}.yaml").model)


def forced(name: str, folder: Path) -> dict[str, Any]:
    """Return the keys of a recipe that a CPU and few minutes change. folder: of what is written."""
    from flowgrpo.config import load

    config = load(ROOT / "configs" / f"{name}.yaml")
    known = model_of(name)
    if known is None:
        return LANGUAGE | ({} if config.prompts == "arithmetic" else {"prompts": "arithmetic"})
    pixels = 2 * SIDE if known.pipeline == "LTX2Pipeline" else SIDE  # its autoencoder reflects two latents or more
    keys = FORCED | {f"image.{side}": pixels for side in ("height", "width")} | call_keys(config, known)
    if config.image.frames:
        keys["reward"] = {"sharpness": {"use": "frames", "args": {"reward": "sharpness"}}}
    if config.image.frames and config.image.frames > 1:
        keys["image.frames"] = FRAMES + 4 * (known.pipeline == "LTX2Pipeline")
    if "preview" in config.parts:
        keys |= {"parts.preview.pool": 4, "parts.preview.steps": 2}
    if config.parts.get("plan", {}).get("size", 0) > FORCED["train.steps"] // 2:  # flow_grpo_fast's window is there
        keys["parts.plan.size"] = FORCED["train.steps"] // 2
    keys |= {f"guard.{name}": None for name in config.guard.model_fields_set}  # of evaluations within a run
    if "n" in config.parts.get("selection", {}):
        keys["parts.selection.n"] = FORCED["train.group"]
    if config.image.sizes:
        keys["image.sizes"] = []
    if config.prompts == "pickapic":
        keys["prompts"] = "general"
    if config.prompts.endswith(".jsonl"):
        keys |= {"prompts": str(folder / "prompts.jsonl"), "held_out": 0.5}
    if config.memory.encoders == "ahead":
        keys |= {"cache": str(folder / "encoded"), "prompts": str(folder / "prompts.txt"), "held_out": 0.5}
    if config.memory.weights == "nf4":
        keys["memory.weights"] = "full"
    if config.memory.shard:
        keys["memory.shard"] = False
    if config.memory.context_parallel > 1:
        keys["memory.context_parallel"] = 1
    if config.train.optimizer == "adamw8bit":
        keys["train.optimizer"] = "adamw"
    return keys


def call_keys(config: Any, known: Any) -> dict[str, Any]:
    """Return what shortens a pipeline's call: tokens of a prompt, pixels of an image and of a reference image."""
    from flowgrpo.policies.pipelines import modular

    accepted = inspect.signature(inspect.unwrap(modular.class_of(known.pipeline).__call__)).parameters
    tokens = 128 if known.pipeline == "LTX2Pipeline" else TOKENS  # whose connectors have as many registers
    keys: dict[str, Any] = {"image.call.max_sequence_length": tokens} if "max_sequence_length" in accepted else {}
    if "use_resolution_binning" in accepted:  # Sana would draw 64 pixels as 512
        keys["image.call.use_resolution_binning"] = False
    if "max_area" in accepted:
        keys |= {"image.call.max_area": SIDE * SIDE, "image.call._auto_resize": False}
    return keys | ({"image.call.sigmas": None} if "sigmas" in config.image.call else {})  # of more steps


# --- the model -------------------------------------------------------------------------------------------------------

def shallow(kind: Any, config: dict[str, Any], depths: dict[str, Any]) -> dict[str, Any]:
    """Return a configuration with the depths that its class takes, its sub-configurations included."""
    taken = inspect.signature(kind.__init__).parameters
    known = {key: depth for key, depth in depths.items() if key in taken or key in config}
    changed = {key: shallow(kind, value, ENCODER if key == "vision_config" else depths)
               if key.endswith("_config") else value for key, value in config.items()}
    if "transformer_layers_per_block" in config:
        known["transformer_layers_per_block"] = [1] * len(config["transformer_layers_per_block"])
    if "vocab_size" in config:
        known["vocab_size"] = min(config["vocab_size"], VOCABULARY)
    return changed | known


def depths_of(kind: Any, config: dict[str, Any]) -> dict[str, Any]:
    """Return the depths of a denoiser: one block where they are wide, two otherwise."""
    defaults = {name: value.default for name, value in inspect.signature(kind.__init__).parameters.items()} | config
    heads, size = (defaults.get(name) for name in ("num_attention_heads", "attention_head_dim"))
    width = heads * size if isinstance(heads, int) and isinstance(size, int) else defaults.get("dim", 0)
    return DENOISER | ({"num_layers": 1} if width > WIDE else {})


def encoder_of(pipeline: str) -> dict[str, Any]:
    """Return the depths of a pipeline's encoders, and their widths where it reads many of their layers."""
    layers = READ.get(pipeline, ENCODER["num_hidden_layers"])
    return ENCODER | {"num_hidden_layers": layers} | (NARROW if layers > DEEP else {})


def build(name: str, folder: Path, language: Path | None, whole: bool = False) -> None:
    """Write a recipe's model into `folder / "model"`: every part of its class and width, random weights of seed 0 in
    bf16. A language model is that of the folder `language`, or a tiny one. whole: in its depth and vocabulary too."""
    import torch

    known = model_of(name)
    if known is None:
        (folder / "model").symlink_to((language or tiny_language(folder / "tiny")).resolve())
        print("a tiny language model" if language is None else language.name)
        return
    import diffusers
    import transformers

    from flowgrpo.tools.dry_run import from_configs

    def fewer(kind: Any, config: dict[str, Any], depths: dict[str, Any]) -> dict[str, Any]:
        return config if whole else shallow(kind, config, depths)

    def make(part: str, kind: str, config: dict[str, Any]) -> Any:
        if hasattr(diffusers, kind):
            cls = getattr(diffusers, kind)
            denoiser = part in ("unet", "transformer", "transformer_2")
            made = cls(**fewer(cls, config, depths_of(cls, config) if denoiser else {}))
            for parameter in made.parameters() if denoiser else ():
                if parameter.ndim == 2 and not parameter.any():  # ERNIE-Image's last one, which lets no gradient by
                    torch.nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5)
            return made
        if hasattr(transformers, kind):
            cls = getattr(transformers, kind)
            return cls(cls.config_class(**fewer(cls.config_class, config, encoder_of(known.pipeline))))
        module, _, name = kind.rpartition(".")
        cls = getattr(__import__(f"diffusers.{module}", fromlist=[name]), name)
        return cls(**config)

    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        pipe = from_configs.assemble(known, make)
    finally:
        torch.set_default_dtype(before)
    # The index of a ModularPipeline then names the folder's own parts.
    index = {"overwrite_modular_index": True} if isinstance(pipe, diffusers.ModularPipeline) else {}
    pipe.save_pretrained(str(folder / "model"), **index)
    write_prompts(folder)
    modules = [part for part in pipe.components.values() if isinstance(part, torch.nn.Module)]
    print(f"{'whole, ' * whole}{sum(p.numel() for part in modules for p in part.parameters()) / 1e6:.0f} M parameters")


def write_prompts(folder: Path) -> None:
    """Write two prompts with an image each, for the recipes that read a user's own, and two without."""
    from PIL import Image

    lines = []
    for number, colour in enumerate(("red", "green")):
        Image.new("RGB", (SIDE, SIDE), colour).save(folder / f"{colour}.png")
        metadata = {"tag": "single_object", "include": [{"class": "dog", "count": 1}]}
        lines.append(json.dumps({"prompt": f"make it {number}", "image": f"{colour}.png", "metadata": metadata}))
    (folder / "prompts.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    (folder / "prompts.txt").write_text("a red fox\na green hill\n", encoding="utf-8")


def tiny_language(folder: Path) -> Path:
    """Write a language model of two layers with random weights of seed 0, and the text starter's tokenizer."""
    import torch
    from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

    from flowgrpo.starter import FOLDERS

    torch.manual_seed(0)
    tokens = AutoTokenizer.from_pretrained(FOLDERS["starter_text"])
    Qwen3ForCausalLM(Qwen3Config(
        vocab_size=len(tokens), hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=32, max_position_embeddings=2048, tie_word_embeddings=True,
        pad_token_id=tokens.pad_token_id, bos_token_id=tokens.bos_token_id, eos_token_id=tokens.eos_token_id,
    )).save_pretrained(folder)
    tokens.save_pretrained(folder)
    return folder


# --- the stock pipeline ----------------------------------------------------------------------------------------------

def stock(name: str, folder: Path) -> None:
    """Run the lines that the run's model card has for stock libraries, with the seed of what `sample` drew, and print
    the largest difference of the image or of all frames; of a language model, whether the greedy texts are equal."""
    import numpy as np
    from PIL import Image, ImageSequence

    from flowgrpo.config import load
    from flowgrpo.export.usage import snippet
    from flowgrpo.tools.vote.sources import facts

    run = folder / "runs" / "run"
    brought = [("image", "../../red.png")] if model_of(name) is not None and reads_images(name) else []
    lines = snippet(load(run / "config.yaml"), run, str(run), PROMPT, brought)
    if model_of(name) is None:
        names: dict[str, Any] = {}
        exec(lines, names)  # of this repository: our own model card
        ids = names["output"][0, names["inputs"]["input_ids"].shape[1]:]
        text = names["tokenizer"].decode(ids, skip_special_tokens=True)
        print("the same text" if text.strip() in (folder / "sample.log").read_text() else f"another text: {text!r}")
        return
    [saved] = [file for file in (folder / "samples").iterdir() if file.suffix in (".png", ".webp")]  # both lossless
    with Image.open(saved) as image:
        seed = int(re.search(r"Seed: (\d+)", facts(image))[1])  # type: ignore[index]
        ours = np.stack([np.asarray(frame.convert("RGB")) for frame in ImageSequence.Iterator(image)]).astype(int)
    names = {}
    os.chdir(folder)
    seeded = lines.replace("= pipe(", f"= pipe(generator=torch.Generator().manual_seed({seed}), ")
    exec("\n".join(line for line in seeded.splitlines() if "export_to_video(" not in line), names)
    theirs = bytes_of(names["frames"] if "frames" in names else [names["image"]])
    apart = np.abs(theirs - ours)
    print(f"largest difference {apart.max()} of 255, mean {apart.mean():.3g}; standard deviation {theirs.std():.3g}")


def bytes_of(frames: Any) -> Any:
    """Return images [F, H, W, 3] of a pipeline, PIL images or values in [0, 1], as integers up to 255. An opacity is
    composed on white, as `sample` does."""
    import numpy as np

    found = np.stack([np.asarray(frame) for frame in frames])
    found = 255.0 * found if found.dtype != np.uint8 else found.astype(float)
    if found.shape[-1] == 4:
        opacity = found[..., 3:] / 255
        found = found[..., :3] * opacity + 255 * (1 - opacity)
    return found.round().astype(int)


# --- steps -----------------------------------------------------------------------------------------------------------

@dataclasses.dataclass
class Step:
    """One step that has run: exit code, seconds of a clock and of the processor, the peak of its resident memory in
    GiB, and the last line that it said."""

    code: int
    seconds: float
    processor: float
    peak: float
    said: str
    estimate: float | None = None  # GiB by `check`
    commit: str = ""


def commands(name: str, folder: Path) -> dict[str, list[str]]:
    """Return the arguments of `flowgrpo` in the steps that have a command."""
    model, run, recipe = str(folder / "model"), str(folder / "runs" / "run"), str(ROOT / "configs" / f"{name}.yaml")
    keys = [f"--{key}={json.dumps(value) if not isinstance(value, str) else value}"
            for key, value in forced(name, folder).items()]
    image = [f"--image={folder / 'red.png'}"] if reads_images(name) else []
    known = model_of(name)
    drawn = ["--steps=2"] if known else []
    return {"check": ["check", model, f"--recipe={recipe}", "--device=cpu", "--json",
                      *(key for key in keys if not key.startswith("--device"))],
            "train": ["train", recipe, f"--model={model}", *keys, f"--output={folder / 'runs'}", "--name=run"],
            "sample": ["sample", run, f"--prompt={PROMPT}", *drawn, *image, *(
                [f"--output={folder / 'samples'}"] if known else [])],
            "grid": ["compare", "grid", run, "--count=1", f"--output={folder / ('grid.png' if known else 'grid.md')}"],
            "export": ["export", run, *exported(name, folder)]}


def exported(name: str, folder: Path) -> list[str]:
    """Return the arguments of `export`: the LoRA for ComfyUI, or the merged model where ComfyUI has no names for it."""
    from flowgrpo.export import comfy_names

    known = model_of(name)
    kinds = {kind for kind, _ in known.parts.values()} if known else set()
    if known and not kinds & comfy_names.FAMILIES.keys():
        return ["--form=merged", f"--output={folder / 'merged'}"]
    return [f"--output={folder / ('lora.safetensors' if known else 'merged')}"]


def reads_images(name: str) -> bool:
    """True for a recipe whose prompts have an image each."""
    from flowgrpo.config import load

    return load(ROOT / "configs" / f"{name}.yaml").prompts.endswith("prompts.jsonl")


def work_of(step: str, name: str, folder: Path, language: Path | None, whole: bool) -> Callable[[], int | None]:
    """Return what a step runs."""
    if step == "build":
        return lambda: build(name, folder, language, whole)
    if step == "stock":
        return lambda: stock(name, folder)
    from flowgrpo.cli import main

    arguments = commands(name, folder)[step]
    return lambda: main(arguments)


def ran(work: Callable[[], int | None], log: Path, limit: float) -> Step | None:
    """Run a step in a process of its own with its output in a file; None if it took longer than `limit` seconds and was
    stopped."""
    began = time.monotonic()
    if not (child := os.fork()):
        file = log.open("w", buffering=1)
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
        sys.stdout = sys.stderr = file
        code = 1
        try:
            code = work() or 0
        except SystemExit as leaving:
            code = leaving.code if isinstance(leaving.code, int) else 1
        except BaseException:
            traceback.print_exc()
        file.flush()
        os._exit(code)
    while True:
        done, status, used = os.wait4(child, os.WNOHANG)
        if done:
            break
        if time.monotonic() - began > limit:
            os.kill(child, 9)
            os.wait4(child, 0)
            return None
        time.sleep(0.1)
    said = log.read_text(errors="replace").replace("\r", "\n").strip().splitlines() or [""]
    return Step(os.waitstatus_to_exitcode(status), round(time.monotonic() - began, 1),
                round(used.ru_utime + used.ru_stime, 1), round(used.ru_maxrss / 2**20, 2), said[-1][:300])


def estimated(log: Path) -> tuple[float | None, str]:
    """Return the peak in GiB of a report of `check`, and whether the model is supported."""
    text = log.read_text()
    report = json.loads(text[text.index("{\n"):text.rindex("}") + 1])
    phases = report.get("memory") or {}
    return max(phases.values(), default=None), report.get("reason") or f"first ratio {report.get('first_log_ratio')}"


def take(name: str, folder: Path, until: float, language: Path | None, whole: bool) -> bool:
    """Take a recipe through the steps that are left. Return False if the time was over."""
    from flowgrpo.cli.train import UNTRAINED

    folder.mkdir(parents=True, exist_ok=True)
    done = read(folder)
    for step in STEPS:
        if step in done and done[step].code == 0 and (step != "build" or (folder / "model").exists()):
            continue
        left = until - time.monotonic()
        found = ran(work_of(step, name, folder, language, whole), folder / f"{step}.log", left) if left > 5 else None
        if found is None:
            return False
        if step == "train" and found.code == UNTRAINED:  # as random weights may
            found.code = 0
        if step == "check" and found.code == 0:
            found.estimate, found.said = estimated(folder / "check.log")
        found.commit = commit()
        done[step] = found
        content = {key: dataclasses.asdict(value) for key, value in done.items()}
        (folder / "steps.json").write_text(json.dumps(content, indent=2))
        print(f"{name}: {step}: {found.seconds:.0f} s, {found.processor:.0f} s of the processor, {found.peak} GiB, "
              f"exit code {found.code}: {found.said}", flush=True)
        if found.code and step != "check":
            break
    return True


def load_libraries(names: list[str]) -> None:
    """Import what the steps need, so that their processes begin with it, and reduce reference images."""
    import diffusers
    import matplotlib.pyplot  # noqa: F401
    import peft  # noqa: F401
    import torch
    import transformers
    from diffusers import StableDiffusionPipeline  # noqa: F401
    from transformers import AutoModelForCausalLM, Qwen3ForCausalLM  # noqa: F401

    import flowgrpo.cli
    import flowgrpo.export.export
    import flowgrpo.text.evaluation
    import flowgrpo.tools.check.language
    import flowgrpo.tools.check.report
    import flowgrpo.train  # noqa: F401

    torch.set_num_threads(1)
    for known in filter(None, map(model_of, names)):
        module = sys.modules[getattr(diffusers, known.pipeline).__module__]
        for constant, area in AREAS.get(known.pipeline, {}).items():
            setattr(module, constant, area)
        for kind, _ in known.parts.values():
            getattr(diffusers, kind, None) or getattr(transformers, kind, None)


def read(folder: Path) -> dict[str, Step]:
    """Return the steps that have run, from the folder of a recipe."""
    file = folder / "steps.json"
    return {key: Step(**value) for key, value in json.loads(file.read_text()).items()} if file.is_file() else {}


# --- the table -------------------------------------------------------------------------------------------------------

def rows(names: list[str], root: Path) -> list[dict[str, Any]]:
    """Return a row per recipe that has run: what ran, seconds, peak of the training against the estimate, what stock
    libraries drew, and what a CPU forced, with paths relative to the recipe's folder."""
    found = []
    for name in names:
        if not (done := read(root / name)):
            continue
        bad = next((f"{step}: {done[step].said}" for step in STEPS if step in done and done[step].code), None)
        check, train, drawn = (done.get(step) for step in ("check", "train", "stock"))
        found.append({
            "recipe": name, "commit": done[list(done)[-1]].commit,
            "ran": [step for step in STEPS if step in done and not done[step].code], "failed": bad,
            "size": done["build"].said if "build" in done else None,
            "seconds": round(sum(step.seconds for step in done.values())),
            "processor": round(sum(step.processor for step in done.values())),
            "peak": train.peak if train and not train.code else None,
            "estimate": check.estimate if check else None,
            "stock": drawn.said if drawn and not drawn.code else None,
            "forced": forced(name, Path()) | AREAS.get(getattr(model_of(name), "pipeline", ""), {})})
    return found


def table(found: list[dict[str, Any]]) -> str:
    """Return the rows as Markdown."""
    lines = ["| recipe | size | ran | seconds of one core | training, GiB | estimate, GiB | stock libraries |",
             "|---|---|---|---:|---:|---:|---|"]
    for row in found:
        bad = f"; failed: {row['failed']}" if row["failed"] else ""
        cells = [f"`{row['recipe']}`", row["size"], ", ".join(row["ran"]) + bad, row["processor"], row["peak"],
                 row["estimate"], row["stock"]]
        lines.append("| " + " | ".join("-" if cell is None else str(cell).replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines)


def joined(file: Path, found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows of a file, by name, with those that have run since in their places; whole models have their own.
    """
    kept = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else []
    by_name = {(row["recipe"], is_whole(row)): row for row in [*kept, *found]}
    return [by_name[key] for key in sorted(by_name)]


def is_whole(row: dict[str, Any]) -> bool:
    """True for the row of a model at its full depth."""
    return (row["size"] or "").startswith("whole")


def section() -> str:
    """Return the section of docs/recipes.md, of docs/data/recipe_round.json."""
    found = json.loads(ROUND.read_text(encoding="utf-8"))
    cards = {row["recipe"]: (row["stock"] or "nothing").partition(",")[0].removeprefix("largest difference ")
             for row in found if not row["failed"]}
    others = ", ".join(f"`{name}` {card.removesuffix(' of 255')}" for name, card in cards.items() if card not in SAME)
    failed = ", ".join(f"`{row['recipe']}` ({row['failed'].partition(':')[0]})" for row in found if row["failed"])
    text = SECTION.format(count=len({row["recipe"] for row in found}), failed=failed and f"Failed: {failed}. ",
                          others=others and f", except for differences of 255: {others}. Of int8 weights the card "
                                            "loads exact ones")
    return "\n## Runs on a CPU\n\n" + textwrap.fill(text, 120, break_on_hyphens=False) + "\n"


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="recipes; without: all")
    parser.add_argument("--folder", type=Path, help="without: recipes, or recipes_whole")
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--whole", action="store_true", help="models of their published depth and vocabulary")
    parser.add_argument("--language", type=Path, help="folder of a language model; without: a tiny one")
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--json", type=Path, help="file that gets the table's rows, beside those of other recipes")
    given = parser.parse_args()
    folder, names = given.folder or Path("recipes_whole" if given.whole else "recipes"), given.names or recipes()
    folder = folder.resolve()
    until = time.monotonic() + given.seconds
    left = [name for name in names if not set(STEPS) <= {step for step, one in read(folder / name).items()
                                                         if not one.code}]
    if not given.table:
        load_libraries(left)
    for name in () if given.table else left:
        if not take(name, folder / name, until, given.language, given.whole):
            print(f"{name}: the time is over; the same command goes on", flush=True)
            break
    found = rows(names, folder)
    if given.json:
        found = joined(given.json, found)
        given.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print(table(found))


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("DIFFUSERS_VERBOSITY", "error")
    main()
