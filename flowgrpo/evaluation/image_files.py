"""Images as files: PNGs that say how they were drawn, under names that are free; and those of a page one by one,
full-sized, which `flowgrpo compare vote` shows.
"""

import hashlib
import inspect
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from flowgrpo.data.prompts import Prompt
from flowgrpo.evaluation.pages import sources
from flowgrpo.evaluation.pages.clips import as_image, save_clip, save_png
from flowgrpo.policies.pipelines.call import guidance_argument
from flowgrpo.policies.pipelines.edits import FILE as EDITS
from flowgrpo.policies.pipelines.load import denoisers
from flowgrpo.policies.weights.lora_files import LORA_FILE
from flowgrpo.storage import atomic
from flowgrpo.storage.places import STATE
from flowgrpo.version import __version__

ADAPTER_FILE = "adapter_model.safetensors"  # peft's
# Weights of a part, below a run's folder; `model` is a whole language model.
OF_PARTS = (f"*/{LORA_FILE}", f"*/{ADAPTER_FILE}", "*/diffusion_pytorch_model*.safetensors",
            "text_encoder*/model*.safetensors", "model/model*.safetensors")


def save(path: Path, image: torch.Tensor, parameters: str, fps: float | None = None) -> None:
    """Write an image [3, H, W] in [0, 1] as PNG with the text chunk `parameters`, or a clip [F, 3, H, W] as animated
    WebP with the same text as EXIF user comment, where AUTOMATIC1111 and ComfyUI read it, and as mp4.

    fps: frames per second of a clip.
    """
    if image.ndim == 4:
        save_clip(path, image, parameters, fps)
        return
    from torchvision.transforms.functional import to_pil_image

    pixels = image.mul(255).add(0.5).clamp(0, 255).to(torch.uint8)
    save_png(path, to_pil_image(pixels), {"parameters": parameters})


def settings(pipe: Any, model: str, arguments: dict[str, Any], run: Path | None, rlg: float | None) -> dict[str, Any]:
    """Settings that all images of a call share, by the names of AUTOMATIC1111.

    arguments: of the call; the pipeline's defaults stand for absent steps and guidance. run: a finished run, its
    checkpoint, a folder with a LoRA, or its file.
    """
    accepted = inspect.signature(pipe.__call__).parameters
    scale = guidance_argument(accepted, denoisers(pipe).values())
    return {"Steps": arguments.get("num_inference_steps", accepted["num_inference_steps"].default),
            "Sampler": type(pipe.scheduler).__name__,
            "CFG scale": arguments.get("guidance", accepted[scale].default if scale in accepted else None),
            "Seed": None, "Size": None, "Model": Path(model).name, "Lora hashes": lora_hashes(run), "RLG": rlg,
            "Version": f"flowgrpo {__version__}"}


def parameters(prompt: str, seed: int, image: torch.Tensor, settings: dict[str, Any], negative: str = "") -> str:
    """Generation settings of an image [3, H, W] or clip [F, 3, H, W] in AUTOMATIC1111's notation.

    Its lines are the prompt, the negative prompt, and the settings. ComfyUI needs the second also if it is empty.

    seed: of the image's own noise.
    """
    fields = settings | {"Seed": seed, "Size": f"{image.shape[-1]}x{image.shape[-2]}"}
    line = ", ".join(f"{name}: {quote(value)}" for name, value in fields.items() if value is not None)
    return f"{prompt}\nNegative prompt: {negative}\n{line}"


def quote(value: object) -> str:
    """Quote a value as AUTOMATIC1111 does, if it has a comma, a colon or a line break."""
    text = str(value)
    return json.dumps(text, ensure_ascii=False) if re.search(r"[,:\n]", text) else text


def lora_hashes(run: Path | None) -> str | None:
    """AUTOMATIC1111's hashes of trained weights: the first digits of the SHA-256 of a file's tensors, without its
    header."""
    hashes = []
    for name, file in weight_files(run) if run is not None else ():
        with file.open("rb") as opened:
            opened.seek(8 + int.from_bytes(opened.read(8), "little"))
            hashes.append(f"{name}: {hashlib.file_digest(opened, 'sha256').hexdigest()[:12]}")
    return ", ".join(hashes) or None


