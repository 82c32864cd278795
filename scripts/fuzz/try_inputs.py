"""Give images, clips and LoRAs of every form to the commands that read them, and print what each makes of them.

    python scripts/fuzz/try_inputs.py [--only NAME ...] [--json FILE] [--before FILE]

An image shows a ramp; a clip, frames that get brighter; a LoRA, a known change of the weights. `right`: a pipeline, a
reward or the weights got that, where the command is ended; `wrong`: they got something else, without a word; `refused`:
one line, exit code 2. --json keeps the cells; --before puts those of another commit beside them, where this
file ran with its package on PYTHONPATH. Pipelines are tiny and random, on the CPU.
"""

import argparse
import contextlib
import io
import json
import os
import re
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cv2
import diffusers
import numpy as np
import torch
from diffusers.image_processor import VaeImageProcessor
from diffusers.video_processor import VideoProcessor
from peft.tuners.lora import LoraLayer
from PIL import Image, ImageCms
from safetensors.torch import save_file

from flowgrpo.cli import main as flowgrpo
from flowgrpo.tools.check.tiny import make

SIZE, FRAMES, RANK = 32, 9, 2
RAMP = np.tile(np.linspace(0, 1, SIZE), (SIZE, 1))
TRAIN = ["--device=cpu", "--precision=fp32", "--tracker=none", "--method=mix_grpo", "--train.prompts=1",
         "--train.group=2", "--train.micro_batch=2", "--train.steps=10", "--eval.steps=2", "--eval.guidance=1",
         "--eval.prompts=1"]
SMALL = {"FluxKontextPipeline": "{max_sequence_length: 16, max_area: 1024, _auto_resize: false}",
         "WanVideoToVideoPipeline": "{max_sequence_length: 16}"}
REWARD = """
import json
def seen(images, prompts):
    with open("seen.json", "w") as file:
        json.dump(images[0].tolist(), file)
    return [float(image.mean()) for image in images]
def clip(videos, prompts):
    with open("seen.json", "w") as file:
        json.dump(videos[0].mean((1, 2, 3)).tolist(), file)
    return [float(video.mean()) for video in videos]
"""


# --- what is given ---------------------------------------------------------------------------------------------------

def grey(values: np.ndarray, kind: Any = np.uint8) -> Image.Image:
    return Image.fromarray(values.astype(kind))


