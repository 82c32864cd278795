"""Writes docs/pipelines.md: what `flowgrpo check` and an epoch of training say of a tiny random instance of every
pipeline class known here, and why another class of the installed diffusers is not driven.

`--only CLASS ... --save FILE` runs a part and appends its rows to a file of JSON lines, `--merge FILE ...` puts them
into the page in the place of the classes' rows there.
`--new`: only lists the classes of the installed diffusers that the page does not name, and tries those that can be
built of the parts of another tiny pipeline, for `--minutes`. `--known FILE`: the names of a file in place of the
page's, such as what `--names` prints under an older diffusers. Nothing is downloaded.
"""

import argparse
import contextlib
import inspect
import io
import json
import os
import re
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

TARGET = Path(__file__).parents[2] / "docs" / "pipelines.md"
INTRODUCTION = """# Pipelines

You can align any class of the first table without adapter code. It states what `flowgrpo check NAME` says of a tiny
random instance, with real diffusers code and no weights: rollout and replay agree before any update, with a replay
error and a log-ratio of at most 1e-6 in fp32. Then an epoch trains.

With two calls, or a batch of twice the rows, guidance costs twice a plain step. A dagger marks classes without
`load_lora_weights`: the model card of a run loads their LoRA by peft.

ModularPipelines are driven as the others, from a folder or repository with a `modular_model_index.json`; blocks with
code of their own need `--trust`. Momentum of a guider (APG) is off in rollouts and replays.

"""
HAND_WRITTEN = "## Loading a model"  # heading of the part below the table, which is kept
DAGGER, DOUBLE = "\u2020", "\u2021"
KEPT = ("model", "supported", "reason", "epoch", "modality", "prediction", "guidance", "lora_loader", "replay_error",
        "first_log_ratio")
NO_PICTURES = ("makes sound alone", "enlarges", "reads no prompt", "makes no images", "is a part of a model",
               "runs outside", "is no model's class")  # beginnings of reasons of what no count includes
UNTRIED = "not tried: there is no tiny instance of it"
# Why a class has no tiny instance, by the beginnings of its name; the longest beginning counts.
REASONS = {
    "makes sound alone, which no reward here hears":
        "AceStep AudioLDM2 LongCatAudioDiT StableAudio StableAudio3 MiniMaxMusic3",
    "enlarges, refines or decodes what another pipeline has made":
        "HunyuanImageRefiner IFImg2ImgSuper IFInpaintingSuper IFSuper Kandinsky6SR LDMSuper LTX2DFRTemporalRefine "
        "LTX2LatentUpsample LTX2VideoDiffusionDecode LTXLatentUpsample StableDiffusionLatentUpscale "
        "StableDiffusionUpscale",
    "reads no prompt": "ConsistencyModel DDIM DDPM DiT Marigold StableDiffusionImageVariation StableVideoDiffusion",
    "makes no images: text, proteins or shapes": "DiffusionGemma LLaDA2 RFD4Proteina ShapE",
    "is a part of a model, which another pipeline completes":
        "FluxPriorRedux Kandinsky KandinskyV22 StableCascade StableUnCLIP",
    "runs outside of torch": "Onnx StableDiffusionOnnx",
    "is no model's class": "DiffusionPipeline",
    "has no scheduler: its loop steps by itself": "EchoModular",
    "makes a list of layers of a prompt, and no image": "QwenImageLayered",
    "its noise levels are EDM's, up to 80, and no kernel here steps in these":
        "CosmosTextToWorld CosmosVideoToWorld Cosmos2TextToImage Cosmos2VideoToWorld",
    "its ControlNet shares layers with its denoiser, so that a LoRA has two names": "ZImageControlNet",
    "has no encode_prompt: its conditioning cannot be cached": "Cosmos3OmniPipeline VisualCloze",
    "a language model draws tokens for its denoiser first": "GlmImage",
    "its encode_prompt gives a list of layers, each with the rows of all prompts": "BriaFibo",
    "draws a clip in windows or at several sizes, one loop after another": "LTXI2VLongMultiPrompt HeliosPyramid",
    "gives frames in linear light, with the channels last": "LTX2HDR",
    "steps in angles (TrigFlow), which no kernel here has": "SanaSprint",
    UNTRIED: "BriaFibo2 Kandinsky3 Kandinsky5 Kandinsky6TI2VA StableDiffusionDepth StableDiffusionX",
}


