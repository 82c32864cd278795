"""Export a finished run: a LoRA for ComfyUI or kohya's scripts, a whole merged model, or a model card.

The run's own weights are already in the format of diffusers, or of peft for a language model. Every export is made from
the files in the run's folder.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from flowgrpo import domains
from flowgrpo.config.parse import load
from flowgrpo.config.schema import Config
from flowgrpo.config.sections import Load
from flowgrpo.device import DTYPES, pick_device
from flowgrpo.errors import UserError
from flowgrpo.evaluation.runs import require_format
from flowgrpo.export import comfy_names, model_card, run_lora
from flowgrpo.policies.checkpoints import run_config
from flowgrpo.policies.pipelines import edits
from flowgrpo.policies.policy import resolve_precision
from flowgrpo.policies.weights.lora_files import LORA_FILE
from flowgrpo.storage import atomic, paths
from flowgrpo.storage.json_files import read_object
from flowgrpo.storage.places import run_of, unfinished

DOWN, UP = ".lora_down.weight", ".lora_up.weight"
SIDES = {".lora_A.weight": DOWN, ".lora_B.weight": UP}  # peft's names -> kohya's
COMFYUI = "comfyui"  # folder
CARD = "README.md"
SECOND = "transformer_2"  # the expert of the low-noise steps


def load_finished(run: Path) -> tuple[Config, dict[str, Any]]:
    """Run's configuration and summary. Raises UserError if the folder is not a finished run."""
    if not (run_of(run) / "summary.json").is_file():
        raise UserError(f"{run} has no summary.json: {unfinished(run_of(run))}")
    with require_format(run):
        return run_config(run), read_object(run / "summary.json", "restore it, or --resume the run", unit=str)


def lora(run: Path, output: Path, program: comfy_names.Program = "comfyui") -> list[Path]:
    """Write the run's LoRA for ComfyUI or kohya's scripts, and return the files: `output`, or one per expert (Wan 2.2,
    which ComfyUI loads separately), `..._high_noise` and `..._low_noise`.

    Every layer becomes `NAME.lora_down.weight`, `.lora_up.weight` and `.alpha`, with NAME from `comfy_names`. The scale
    is in lora_up (rsLoRA included) and alpha is the rank. LoRAs of the parts of a fused layer become one of the sum of
    their ranks.
    Raises UserError for a run without a LoRA, for a part that has no name there, and for a DoRA: these programs take
    its lengths from the base's weights, peft from the tuned ones.
    """
    from flowgrpo.policies.pipelines.load import config_source

    parts, config = run_lora.read(run), load(run / "config.yaml")
    known = comfy_names.classes(config_source(config.model, config.load), config.load.revision)
    return _write_lora(run, output, parts, known, program)


def for_comfyui(config: Config, run: Path, policy: Any) -> str | None:
    """Write `comfyui/NAME.safetensors` if ComfyUI does not read the names of the run's own LoRA file.

    Returns a sentence for the log; None without a LoRA of a pipeline, and if ComfyUI reads the run's own.
    """
    pipe = getattr(policy, "pipe", None)
    if pipe is None or not model_card.has_lora(config, run):
        return None
    known = {name: type(part).__name__ for name, part in pipe.components.items()}
    parts = run_lora.read(run)
    families = [comfy_names.FAMILIES.get(known.get(part, "")) for part in parts]
    stock = (run / LORA_FILE).is_file() and all(family is not None and family.own for family in families)
    if stock and SECOND not in parts and not _dora(parts):
        return None
    try:
        files = _write_lora(run, comfyui_file(run, config.name), parts, known, "comfyui")
    except UserError as error:
        return f"no file for ComfyUI: {error}"
    return f"for ComfyUI: {' and '.join(map(str, files))}"


def comfyui_file(folder: Path, name: str) -> Path:
    return folder / COMFYUI / f"{Path(name).name}.safetensors"


def _dora(parts: run_lora.Parts) -> bool:
    return any(adapter.get("use_dora") for _, adapter in parts.values())


def _write_lora(run: Path, output: Path, parts: run_lora.Parts, known: dict[str, str], program: comfy_names.Program
                ) -> list[Path]:
    from safetensors.torch import save_file

    paths.require_file(output)
    if _dora(parts):
        raise UserError(f"the LoRA of {run} has lengths of its own (adapter.dora), which ComfyUI and kohya's scripts "
                        "scale otherwise: use --form merged")
    layers = {part: _rename_tensors(comfy_names.namer(part, known, program), tensors, adapter)
              for part, (tensors, adapter) in parts.items()}
    written = {output: layers}
    if SECOND in layers:
        rest = {part: tensors for part, tensors in layers.items() if part != SECOND}
        written = {output.with_stem(f"{output.stem}_high_noise"): rest,
                   output.with_stem(f"{output.stem}_low_noise"): {SECOND: layers[SECOND]}}
    for path, kept in written.items():
        with atomic.replacing(path) as file:
            save_file({key: value for tensors in kept.values() for key, value in tensors.items()}, file,
                      {"format": "pt"})
            paths.readable(file)
    return list(written)


