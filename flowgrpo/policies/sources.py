"""Files that a model is loaded from: checks of `model` and of the section `load`, before anything is loaded."""

import json
from pathlib import Path
from typing import Any

from flowgrpo.config.sections import Load
from flowgrpo.errors import UserError
from flowgrpo.files import WEIGHTS, shapes_of
from flowgrpo.packages import present
from flowgrpo.starter import FOLDERS

CHECKPOINT, QUANTISED = ".safetensors", ".gguf"

# Files that are no checkpoint of a pipeline: what they hold, how their tensors' names begin (or what is in them), and
# the key to give them under.
PARTS = (("VAE", ("encoder.", "decoder.", "quant_conv.", "post_quant_conv.", "first_stage_model.", "bn."), "load.vae"),
         ("LoRA", ("lora", ".alpha", "dora_scale"), "load.lora or --lora"),
         ("textual inversion", ("emb_params", "string_to_param", "clip_l", "clip_g"), "load.textual_inversion"))
INDICES = ("model_index.json", "modular_model_index.json")  # of a pipeline; of a ModularPipeline


def index_file(folder: Path) -> Path:
    """The index of the pipeline in a folder, which need not be there."""
    return next((folder / name for name in INDICES if (folder / name).is_file()), folder / INDICES[0])


def described(path: Path) -> dict[str, Any]:
    """The object in a model's JSON file; empty where none can be read, of which loading says what is wrong."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def hub_index(model: str, revision: str | None) -> str:
    """Download the index of a pipeline on the hub and return its file. OSError where there is none."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError

    try:
        return hf_hub_download(model, INDICES[0], revision=revision)
    except EntryNotFoundError:
        return hf_hub_download(model, INDICES[1], revision=revision)


def is_file(model: str) -> bool:
    """True for a model that is named by a file, be it here or not, and not by a folder or hub id."""
    return not Path(model).is_dir() and (Path(model).is_file() or Path(model).suffix in WEIGHTS)


def base(model: str, files: Load) -> str:
    """Base model of a LoRA that was trained with these files, in words and Markdown."""
    beside = {"its denoiser from": files.denoiser, "its autoencoder from": files.vae,
              "the ControlNet": files.controlnet, "the IP-Adapter": files.ip_adapter and files.ip_adapter.path}
    parts = [f"{what} `{path}`" for what, path in beside.items() if path is not None]
    parts += [f"the textual inversion `{each.path}`" for each in files.inversions]
    parts += [f"the scheduler's {files.scheduler}"] if files.scheduler else []
    fused = ", ".join(f"`{lora.path}` at scale {lora.scale:g}" for lora in files.loras_with_scales)
    return f"`{model}`" + f" with {' and '.join(parts)}" * bool(parts) + f", fused with {fused}" * bool(fused)