def live() -> list[str]:
    """Return the names of the pipeline classes of the installed diffusers that are not deprecated."""
    import diffusers

    found = []
    for name in dir(diffusers):
        cls = getattr(diffusers, name) if name.endswith("Pipeline") else None
        old = getattr(cls, "_last_supported_version", None) or "deprecated" in getattr(cls, "__module__", "deprecated")
        placeholder = "dummy" in getattr(cls, "__module__", "dummy")
        if cls is not None and name not in ("ModularPipeline",) and not old and not placeholder:
            found.append(name)
    return found


def reason(name: str) -> str:
    """Return why a class has no tiny instance."""
    known = {begin: why for why, names in REASONS.items() for begin in names.split() if name.startswith(begin)}
    return known[max(known, key=len)] if known else UNTRIED


def rows(epochs: bool, only: Sequence[str] = (), save: str | None = None) -> list[dict[str, Any]]:
    """Return the report of every class with a tiny instance, or of `only` these, with `epoch`: None, why it does not
    train, or "" if it was not run. save: file of JSON lines to which they are appended as they come."""
    from flowgrpo.tools.check import tiny
    from flowgrpo.tools.check.report import report

    found = []
    for name in only or sorted(tiny.factories(), key=str.lower):
        told = report(name)
        if told["supported"]:
            told["epoch"] = epoch(*tiny.make(name)) if epochs else ""
            told["modality"] = "video" if len(told["sample_shape"]) == 4 else "image"
        print(name, told["supported"], told.get("epoch") or told["reason"], flush=True)
        found.append(told)
        if save:
            with open(save, "a", encoding="utf-8") as file:
                file.write(json.dumps({key: told.get(key) for key in KEPT}) + "\n")
    return found


def of_page(page: str) -> list[dict[str, Any]]:
    """Return the rows that a page has, as `rows` does."""
    found = []
    for line in page.partition("Not supported:")[0].splitlines():
        cells = [cell.strip() for cell in line.strip("|").split(" | ")]
        if len(cells) == 4 and cells[0] in ("image", "video"):
            for name in re.split(r", (?=[A-Z])", cells[3]):
                found.append(dict.fromkeys(KEPT) | {
                    "model": name.rstrip(DAGGER + DOUBLE), "supported": True, "epoch": "" if DOUBLE in name else None,
                    "modality": cells[0], "prediction": cells[1], "guidance": cells[2],
                    "lora_loader": [] if DAGGER in name else ["load_lora_weights"]})
    for line in page.partition("Not supported:")[2].partition("\nThe other classes")[0].splitlines():
        names, _, why = line.strip("| ").partition(" | ")
        if "Pipeline" in names:
            found += [dict.fromkeys(KEPT) | {"model": name, "supported": False, "reason": why}
                      for name in re.split(r", (?=[A-Z])", names)]
    return found


NOUNS = {"base": "classes that read only a prompt", "modular": "ModularPipelines",
         "others": "classes that read an image or a clip too"}
OTHERS = re.compile("ControlNet|Inpaint|Img2Img|ImageToVideo|Image2Video|VideoToVideo|V2V|I2V|I2I|Control|Edit|"
                    "Kontext|Fill|Adapter|Condition|InContext|VACE|KV|WanAnimate|Pix2Pix|Depth2Img|ConsisID|VideoToWorld|SanaWM|Framepack|"
                    "VisualCloze|Cosmos2_5")


def kind(name: str) -> str:
    """Return which of three counts a class belongs to: modular; others, which read an image or a clip beside the
    prompt; base, which reads only a prompt."""
    return "modular" if "Modular" in name else "others" if OTHERS.search(name) else "base"


def counts(page: str, classes: Iterable[str]) -> dict[str, tuple[int, int]]:
    """Return, by `kind`, how many classes of the page pass the check and have trained an epoch for it, and how many the
    installed diffusers has that make pictures of a prompt; of ModularPipelines, how many it has."""
    works = {told["model"].partition(" ")[0] for told in of_page(page)
             if told["supported"] and told["epoch"] is None}
    able = works | {name for name in classes if kind(name) == "modular" or not reason(name).startswith(NO_PICTURES)}
    return {each: (sum(kind(name) == each for name in works), sum(kind(name) == each for name in able))
            for each in ("base", "modular", "others")}


def red(images: Any, prompts: Any, metadata: Any) -> list[float]:
    """README's own reward, of clips too, [B, F, 3, H, W]."""
    r, g, b = images.movedim(-3, 0).flatten(2).mean(2)
    return (r - (g + b) / 2).tolist()


