"""Stock pipelines with saved weights: loaded on a device, and tuned by a run, its checkpoint or any LoRA.

A pipeline loads the weights as for any user of diffusers.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from flowgrpo.config.schema import Config
from flowgrpo.config.sections import Load, Memory
from flowgrpo.device import concrete, ran_out
from flowgrpo.errors import UserError
from flowgrpo.policies import checkpoints, lora_fit
from flowgrpo.policies.checkpoints import config_of
from flowgrpo.policies.pipelines import edit_networks, edit_policy
from flowgrpo.policies.pipelines.call import placed
from flowgrpo.policies.pipelines.load import denoisers, load_pipeline, text_encoders
from flowgrpo.policies.weights import adapters, finite, host_weights
from flowgrpo.policies.weights.lora_files import LORA_FILE, attach, tell
from flowgrpo.policies.weights.memory_options import Encoders, decode_in_parts, require_quantiser
from flowgrpo.policies.weights.rlg import Branches


@contextlib.contextmanager
def memory_told() -> Iterator[None]:
    """Context manager and decorator: report a device's lack of memory in one line."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not ran_out(error):
            raise
        why = next(iter(str(error).splitlines()), "") or type(error).__name__
        raise UserError(f"out of memory ({why}): set memory.weights, memory.encoders or "
                        "memory.vae in the config.yaml of a pipeline's run, free the device, or use the CPU "
                        "(CUDA_VISIBLE_DEVICES=-1)") from error


def place(device: torch.device | None = None) -> torch.device:
    """Return the device that pipelines draw on: a GPU, by default the first, or the CPU if there is none."""
    return torch.device(device or "cuda") if torch.cuda.is_available() else torch.device("cpu")


def make_pipeline(model: str, precision: str, trust_remote_code: bool = False, device: torch.device | None = None,
                  memory: Memory = Memory(), files: Load = Load()) -> Any:
    """Load the pipeline on a GPU (by default the first) or on the CPU.

    precision: `auto` takes the device's default.
    files: where the model's weights are.
    memory: as in a run: storage and place of weights, decoding. A LoRA that is loaded later comes with its block. 4-bit
    weights need a GPU and are loaded in full on the CPU.
    Raises UserError if a required package is absent.
    """
    device = place(device)
    gpu = device.type == "cuda"
    weights = "full" if memory.weights == "nf4" and not gpu else memory.weights
    require_quantiser(weights)
    pipe = load_pipeline(model, concrete(precision, device), trust_remote_code, weights, files, checker=False)
    away = None if memory.encoders == "keep" else "cpu"
    modules = denoisers(pipe)
    encoders = Encoders(pipe, device, away, modules if host_weights.later(memory) else ())
    if away is not None:
        encoders.attend(pipe)
        pipe.__class__ = placed(type(pipe), device)  # diffusers takes the place of a part that may be away
    if host_weights.later(memory):
        for module in modules.values():
            module.requires_grad_(False)
        host_weights.place(modules.values(), encoders, device, memory)
    decode_in_parts(pipe, memory.vae)
    return pipe


def files_of(config: Config | None, model: str) -> Load:
    """Return the `load` settings with which a run loaded its model; the defaults for another model."""
    return config.load if config is not None and config.model == model else Load()


def load_tuned(pipe: Any, path: Path, told: bool = True) -> None:
    """Load a run's result, its checkpoint, or any LoRA, into a stock pipeline.

    told: print what of a LoRA of others was applied.

    Raises UserError if there is none, or none that fits."""
    modules = denoisers(pipe)
    trained = [name for name in modules if path.is_dir() and (path / name / "config.json").is_file()]
    modules |= text_encoders(pipe)
    if checkpoints.is_checkpoint(path):
        _load_checkpoint(pipe, path)
    elif checkpoints.holds_edits(path):
        config = config_of(path)
        edit_policy.over(pipe, path, config.call if config else {}).attach()
    elif path.is_file() or (path / LORA_FILE).is_file() or (path / adapters.CONFIG).is_file() or any(
            (path / name / adapters.CONFIG).is_file() for name in modules):
        with _told(path, pipe):
            applied = attach(pipe, modules, path, "default")
        if told and config_of(path) is None:  # of others, whose files come in many forms
            tell(applied)
    elif trained:
        for name in trained:
            module = getattr(pipe, name)
            with _told(path / name, pipe):
                tuned = type(module).from_pretrained(path / name, dtype=module.dtype).to(module.device)
                pipe.register_modules(**{name: tuned})
    else:
        require_weights(path)
        raise UserError(f"{path} holds no weights of {type(pipe).__name__}: was it trained on another model?")


def load_branches(pipe: Any, path: Path) -> Branches:
    """Load weights as `load_tuned` does, and keep the base for RLG. Raises UserError for an edit policy."""
    if checkpoints.holds_edits(path):
        raise UserError(f"--rlg: {path} holds an edit policy, which leaves the denoiser as it is: leave --rlg out")
    first = denoisers(pipe)
    load_tuned(pipe, path)
    return Branches(pipe, first)


def require_weights(path: Path) -> None:
    """Raise UserError, before anything is drawn, if a path has no weights, or a LoRA that is not finite."""
    known = any((path / name).is_file() for name in (LORA_FILE, edit_networks.FILE))
    if path.is_file() or checkpoints.is_checkpoint(path) or known or (path / adapters.CONFIG).is_file() or any(
            file for name in (adapters.CONFIG, "config.json") for file in path.glob(f"*/{name}")):
        if (path / LORA_FILE).is_file():
            finite.require_file(path / LORA_FILE)
        return
    hint = "the run has not finished: --resume it" if (path / "config.yaml").is_file() else \
        "expected a finished run, a folder with a LoRA, or its file"
    raise UserError(f"no weights at {path} ({LORA_FILE} is missing): {hint}")


def _load_checkpoint(pipe: Any, path: Path) -> None:
    """Load a checkpoint's weights as a finished run's are loaded, so that equal weights draw equal pictures: a LoRA is
    trained in fp32, and stock diffusers loads it in the precision of its module."""
    modules = denoisers(pipe) | text_encoders(pipe)
    precisions = {f"{name}.{key}": value.dtype for name, module in modules.items()
                  for key, value in module.named_parameters()}
    weights = checkpoints.load(pipe, path)
    if checkpoints.holds_edits(path):
        return
    if not weights.adapter.rank:
        for key, parameter in weights.named.items():
            parameter.data = parameter.data.to(precisions[key])
        return
    with tempfile.TemporaryDirectory() as folder:
        weights.save(Path(folder))
        for module in weights.modules.values():
            adapters.remove(module)
        load_tuned(pipe, Path(folder), told=False)


@contextlib.contextmanager
def _told(path: Path, pipe: Any) -> Iterator[None]:
    """Context manager: turn diffusers' errors on weights into one line, without its log."""
    from diffusers.utils import logging

    level = logging.get_verbosity()
    logging.set_verbosity(logging.CRITICAL)
    try:
        yield
    except UserError as error:
        raise UserError(f"{error}{lora_fit.trained_on(path)}") from error
    except Exception as error:
        raise UserError(f"{path} does not load into {type(pipe).__name__}: {' '.join(str(error).split())[:200]}"
                        f"{lora_fit.trained_on(path)}") from None
    finally:
        logging.set_verbosity(level)