def require(model: str, files: Load, weights: str = "full") -> None:
    """Raise UserError for settings of `load` that this model does not read, and for files that are not here.

    weights: `memory.weights`, by which diffusers quantises only what it reads from a folder or repository.
    """
    if weights != "full" and (is_file(model) or files.denoiser is not None):
        setting = f"model is {model!r}" if files.denoiser is None else f"load.denoiser is {files.denoiser!r}"
        raise UserError(f"memory.weights is {weights!r}, but {setting}, a file, which diffusers does not quantise as "
                        "it reads it: set 'full', take a .gguf file, or save the pipeline as a folder")
    # The model, and what describes a single file.
    if is_file(model):
        require_pipeline(model)
    elif files.config is not None:
        raise UserError(f"load.config is {files.config!r}, which is of a single file, but model is {model!r}: leave it "
                        "out")
    if files.config is not None and Path(files.config).is_dir() and not index_file(Path(files.config)).is_file():
        raise UserError(f"load.config is {files.config!r}, a folder without a model_index.json: expected a pipeline's "
                        "folder or a hub id")
    # What is loaded beside it, in the order in which loading would read it.
    folder = Path(FOLDERS.get(model, model))
    if folder.exists():
        what = "a packaged model" if model in FOLDERS else "a local folder" if folder.is_dir() else "a file"
        if files.revision is not None:
            raise UserError(f"load.revision is {files.revision!r}, which is of a repository on the hub, but {model!r} "
                            f"is {what}: leave it out")
        if files.variant is not None and not any(folder.rglob(f"*.{files.variant}[.-]*")):
            raise UserError(f"load.variant is {files.variant!r}, but {model!r} is {what} without such files, expected "
                            f"names like model.{files.variant}.safetensors: leave it out")
    for lora in files.loras_with_scales:
        from flowgrpo.policies.weights.lora_files import require_lora  # imports torch, which a report does not need

        require_lora("load.lora", lora.path)
    if files.lora and (weights != "full" or files.gguf):
        setting = f"memory.weights is {weights!r}" if weights != "full" else f"load.denoiser is {files.denoiser!r}"
        raise UserError(f"load.lora is set, but {setting}: a LoRA is fused into full weights, leave one of them out")
    if files.controlnet is not None and _local(files.controlnet) and \
            not (Path(files.controlnet) / "config.json").is_file():
        raise UserError(f"load.controlnet is {files.controlnet!r}, which has no config.json: expected a ControlNet's "
                        "folder or a hub id")
    if (adapter := files.ip_adapter) is not None and _local(adapter.path):
        file = Path(adapter.path) / (adapter.subfolder or "") / adapter.weights
        if not file.is_file():
            raise UserError(f"load.ip_adapter: there is no file {file}: set path, subfolder and weights of "
                            "load.ip_adapter")
    for inversion in files.inversions:
        _require_file("load.textual_inversion", inversion.path, (CHECKPOINT,))
    if files.vae is not None and (is_file(files.vae) or _local(files.vae)):
        if Path(files.vae).is_dir() and not (Path(files.vae) / "config.json").is_file():
            raise UserError(f"load.vae is {files.vae!r}, a folder without a config.json: expected an autoencoder's "
                            f"folder, such as {files.vae}/vae, or a {CHECKPOINT} file")
        if not Path(files.vae).is_dir():
            _require_file("load.vae", files.vae, (CHECKPOINT,))
    if files.denoiser is not None:
        _require_file("load.denoiser", files.denoiser, (CHECKPOINT, QUANTISED))
        if files.gguf and not present("gguf"):
            raise UserError(f"load.denoiser is {files.denoiser!r}, which needs gguf: pip install gguf")


def _local(path: str) -> bool:
    """True for a path, which exists or cannot be a hub id."""
    return Path(path).exists() or path.startswith((".", "/", "~")) or path.count("/") != 1


def require_pipeline(model: str, for_tokens: bool = False) -> None:
    """Raise UserError for a model's file that is not a pipeline's checkpoint. for_tokens: of a method for texts."""
    if for_tokens:
        raise UserError(f"model is the file {model!r}, but the method trains a language model, which is loaded from a "
                        "folder with a config.json, or a hub id: give that")
    _require_file("model", model, (CHECKPOINT,))
    keys = list(shapes_of(model))
    for kind, marks, key in PARTS:
        if keys and all(name.startswith(marks) if kind != "LoRA" else any(mark in name for mark in marks)
                        for name in keys):
            raise UserError(f"model is {model!r}, which holds a {kind} and no pipeline: give it as {key}, and the "
                            "pipeline's folder, hub id or checkpoint as model")


def _require_file(key: str, path: str, endings: tuple[str, ...]) -> None:
    if Path(path).suffix not in endings:
        raise UserError(f"{key} is {path!r}: expected a {' or '.join(endings)} file")
    if not Path(path).is_file():
        raise UserError(f"{key} is {path!r}, but there is no such file: expected a {' or '.join(endings)} file here")