def epoch(pipe: Any, call: dict[str, Any]) -> str | None:
    """Train an epoch on the reward `red`; return None, or why it stops.

    call: arguments of calls; pictures among them become files that prompts bring, as far as prompts can.
    """
    from flowgrpo.policies.pipelines.prompt_inputs import IMAGES, names
    from flowgrpo.run import align
    from flowgrpo.samplers.kernels import process

    keys = {argument: key for key, argument in reversed(names(type(pipe)).items())}
    before = os.getcwd()
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        os.chdir(folder)
        brings, rest = dict[str, str](), dict(call)
        for argument in [name for name in call if name in IMAGES and name in keys]:
            brings[keys[argument]] = saved(rest.pop(argument), f"{argument}")
        image = {key: rest.pop(key) for key in ("height", "width") if key in rest}
        image |= {key: rest.pop(argument) for key, argument in (("frames", "num_frames"), ("fps", "frame_rate"))
                  if argument in rest}
        try:
            with contextlib.redirect_stderr(io.StringIO()):
                summary = align(pipe, red, [{"prompt": text} | brings for text in ("a red star", "a blue circle")],
                                "mix_grpo" if process(pipe.scheduler) == "flow" else "ddpo", precision="fp32",
                                image=image | {"call": rest}, train={"epochs": 1, "steps": 8, "group": 4, "prompts": 2},
                                eval={"steps": 2, "prompts": 1})
            return None if summary["updates"] and summary["max_first_log_ratio"] <= 1e-6 else f"trained with {summary}"
        except Exception as error:  # third-party pipelines can raise anything; the error is the answer
            return " ".join(str(error).split())[:300] or type(error).__name__
        finally:
            os.chdir(before)


def saved(value: Any, name: str) -> str:
    """Write an image, or frames as a clip, and return its file."""
    if isinstance(value, list):
        value[0].save(f"{name}.gif", save_all=True, append_images=value[1:], duration=100)
        return f"{name}.gif"
    if hasattr(value, "clamp"):  # a tensor
        from torchvision.transforms.functional import to_pil_image

        value = to_pil_image(value.clamp(0, 1).squeeze(0))
    value.save(f"{name}.png")
    return f"{name}.png"


def table(found: list[dict[str, Any]], classes: list[str]) -> str:
    """Return the supported pipelines by modality, prediction and guidance, those that stop, and the other classes."""
    groups: dict[tuple[str, ...], list[dict[str, Any]]] = defaultdict(list)
    for told in found:
        if told["supported"] and not told["epoch"]:
            groups[told["modality"], told["prediction"], told["guidance"]].append(told)
    lines = ["| modality | prediction | guidance | pipelines |", "| --- | --- | --- | --- |"]
    lines += [f"| {' | '.join(key)} | {', '.join(map(named, group))} |" for key, group in sorted(groups.items())]
    reasons: dict[str, list[str]] = defaultdict(list)
    for told in found:
        if told["reason"] or told["epoch"]:
            reasons[in_short(told["model"], told["reason"] or f"training stops: {told['epoch']}")].append(told["model"])
    lines += ["", "Not supported:", "", "| pipeline | reason |", "| --- | --- |"]
    lines += [f"| {', '.join(names)} | {why} |" for why, names in reasons.items()]
    others: dict[str, list[str]] = defaultdict(list)
    for name in sorted({*classes} - {told["model"].partition(" ")[0] for told in found}, key=str.lower):
        others[reason(name)].append(name)
    lines += ["", "The other classes of the installed diffusers, which no tiny instance drives:", "",
              "| reason | pipelines |", "| --- | --- |"]
    lines += [f"| {why} | {', '.join(names)} |" for why, names in sorted(others.items())]
    return "\n".join(lines) + "\n"


def in_short(name: str, reason: str) -> str:
    """Return a reason that classes can share: without the class's name and how far it is off."""
    plain = re.sub(rf"^{name.partition(' ')[0]} (?=\w)", "", re.sub(r"^/\S+ (?=does not load)", "its LoRA ", reason))
    return re.sub(r", but \d+% off(?=:)", "", plain)


def named(told: dict[str, Any]) -> str:
    """Return a pipeline's name, with a dagger where diffusers has no loader of its LoRAs, and a double one where its
    epoch was not run."""
    alone = not any("load_lora_weights" in loader for loader in told["lora_loader"] or [])
    return told["model"] + DAGGER * alone + DOUBLE * (told["epoch"] == "")