def weight_files(run: Path) -> list[tuple[str, Path]]:
    """Files of trained weights with names: the LoRA of a run, or of its parts, its whole weights, or the state of a
    checkpoint. What `flowgrpo export` writes into the run's folder is none of them."""
    if run.is_file():
        return [(run.parent.name, run)]
    if (run / STATE).is_file():
        return [(f"{run.parent.parent.name}-{run.name}", run / STATE)]
    own = [(run.name, file) for file in (run / LORA_FILE, run / ADAPTER_FILE, run / EDITS) if file.is_file()]
    parts = [file for pattern in OF_PARTS for file in sorted(run.glob(pattern))]
    return own + [(f"{run.name}-{file.parent.name}", file) for file in parts]


def facts(run: Path, columns: Sequence[str], prompts: Sequence[Prompt], folders: Sequence[str] = (),
          sources: Sequence[Sequence[str]] = (), **further: Any) -> dict[str, str]:
    """Text chunk `flowgrpo` of a page of images: JSON with the run, its hashes, columns, prompts and their tasks.
    folders: of the columns' images, relative to the page. sources: likewise, of each prompt the files of what it
    brings."""
    told = {"version": __version__, "run": run.resolve().name, "weights": lora_hashes(run), "columns": list(columns),
            "prompts": [prompt.text for prompt in prompts],
            "tasks": [prompt.metadata.get("task") for prompt in prompts], "folders": list(folders),
            "sources": [list(files) for files in sources]}
    return {"flowgrpo": json.dumps(told | further, ensure_ascii=False)}


def free(path: Path) -> Path:
    """Path that does not exist: this one, or with the first free number from 2 on behind its name. The mp4 of a WebP is
    to be free, too."""
    number = 2
    while path.exists() or (path.suffix.lower() == ".webp" and path.with_suffix(".mp4").exists()):
        path, number = path.with_name(f"{path.stem.rpartition('~')[0] or path.stem}~{number}{path.suffix}"), number + 1
    return path


def save_rows(folder: Path, samples: Sequence[torch.Tensor] | torch.Tensor, fps: float | None = None) -> None:
    """Write images [3, H, W] as 000.png, and clips [F, 3, H, W] as 000.webp, into a folder, in place of earlier
    ones. fps: frames per second of clips."""
    atomic.make_folder(folder)
    for file in folder.iterdir():
        if re.fullmatch(r"\d+\.(png|webp|mp4)", file.name):
            file.unlink()
    for number, sample in enumerate(samples):
        if sample.ndim == 4:
            save_clip(folder / f"{number:03d}.webp", sample, fps=fps)
        else:
            save_png(folder / f"{number:03d}.png", as_image(sample))


def save_sources(place: Path, prompts: Sequence[Prompt], samples: Sequence[torch.Tensor | str] | torch.Tensor
                 ) -> list[list[str]]:
    """Write what the prompts of a page bring into the folder `source` of a run, or below the name of a page; return the
    files of each prompt, relative to the page. samples: the page's, whose number of frames a source video has."""
    root, folder = (place, sources.FOLDER) if place.is_dir() else (place.parent, f"{place.stem}/{sources.FOLDER}")
    written = sources.save(root / folder, prompts, sources.frames_of(samples[0]) if len(samples) else None)
    return [[f"{folder}/{name}" for name in files] for files in written]


def save_columns(page: Path, names: Sequence[str], columns: Sequence[Sequence[Any]], fps: float | None = None
                 ) -> list[str]:
    """Write the images of each column of a page into a folder below the page's name; return the folders.

    columns: of images and clips, as of `save`.
    """
    folders = [f"{page.stem}/{number}-{re.sub(r'[^a-z0-9]+', '-', name.lower()).strip('-')}"
               for number, name in enumerate(names)]
    for folder, images in zip(folders, columns, strict=True):
        save_rows(page.parent / folder, images, fps)
    return folders