def object_on_nothing(mode: str) -> Image.Image:
    """The ramp; its lower half is transparent, above a colour that nobody is to see."""
    colours = np.stack([RAMP * 255] * 3 + [np.full((SIZE, SIZE), 255)], 2).astype(np.uint8)
    colours[SIZE // 2:] = 255, 0, 255, 0
    picture = Image.fromarray(colours, "RGBA")
    return picture.quantize(64) if mode == "P" else picture.convert(mode)


def sideways() -> tuple[Image.Image, dict[str, Any]]:
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned by a quarter
    return grey(RAMP * 255).convert("RGB").transpose(Image.Transpose.ROTATE_90), {"exif": exif, "quality": 100}


def many(folder: Path) -> None:
    frames = [Image.new("RGB", (SIZE, SIZE), (20 + 20 * number,) * 3) for number in range(12)]
    for name, options in (("gif", {}), ("webp", {"lossless": True}), ("png", {}), ("tif", {})):
        frames[0].save(folder / f"clip.{name}", save_all=True, append_images=frames[1:], **options)
    for name, pattern in (("padded", "f_{:03d}.png"), ("unpadded", "frame{}.png")):
        (folder / name).mkdir()
        for number, frame in enumerate(frames):
            frame.save(folder / name / pattern.format(number))
    video = cv2.VideoWriter(str(folder / "clip.mp4"), cv2.VideoWriter.fourcc(*"mp4v"), 30, (SIZE, SIZE))
    for frame in frames:
        video.write(np.asarray(frame))
    video.release()


def images(folder: Path) -> dict[str, np.ndarray | None]:
    """Write all images; return what each shows, [H, W] of grey or [3]; None: it cannot be known."""
    half = RAMP.copy()
    half[SIZE // 2:] = 1
    turned, options = sideways()
    made: dict[str, tuple[Image.Image, np.ndarray | None, dict[str, Any]]] = {
        "grey8.png": (grey(RAMP * 255), RAMP, {}), "rgb.png": (grey(RAMP * 255).convert("RGB"), RAMP, {}),
        "grey16.png": (grey(RAMP * 65535, np.uint16), RAMP, {}),
        "grey16.tif": (grey(RAMP * 65535, np.uint16), RAMP, {}),
        "grey16 big-endian.tif": (grey(RAMP * 65535, ">u2"), RAMP, {}),
        "int32 of 16 bits.tif": (grey(RAMP * 65535, np.int32), RAMP, {}),
        "int32 of 8 bits.tif": (grey(RAMP * 255, np.int32), None, {}),
        "float 0 to 1.tif": (grey(RAMP, np.float32), RAMP, {}),
        "float 0 to 255.tif": (grey(RAMP * 255, np.float32), None, {}),
        "float with nan.tif": (grey(np.where(RAMP > .5, np.nan, RAMP), np.float32), None, {}),
        "palette.png": (grey(RAMP * 255).quantize(64), RAMP, {}), "bits.png": (grey(half * 0 + 255).convert("1"),
                                                                              half * 0 + 1, {}),
        "CMYK.jpg": (grey(RAMP * 255).convert("RGB").convert("CMYK"), RAMP, {"quality": 100}),
        "Lab.tif": (ImageCms.profileToProfile(grey(RAMP * 255).convert("RGB"), ImageCms.createProfile("sRGB"),
                                              ImageCms.createProfile("LAB"), outputMode="LAB"), RAMP, {}),
        "transparent RGBA.png": (object_on_nothing("RGBA"), half, {}),
        "transparent LA.png": (object_on_nothing("LA"), half, {}),
        "transparent palette.png": (object_on_nothing("P"), half, {}),
        "transparent RGBA.webp": (object_on_nothing("RGBA"), half, {"lossless": True, "exact": True}),
        "EXIF orientation.jpg": (turned, RAMP, options)}
    for name, (picture, _, arguments) in made.items():
        picture.save(folder / name, **arguments)
    many(folder)
    (folder / "empty.png").write_bytes(b"")
    (folder / "text.png").write_text("hello")
    noisy = Image.fromarray(np.random.default_rng(0).integers(0, 255, (64, 64, 3), np.uint8))
    noisy.save(folder / "cut off.jpg")
    (folder / "cut off.jpg").write_bytes((folder / "cut off.jpg").read_bytes()[:1500])
    return {name: meant for name, (_, meant, _) in made.items()} | dict.fromkeys((
        "clip.gif", "clip.tif", "empty.png", "text.png", "cut off.jpg", "missing.png", "padded",
        "https://host.invalid/a.png"))


CLIPS = ("clip.mp4", "clip.gif", "clip.webp", "clip.png", "clip.tif", "padded", "unpadded")


def loras(folder: Path) -> dict[str, dict[tuple[str, str], torch.Tensor] | None]:
    """Write LoRAs of a tiny SD 1.5; return the change of each layer that its maker meant; None: diffusers has none."""
    pipe, generator = make("StableDiffusionPipeline")[0], torch.Generator().manual_seed(0)
    pairs = {}
    for part, ends in (("unet", ("to_q", "to_v")), ("text_encoder", ("q_proj", "out_proj"))):
        for name, module in getattr(pipe, part).named_modules():
            if name.rpartition(".")[2] in ends:
                out, into = module.weight.shape
                pairs[part, name] = (torch.randn(RANK, into, generator=generator),
                                     .1 * torch.randn(out, RANK, generator=generator))
    unet = [key for key in pairs if key[0] == "unet"]
    changes: dict[str, dict[tuple[str, str], torch.Tensor] | None] = {}

    def write(name: str, keys: list[tuple[str, str]], form: str, alpha: float | None, scale: float | None,
              more: Callable[[str, tuple[str, str]], dict[str, torch.Tensor]] = lambda *_: {}) -> None:
        tensors = {}
        for part, layer in keys:
            plain = layer.removeprefix("text_model.").replace(".", "_")
            kohya = f"lora_unet_{plain}" if part == "unet" else f"lora_te_text_model_{plain}"
            stem = {"kohya": kohya, "diffusers": f"{part}.{layer}", "peft": f"base_model.model.{layer}"}[form]
            sides = ("lora_down", "lora_up") if form == "kohya" else ("lora_A", "lora_B")
            tensors |= {f"{stem}.{side}.weight": side_of.clone() for side, side_of in zip(sides, pairs[part, layer])}
            tensors |= {} if alpha is None else {f"{stem}.alpha": torch.tensor(alpha)}
            tensors |= more(stem, (part, layer))
        save_file(tensors, folder / f"{name}.safetensors")
        changes[name] = None if scale is None else {key: scale * pairs[key][1] @ pairs[key][0] for key in keys}

    write("diffusers", unet, "diffusers", None, 1.0)
    write("diffusers, alpha", unet, "diffusers", 1.0, .5)
    write("diffusers, text encoder", [*pairs], "diffusers", None, 1.0)
    write("kohya", unet, "kohya", 1.0, .5)
    write("kohya, no alpha", unet, "kohya", None, 1.0)
    write("kohya, text encoder", [*pairs], "kohya", 1.0, .5)
    write("peft, file alone", unet, "peft", None, None)
    write("kohya, DoRA", unet, "kohya", 1.0, None,
          lambda stem, key: {f"{stem}.dora_scale": torch.full((pairs[key][1].shape[0], 1), 2.0)})
    write("diffusers, biases", unet, "diffusers", None, None,
          lambda stem, key: {f"{stem}.lora_B.bias": torch.ones(pairs[key][1].shape[0])})
    write("layers of another model", unet, "diffusers", None, None,
          lambda stem, _: {f"{stem}_none.lora_A.weight": torch.ones(2, 8),
                           f"{stem}_none.lora_B.weight": torch.ones(8, 2)})
    for name, keys in (("LoHa", ("hada_w1_a", "hada_w1_b", "hada_w2_a", "hada_w2_b")), ("LoKr", ("lokr_w1", "lokr_w2")),
                       ("whole difference", ("diff",)), ("OFT", ("oft_blocks",))):
        write(f"kohya, one layer of {name}", unet, "kohya", 1.0, None,
              lambda stem, key, keys=keys: {f"{stem}_x.{each}": torch.ones(4, 4) for each in keys if key == unet[0]})
    return changes


# --- what is got -----------------------------------------------------------------------------------------------------

SEEN: list[Any] = []  # images [3, H, W] or brightness of frames [F] that a pipeline's processor made, from 0 to 1
BUILT: list[Any] = []  # pipelines
WITHIN: list[Any] = []  # holds a processor while it reads the frames of a clip
MASK: list[str] = []  # holds a name while a mask is looked for, and not the image beside it


class Seen(BaseException):
    """An input has reached what reads it: the command is not needed any more."""


@contextlib.contextmanager
def recorded() -> Iterator[None]:
    """Context manager: keep what pipelines get, and the pipelines, and end the command there."""
    kept = VaeImageProcessor.preprocess, VideoProcessor.preprocess_video, diffusers.StableDiffusionPipeline.__init__

    def picture(self: Any, *arguments: Any, **keywords: Any) -> Any:
        made = kept[0](self, *arguments, **keywords)
        if WITHIN or MASK and not self.config.do_binarize:
            return made
        SEEN.append(made[0].float() / 2 + .5 if self.config.do_normalize else made[0].float())
        raise Seen

    def video(self: Any, *arguments: Any, **keywords: Any) -> Any:
        WITHIN.append(self)
        try:
            made = kept[1](self, *arguments, **keywords)  # it reads the frames by `preprocess`
        finally:
            WITHIN.clear()
        SEEN.append((made[0].float() / 2 + .5).mean((0, 2, 3)))
        raise Seen

    def forward(module: torch.nn.Module, _: Any) -> None:
        if isinstance(module, diffusers.UNet2DConditionModel) and BUILT:
            raise Seen

    def built(self: Any, *arguments: Any, **keywords: Any) -> None:
        kept[2](self, *arguments, **keywords)
        BUILT.append(self)

    built.__signature__ = __import__("inspect").signature(kept[2])  # type: ignore[attr-defined] from_pretrained reads it
    VaeImageProcessor.preprocess, VideoProcessor.preprocess_video = picture, video
    diffusers.StableDiffusionPipeline.__init__ = built
    hook = torch.nn.modules.module.register_module_forward_pre_hook(forward)
    try:
        yield
    finally:
        hook.remove()
        (VaeImageProcessor.preprocess, VideoProcessor.preprocess_video,
         diffusers.StableDiffusionPipeline.__init__) = kept


def ran(*command: str) -> str:
    """Run a command here; return "" or how it was refused."""
    SEEN.clear()
    BUILT.clear()
    Path("seen.json").unlink(missing_ok=True)
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        try:
            code = flowgrpo([*command])
        except Seen:
            return ""
        except SystemExit as end:
            code = end.code
        except Exception as error:
            return f"TRACEBACK {type(error).__name__}: {error}".splitlines()[0]
    lines = [line for line in out.getvalue().splitlines() if "flowgrpo: error:" in line]
    if code in (0, 3):  # 3: the run trained nothing
        return ""
    return f"refused: {lines[-1].partition('error: ')[2]}" if lines else f"exit code {code}: {out.getvalue()[-300:]}"


def shown(meant: np.ndarray | None, got: torch.Tensor | None, mask: bool = False) -> str:
    if got is None:
        return "not seen"
    meant = (meant >= .5) * 1. if mask and meant is not None else meant
    if got.ndim == 4:
        return f"a clip of {len(got)} frames"
    values = got.mean(0).numpy()
    if meant is None:
        return f"wrong: {values.min():.2f} to {values.max():.2f}, without a word"
    distance = abs(np.asarray(Image.fromarray(meant.astype(np.float32)).resize(values.shape[::-1])) - values)
    return "right" if distance.mean() < .03 else f"wrong: {values.min():.2f} to {values.max():.2f}"


def order(got: Any, count: int) -> str:
    if got is None:
        return "not seen"
    found = [round(float(value) * 255 / 20 - 1, 1) for value in got]
    return "right" if np.allclose(found, range(count), atol=.3) else f"wrong: frames {found}"


def weights(meant: dict[tuple[str, str], torch.Tensor] | None) -> str:
    """Compare the last pipeline's weights with the base's."""
    if not BUILT:
        return "not seen"
    pipe, base = BUILT[-1], make("StableDiffusionPipeline")[0]  # in this order: `make` builds one too
    for part in ("unet", "text_encoder"):
        for module in [*getattr(pipe, part).modules()]:
            if isinstance(module, LoraLayer):
                module.merge()
    found = {}
    for part in ("unet", "text_encoder"):
        for name, module in getattr(base, part).named_modules():
            if isinstance(module, torch.nn.Linear):
                layer = getattr(pipe, part).get_submodule(name)
                weight = layer.get_base_layer().weight if isinstance(layer, LoraLayer) else layer.weight
                found[part, name] = (weight.float() - module.weight).detach()
    changed = {key for key, change in found.items() if change.abs().max() > 1e-4}
    if meant is None:
        return f"wrong: {len(changed)} layers changed, the rest dropped, without a word"
    right = {key for key in meant if torch.allclose(found[key], meant[key], atol=1e-3)}
    if right == changed == set(meant):
        return f"right: {len(right)} layers"
    factors = {f"{float((found[key] * meant[key]).sum() / meant[key].square().sum()):.2f}" for key in meant}
    return f"wrong: {len(right)} of {len(meant)} layers right, {len(changed)} changed, by {', '.join(sorted(factors))}"


# --- doors -----------------------------------------------------------------------------------------------------------

def train(model: str, *options: str, reward: str = "seen") -> str:
    call = [f"--image.call={SMALL[model]}"] if model in SMALL else []
    return ran("train", f"--model={model}", f"--reward=r.py:{reward}", *TRAIN, *call, f"--output={tempfile.mkdtemp()}",
               *options)


def prompts(**files: str) -> str:
    """Write two prompts with files; return the option."""
    Path("p.jsonl").write_text("".join(json.dumps({"prompt": f"p{number}"} | files) + "\n" for number in range(4)))
    return "--prompts=p.jsonl"


def last() -> torch.Tensor | None:
    return SEEN[-1] if SEEN else None


def judged() -> Any:
    return torch.tensor(json.loads(Path("seen.json").read_text())) if Path("seen.json").is_file() else None


def masked(name: str, *options: str) -> str:
    MASK.append(name)
    try:
        return train("StableDiffusionInpaintPipeline", prompts(image="rgb.png", mask_image=name), *options,
                     "--held_out=0.5", "--adapter.rank=2")
    finally:
        MASK.clear()


def image_doors(name: str, meant: np.ndarray | None) -> dict[str, str]:
    sized = [f"--image.height={SIZE}", f"--image.width={SIZE}"]
    Path("suite.jsonl").write_text("".join(json.dumps({"prompt": text, "image": name}) + "\n" for text in "ab"))
    return {"source of a prompt file": train("FluxKontextPipeline", prompts(image=name), *sized, "--held_out=0.5",
                                             "--adapter.rank=2") or shown(meant, last()),
            "control_image": train("StableDiffusionPipeline", prompts(control_image=name), *sized, "--held_out=0.5",
                                   "--load.controlnet=controlnet", "--adapter.rank=2") or shown(meant, last()),
            "mask_image": masked(name, *sized) or shown(meant, last(), mask=True),
            "eval": ran("eval", "FluxKontextPipeline", "--suite", "suite.jsonl", "--rewards", "r.py:seen", "--steps",
                        "2", "--output", tempfile.mkdtemp()) or shown(meant, last()),
            "sample --image": ran("sample", "FluxKontextPipeline", "--prompt", "a", "--image", name, "--steps", "2",
                                  "--output", tempfile.mkdtemp()) or shown(meant, last()),
            "reward score": ran("reward", "score", "r.py:seen", name, "--prompt", "a") or shown(meant, judged())}


def clip_doors(name: str, _: None) -> dict[str, str]:
    sized = [f"--image.height={SIZE}", f"--image.width={SIZE}", f"--image.frames={FRAMES}"]
    return {"video of a prompt file": train("WanVideoToVideoPipeline", prompts(video=name), *sized, "--held_out=0.5",
                                            "--adapter.rank=2", reward="clip") or order(last(), FRAMES),
            "reward score": ran("reward", "score", "r.py:clip", name, "--prompt", "a") or order(judged(), 12)}


def lora_doors(name: str, meant: dict[tuple[str, str], torch.Tensor] | None) -> dict[str, str]:
    file, model = f"{name}.safetensors", "StableDiffusionPipeline"
    begun = [f"--adapter.init={file}", f"--adapter.rank={RANK}", "--adapter.targets=[to_q, to_v]"]
    Path("suite.jsonl").write_text('{"prompt": "a"}\n{"prompt": "b"}\n')
    return {"load.lora": train(model, "--prompts=starter", f"--load.lora=['{file}']", "--adapter.rank=2") or
            weights(meant),
            "adapter.init": train(model, "--prompts=starter", *begun) or weights(meant),
            "sample --lora": ran("sample", model, "--prompt", "a", "--lora", file, "--steps", "2", "--precision",
                                 "fp32", "--output", tempfile.mkdtemp()) or weights(meant),
            "eval --lora": ran("eval", model, "--suite", "suite.jsonl", "--rewards", "r.py:seen", "--lora", file,
                               "--steps", "2", "--precision", "fp32", "--output", tempfile.mkdtemp()) or weights(meant)}


def models() -> None:
    """Save the pipelines, and a ControlNet of the U-Net."""
    for name in ("FluxKontextPipeline", "WanVideoToVideoPipeline", "StableDiffusionInpaintPipeline",
                 "StableDiffusionPipeline"):
        pipe = make(name)[0]
        pipe.save_pretrained(name)
        index = json.loads(Path(name, "model_index.json").read_text())
        index |= {part: [None, None] for part, module in pipe.components.items() if module is None}
        Path(name, "model_index.json").write_text(json.dumps(index))
    controlnet = diffusers.ControlNetModel.from_unet(pipe.unet, conditioning_embedding_out_channels=(4, 8))
    controlnet.save_pretrained("controlnet")


def table(cells: dict[str, dict[str, str]], before: dict[str, dict[str, str]]) -> Iterator[str]:
    """Lines of one Markdown table per kind of input; cells that changed show both."""
    doors: tuple[str, ...] = ()
    for name, row in cells.items():
        if doors != tuple(row):
            doors = tuple(row)
            yield f"\n| input | {' | '.join(doors)} |\n|---|{'---|' * len(doors)}"
        told = []
        for door, cell in row.items():
            old = before.get(name, {}).get(door, cell)
            told.append((cell if old == cell else f"{old} -> {cell}").replace("|", "/").replace("\n", " "))
        yield f"| {name} | {' | '.join(told)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[], help="parts of the inputs' names")
    parser.add_argument("--json", type=Path, help="keep the cells in this file")
    parser.add_argument("--before", type=Path, help="such a file of another commit")
    given = parser.parse_args()
    before = json.loads(given.before.read_text()) if given.before else {}
    os.environ |= {"HF_HUB_OFFLINE": "1"}
    home, cells = Path.cwd(), {}
    with tempfile.TemporaryDirectory() as folder, recorded():
        os.chdir(folder)
        Path("r.py").write_text(REWARD)
        models()
        for doors, inputs in ((image_doors, images(Path())), (clip_doors, dict.fromkeys(CLIPS)),
                              (lora_doors, loras(Path()))):
            for name, meant in inputs.items():
                label = f"{name} as a clip" if doors is clip_doors else name
                if not given.only or any(part in label for part in given.only):
                    cells[label] = {door: re.sub(re.escape(f"{folder}/"), "", cell)
                                    for door, cell in doors(name, meant).items()}  # type: ignore[operator]
                    print(f"{label}: {cells[label]}", flush=True)
        os.chdir(home)
    print("\n".join(table(cells, before)))
    if given.json:
        given.json.write_text(json.dumps(cells, indent=1) + "\n")


if __name__ == "__main__":
    main()