def new(known: Path, minutes: float) -> Iterator[tuple[str, str]]:
    """Yield the classes that a file does not name, and what `check` and an epoch say of those that can be built within
    the minutes: of their own tiny instance, else of the parts of another."""
    from flowgrpo.tools.check import tiny
    from flowgrpo.tools.check.report import report

    names, until = set(re.findall(r"\w+Pipeline\b", known.read_text(encoding="utf-8"))), time.time() + 60 * minutes
    unknown, kinds = [name for name in live() if name not in names], dict[str, dict[str, str]]()
    made = [name for name in unknown if name in tiny.factories()]
    for key, make in tiny.factories().items() if len(made) < len(unknown) else ():
        if time.time() < until and "Modular" not in key:
            kinds[key] = {part: type(value).__name__ for part, value in make(0)[0].components.items()
                          if value is not None}
    for name in sorted(unknown, key=made.__contains__):
        if time.time() > until:
            yield name, f"not tried: the {minutes:g} minutes are over"
            continue
        if name in made:
            stops = report(name)["reason"] or epoch(*tiny.make(name))
            yield name, "by its tiny instance " + (f"it stops: {stops}" if stops else "it works, and trains an epoch")
            continue
        wanted = needs(name)
        base = next((key for key, parts in kinds.items() if wanted.keys() <= parts.keys() and all(
            parts[part] in wanted[part] for part in wanted if part in ("transformer", "unet"))), None)
        if base is None or not {"transformer", "unet"} & wanted.keys():
            yield name, "no tiny instance has its parts"
            continue
        stops = report(of_parts(name, base))["reason"] or epoch(*of_parts(name, base))
        yield name, f"with the parts of {base} " + (f"it stops: {stops}" if stops else "it works, and trains an epoch")


def needs(name: str) -> dict[str, str]:
    """Return the parts that a class cannot do without, with their types in words."""
    import diffusers

    cls: Any = getattr(diffusers, name)
    if hasattr(cls, "default_blocks_name"):
        specs = cls()._component_specs
        return {part: spec.type_hint.__name__ for part, spec in specs.items() if spec.type_hint is not None
                and part in ("transformer", "unet", "vae", "text_encoder", "scheduler")}
    return {part: str(value.annotation) for part, value in inspect.signature(cls).parameters.items()
            if value.default is value.empty}


def of_parts(name: str, base: str) -> tuple[Any, dict[str, Any]]:
    """Build a class of the parts of a tiny pipeline; return it with the arguments of its call."""
    from flowgrpo.policies.pipelines.prompt_inputs import needs_image
    from flowgrpo.tools.check.tiny import derived

    pipe, call = derived.build(name.removesuffix("Pipeline"), row=(base,))
    return pipe, call | (derived.PICTURE if needs_image(type(pipe)) and "image" not in call else {})


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--new", action="store_true", help="only list and try classes that the page does not name")
    arguments.add_argument("--known", type=Path, default=TARGET, help="with --new: a file that names classes")
    arguments.add_argument("--minutes", type=float, default=10, help="with --new: stop trying after them")
    arguments.add_argument("--names", action="store_true", help="only print the names of the classes")
    arguments.add_argument("--checks", action="store_true", help="run no epochs")
    arguments.add_argument("--only", nargs="+", default=[], help="run these classes, and do not write the page")
    arguments.add_argument("--save", help="a file of JSON lines to which rows are appended")
    arguments.add_argument("--merge", nargs="+", help="run nothing, write the page with the rows of these files")
    given = arguments.parse_args()
    if given.names:
        print("\n".join(live()))
        return
    if given.new:
        for name, told in new(given.known, given.minutes):
            print(f"{name}: {told}", flush=True)
        return
    page, _, below = TARGET.read_text(encoding="utf-8").partition(HAND_WRITTEN)
    if given.merge:
        lines = [json.loads(line) for file in given.merge for line in Path(file).read_text("utf-8").splitlines()]
        found = [*({told["model"]: told for told in [*of_page(page), *lines]}).values()]
        found.sort(key=lambda told: told["model"].lower())
    else:
        found = rows(not given.checks, given.only, given.save)
    if given.only:
        return
    body = table(found, live())
    told = [f"{done} of {of} {NOUNS[each]}" for each, (done, of) in counts(body, live()).items()]
    TARGET.write_text(f"{INTRODUCTION}Passed and trained: {told[0]}, {told[1]}, and {told[2]}.\n\n{body}\n"
                      f"{HAND_WRITTEN}{below}", encoding="utf-8")
    stopped = {told["model"]: told["reason"] or told["epoch"] for told in found if told["reason"] or told["epoch"]}
    print(json.dumps({"classes": len(found), "supported": len(found) - len(stopped), "not": stopped}, indent=2))


if __name__ == "__main__":
    main()
