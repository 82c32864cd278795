"""Node of ComfyUI that votes on outputs. Copy this folder to ComfyUI/custom_nodes/flowgrpo_vote, and restart ComfyUI.

Connect the images of a batch, and their prompt. Each run saves and shows them, and `best` is the vote on those of the
run before: 1 is the first image, 0 is no vote. So look, set `best`, and queue the next run. A vote adds a line per
other image to FOLDER/pairs.jsonl below ComfyUI's output, which `preferences` of a recipe and `flowgrpo reward train`
read. It needs what ComfyUI has: numpy and Pillow.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

SHOWN = "shown.json"  # the images that wait for a vote: {"prompt": text, "files": names}


def output_folder() -> Path:
    """ComfyUI's folder of outputs; elsewhere the working folder."""
    try:
        import folder_paths  # a module of ComfyUI
    except ImportError:
        return Path.cwd()
    return Path(folder_paths.get_output_directory())


def save_vote(folder: Path, best: int) -> str:
    """Write the pairs of a vote on the images shown last; return what was done. Each batch is voted on once.

    Raises ValueError for an image that was not shown.
    """
    shown = folder / SHOWN
    if best == 0:
        return "no vote"
    if not shown.is_file():
        return "no vote: no images wait for one"
    batch = json.loads(shown.read_text(encoding="utf-8"))
    names = batch["files"]
    if not 1 <= best <= len(names):
        raise ValueError(f"best is {best}, expected 1 to {len(names)}, the images shown last, or 0 for no vote")
    chosen = names[best - 1]
    lines = [json.dumps({"prompt": batch["prompt"], "chosen": chosen, "rejected": name}) + "\n"
             for name in names if name != chosen]
    with open(folder / "pairs.jsonl", "a", encoding="utf-8") as file:
        file.write("".join(lines))
    shown.unlink()
    return f"image {best} of {len(names)} is the best: {len(lines)} pairs in {folder / 'pairs.jsonl'}"


def save_images(folder: Path, images: Any, prompt: str) -> list[str]:
    """Write images [B, H, W, 3] in [0, 1] as PNG, and what waits for a vote; return the files' names."""
    first = 1 + max((int(file.stem) for file in folder.glob("[0-9]*.png")), default=0)
    names = [f"{first + place:06d}.png" for place in range(len(images))]
    for name, image in zip(names, images):
        pixels = (np.asarray(image, dtype=np.float32) * 255 + 0.5).clip(0, 255).astype(np.uint8)
        Image.fromarray(pixels[..., :3]).save(folder / name)
    (folder / SHOWN).write_text(json.dumps({"prompt": prompt, "files": names}), encoding="utf-8")
    return names


class Vote:
    """Node: shows a batch, and takes the vote on the batch before."""

    CATEGORY = "flowgrpo"
    DESCRIPTION = "Vote on the images of the run before; the pairs train a LoRA or a reward with flowgrpo."
    RETURN_TYPES = ("STRING",)
    RETURN_NAMES = ("pairs",)
    FUNCTION = "vote"
    OUTPUT_NODE = True

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {"required": {
            "images": ("IMAGE",),
            "prompt": ("STRING", {"forceInput": True}),
            "best": ("INT", {"default": 0, "min": 0, "max": 64, "tooltip": "of the images shown last; 0: no vote"}),
            "folder": ("STRING", {"default": "flowgrpo_votes"})}}

    @classmethod
    def IS_CHANGED(cls, **_: Any) -> float:
        return float("nan")  # runs each time, also with equal inputs

    def vote(self, images: Any, prompt: str, best: int, folder: str) -> dict[str, Any]:
        """Write the vote on the batch before, then save and show this one. Raises ValueError for a folder elsewhere."""
        root = output_folder().resolve()
        place = (root / folder).resolve()
        if root not in place.parents:
            raise ValueError(f"folder is {folder!r}, expected the name of a folder below {root}")
        place.mkdir(parents=True, exist_ok=True)
        told = save_vote(place, best)
        names = save_images(place, images, prompt)
        shown = [{"filename": name, "subfolder": folder, "type": "output"} for name in names]
        return {"ui": {"images": shown, "text": [told]}, "result": (str(place / "pairs.jsonl"),)}


NODE_CLASS_MAPPINGS = {"FlowgrpoVote": Vote}
NODE_DISPLAY_NAME_MAPPINGS = {"FlowgrpoVote": "Vote (flowgrpo)"}
WEB_DIRECTORY = "./js"  # sets `best` to 0 after a run