def _rename_tensors(name: Callable[[str], comfy_names.Place], tensors: dict[str, torch.Tensor], adapter: dict[str, Any]
                    ) -> dict[str, torch.Tensor]:
    """Return one part's tensors in kohya's layout, under another program's names."""
    found: dict[str, dict[str, dict[str, torch.Tensor]]] = {}
    fused: dict[str, str] = {}
    for key, tensor in tensors.items():
        ending = next((ending for ending in SIDES if key.endswith(ending)), None)
        if ending is None or tensor.ndim < 2 or 0 in tensor.shape:
            raise UserError(f"the LoRA has the tensor {key} {list(tensor.shape)}, expected matrices that end in "
                            f"{' or '.join(SIDES)}")
        layer = key.removesuffix(ending)
        place = name(layer)
        fused[place.name] = place.parts
        if ending == ".lora_B.weight":
            tensor = tensor * run_lora.scale(adapter, layer, tensor.shape[1])
        found.setdefault(place.name, {}).setdefault(place.part, {})[SIDES[ending]] = tensor
    return {f"{layer}{side}": tensor for layer, parts in found.items()
            for side, tensor in _fuse_parts(layer, parts, fused[layer]).items()}


def _fuse_parts(layer: str, found: dict[str, dict[str, torch.Tensor]], parts: str) -> dict[str, torch.Tensor]:
    """Layer's matrices and alpha; of a fused layer one LoRA of its parts, block by block.

    found: matrices by part. parts: all of a fused layer; the MLP "m" of q, k, v and an MLP may have no LoRA.
    Raises UserError for a LoRA of only some parts, and for one without both matrices.
    """
    if any(len(sides) < 2 for sides in found.values()):
        raise UserError(f"the LoRA of {layer} has one of its two matrices, expected both")
    if not parts:
        [sides] = found.values()
        down, up = sides[DOWN].contiguous(), sides[UP].contiguous()
    else:
        if missing := [part for part in parts if part not in found and part != "m"]:
            raise UserError(f"{layer} is one layer of {', '.join(parts)} there, and the LoRA has none of "
                            f"{', '.join(missing)}: expected adapter.targets with to_q, to_k and to_v")
        down = torch.cat([found[part][DOWN] for part in parts if part in found])
        up = torch.block_diag(*(found[part][UP] for part in parts if part in found))
        if "m" in parts and "m" not in found:  # as wide as four of q
            up = torch.cat([up, up.new_zeros(4 * len(found["q"][UP]), up.shape[1])])
    return {DOWN: down, UP: up, ".alpha": torch.tensor(float(len(down)))}


def write_merged(run: Path, output: Path) -> Path:
    """Write the whole pipeline or language model, with the run's weights and precision, for `from_pretrained`.

    The LoRA is added to the weights in fp32 and rounded once; what diffusers keeps in fp32 (parts of Wan) stays so.
    Raises UserError if the model or the weights do not load.
    """
    config, summary = load_finished(run)
    config, _ = resolve_precision(config, pick_device(config.device))
    paths.require_folder(output)
    write = _merge_language_model if summary["unit"] == model_card.TOKENS else _merge_pipeline
    with atomic.filling(output) as folder:
        write(config, run, folder, output)
        paths.readable(folder)
    return output


def _merge_language_model(config: Config, run: Path, output: Path, _: Path) -> None:
    from flowgrpo.policies.weights import adapters

    texts = domains.sampled_by("tokens")
    options = {} if config.adapter.rank else {"model": str(run / "model"), "load": Load()}
    model, reader = texts.load(config.model_copy(update={"precision": "fp32"} | options))
    if config.adapter.rank:
        texts.attach(model, run)
        adapters.merge(model)
    model.to(DTYPES[config.precision]).save_pretrained(output)
    reader.save_pretrained(output)


def _merge_pipeline(config: Config, run: Path, output: Path, place: Path) -> None:
    from flowgrpo.policies.loading import load_tuned
    from flowgrpo.policies.pipelines import modular
    from flowgrpo.policies.pipelines.load import load_pipeline
    from flowgrpo.policies.weights.adapters import merge
    from flowgrpo.policies.weights.forwards import modules_of

    if (run / edits.FILE).is_file():
        raise UserError(f"{run} holds an edit policy, which merges into no pipeline: use it by `flowgrpo sample`")
    if config.load.gguf:
        raise UserError(f"load.denoiser is {config.load.denoiser!r}, whose quantised weights take no LoRA in: use the "
                        "LoRA's own file, or --form comfyui")
    stock = modules_of(load_pipeline(config.model, config.precision, config.trust_remote_code, files=config.load))
    kinds = {name: {key: value.dtype for key, value in module.state_dict().items()} for name, module in stock.items()}
    del stock  # free memory before the whole model is loaded again
    pipe = load_pipeline(config.model, "fp32", config.trust_remote_code, files=config.load)
    load_tuned(pipe, run)
    for name, module in modules_of(pipe).items():
        merge(module)
        for key, value in module.state_dict(keep_vars=True).items():
            value.data = value.data.to(kinds[name][key])
    modular.save(pipe, output, place)


def card(run: Path, repository: str | None = None) -> Path:
    """Write the run's model card `README.md`, with a plot of its curves, and return the card's path.

    repository: on a hub, that the card's snippet loads; None: the run's folder.
    """
    config, summary = load_finished(run)
    model_card.curves(run, run / "curves.png", summary["unit"])
    atomic.write_text(run / CARD, model_card.text(config, summary, run, repository or str(run)))
    return run / CARD
