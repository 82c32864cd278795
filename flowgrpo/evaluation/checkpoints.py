"""Weights of a checkpoint in a stock pipeline or a language model: RUN/checkpoints/epoch-N, as a finished run's."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from flowgrpo.config.parse import load as load_config
from flowgrpo.config.schema import Config
from flowgrpo.data import provenance
from flowgrpo.errors import UserError
from flowgrpo.methods import overlay
from flowgrpo.policies import build
from flowgrpo.policies.language.causal_lm import CausalLM
from flowgrpo.policies.weights.trainable import TrainableWeights
from flowgrpo.samplers import learned_noise
from flowgrpo.storage import checkpoint

if TYPE_CHECKING:
    import torch


def is_checkpoint(path: Path | None) -> bool:
    """Return True for a folder that a run saved as a checkpoint."""
    return path is not None and (path / checkpoint.FILE).is_file()


def run_config(path: Path) -> Config:
    """Return the configuration of a run's folder, or of the run that saved a checkpoint.

    Raises UserError if it is none.
    """
    run = path.parent.parent if is_checkpoint(path) else path
    if not (run / "config.yaml").is_file():
        raise UserError(f"{path} is not a run: it has no config.yaml; expected a folder that `flowgrpo train` wrote")
    config, prompts = load_config(run / "config.yaml"), run / provenance.PROMPTS
    moved = Path(config.prompts) == config.folder / provenance.PROMPTS and prompts.is_file()  # moved since, or archived
    return config.model_copy(update={"prompts": str(prompts)}) if moved else config


def config_of(path: Path | None) -> Config | None:
    """Return `run_config` of a run or of its checkpoint; None for other weights, and for none."""
    known = path is not None and (is_checkpoint(path) or (path / "config.yaml").is_file())
    return run_config(path) if known and path is not None else None


def load(pipe: Any, path: Path) -> None:
    """Load a checkpoint's weights (their moving average if the run evaluates that) into a stock pipeline.

    Raises UserError if they belong to another model.
    """
    from flowgrpo.policies.pipelines.load import trained_modules

    config = run_config(path)
    method = overlay.with_parts(overlay.preset(config.method), config.parts)
    take(TrainableWeights(pipe, trained_modules(pipe, method.rollout.adapted), config.adapter), config, path)


def language_policy(config: Config, path: Path, device: str | torch.device = "cpu") -> CausalLM:
    """Return a language model with a checkpoint's weights. Raises UserError if they belong to another model."""
    policy = build.language_policy(config, build.load_language(config), config.adapter, device)
    take(policy.weights, config, path)
    return policy


def take(live: TrainableWeights, config: Config, path: Path) -> None:
    """Copy a checkpoint's weights into trainable ones. Raises UserError if they belong to another model."""
    room = "ema/" if config.eval.weights == "ema" else "weights/"
    tensors, _ = checkpoint.load(path)
    held = {key.removeprefix(room): tensor for key, tensor in tensors.items()
            if key.startswith(room) and not key.startswith(f"{room}{learned_noise.NAME}.")}
    if live.named.keys() != held.keys():
        raise UserError(f"{path} holds other weights than {config.model!r} with the run's adapter has")
    live.load(held)
