"""Pictures as files: PNGs that say how they were drawn, under names that are free."""

from __future__ import annotations

import hashlib
import inspect
from pathlib import Path
from typing import Any

import torch
from PIL.PngImagePlugin import PngInfo

from flowgrpo.policies.pipelines.call import guidance_argument
from flowgrpo.policies.pipelines.load import denoisers
from flowgrpo.policies.weights.lora_files import LORA_FILE
from flowgrpo.version import __version__


def save(path: Path, picture: torch.Tensor, parameters: str) -> None:
    """Write a picture [3, H, W] in [0, 1] as PNG, with the text chunk `parameters`, which AUTOMATIC1111, ComfyUI's
    metadata nodes and other viewers read."""
    from torchvision.transforms.functional import to_pil_image

    chunk = PngInfo()
    chunk.add_text("parameters", parameters)
    to_pil_image(picture.mul(255).add(0.5).clamp(0, 255).to(torch.uint8)).save(path, pnginfo=chunk)


def settings(pipe: Any, model: str, arguments: dict[str, Any], run: Path | None, rlg: float | None) -> dict[str, Any]:
    """Return what all pictures of a call share, by the names of AUTOMATIC1111.

    arguments: of the call; the pipeline's defaults stand for absent steps and guidance. run: a folder with a LoRA,
    or its file.
    """
    accepted = inspect.signature(pipe.__call__).parameters
    scale = guidance_argument(accepted, arguments, denoisers(pipe).values())
    file = run / LORA_FILE if run is not None and run.is_dir() else run
    lora = f'"{file.parent.name}: {tensors_hash(file)[:12]}"' if file is not None and file.is_file() else None
    return {"Steps": arguments.get("num_inference_steps", accepted["num_inference_steps"].default),
            "Sampler": type(pipe.scheduler).__name__,
            "CFG scale": arguments.get("guidance", accepted[scale].default if scale in accepted else None),
            "Model": Path(model).name, "Lora hashes": lora, "RLG": rlg, "Version": f"flowgrpo {__version__}"}


def parameters(prompt: str, seed: int, picture: torch.Tensor, settings: dict[str, Any]) -> str:
    """Return how a picture [3, H, W] was drawn, in AUTOMATIC1111's notation: the prompt, and a line of settings.

    seed: of the picture's own noise.
    """
    fields = settings | {"Seed": seed, "Size": f"{picture.shape[2]}x{picture.shape[1]}"}
    return prompt + "\n" + ", ".join(f"{name}: {value}" for name, value in fields.items() if value is not None)


def tensors_hash(file: Path) -> str:
    """Return the SHA-256 of a safetensors file's tensors, without its header: AUTOMATIC1111's hash of a LoRA."""
    with file.open("rb") as opened:
        opened.seek(8 + int.from_bytes(opened.read(8), "little"))
        return hashlib.sha256(opened.read()).hexdigest()


def free(path: Path) -> Path:
    """Return a path that does not exist: this one, or with the first free number from 2 on behind its name."""
    number = 2
    while path.exists():
        path, number = path.with_name(f"{path.stem.rpartition('~')[0] or path.stem}~{number}{path.suffix}"), number + 1
    return path
