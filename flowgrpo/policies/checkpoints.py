"""Weights of a checkpoint in a stock pipeline or a language model: RUN/checkpoints/epoch-N, as a finished run's."""

import contextlib
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from flowgrpo import domains, trust
from flowgrpo.config.parse import load as load_config
from flowgrpo.config.schema import Config
from flowgrpo.config.sections import Adapter
from flowgrpo.device import drawing, pick_device
from flowgrpo.errors import UserError
from flowgrpo.methods import overlay
from flowgrpo.methods.method import Method
from flowgrpo.methods.targets import LatentEdits
from flowgrpo.policies import build
from flowgrpo.policies.pipelines import edits
from flowgrpo.policies.weights import adapters
from flowgrpo.policies.weights.trainable import TrainableWeights
from flowgrpo.samplers.kernels import NOISE_NETWORK
from flowgrpo.storage import checkpoint
from flowgrpo.storage.places import CONFIG, is_checkpoint, run_of, weights_of


def run_config(path: Path) -> Config:
    """Configuration of a run's folder, or of the run that saved a checkpoint. UserError if it is none."""
    run = run_of(path)
    config = load_config(run / CONFIG)
    return config.model_copy(update={"trust_remote_code": trust.remote_code(config.trust_remote_code, run)})


def config_of(path: Path | None) -> Config | None:
    """`run_config` of a run or of its checkpoint; None for other weights, and for none."""
    return run_config(path) if path is not None and (is_checkpoint(path) or (path / CONFIG).is_file()) else None


def source(model: str, lora: str | Path | None = None, epoch: int | None = None) -> tuple[str, Path | None]:
    """(model, weights or None) of a command's arguments; a run or its checkpoint stands for both. epoch: of the
    checkpoint in place of the run's result. UserError for a run with further weights, and for an epoch without a
    run."""
    given, weights = Path(model), None if lora is None else Path(lora)
    if config_of(given) is not None:
        if weights is not None:
            raise UserError(f"{model} is a run, which brings its weights: leave out --lora, or give its model")
        return run_config(given).model, weights_of(given, epoch)
    if epoch is None:
        return model, weights
    if weights is None:
        raise UserError(f"--epoch {epoch}: goes with a run, and {model} is none")
    return model, weights_of(weights, epoch)


def holds_edits(path: Path) -> bool:
    """True for the result or a checkpoint of a run that trained an edit policy."""
    return (path / edits.FILE).is_file() or is_checkpoint(path) and \
        isinstance(_method(run_config(path)).target, LatentEdits)


def _method(config: Config) -> Method:
    return overlay.with_parts(overlay.preset(config.method), config.parts)


def load(pipe: Any, path: Path) -> TrainableWeights:
    """Load a checkpoint's weights (their moving average if the run evaluates that) into a stock pipeline; return them.
    Edits of finals are attached to it. UserError if they belong to another model."""
    from flowgrpo.policies.pipelines.load import trainable_modules

    config = run_config(path)
    method = _method(config)
    if isinstance(method.target, LatentEdits):
        policy = edits.over(pipe, method.target.edit, config.call)
        take(policy.weights, config, path)
        policy.attach()
        return policy.weights
    weights = TrainableWeights(pipe, trainable_modules(pipe, method.rollout.adapted), _fresh(config.adapter))
    take(weights, config, path)
    return weights


def language_policy(config: Config, path: Path, device: str | torch.device = "cpu") -> Any:
    """Language model with a checkpoint's weights. Raises UserError if they belong to another model."""
    texts = domains.sampled_by("tokens")
    policy = texts.policy(config, texts.load(config), _fresh(config.adapter), device)
    take(policy.weights, config, path)
    return policy


def _fresh(adapter: Adapter) -> Adapter:
    """Adapter without the LoRA that it started from, since a checkpoint holds all of it."""
    return adapter.model_copy(update={"init": None})


def take(live: TrainableWeights, config: Config, path: Path) -> None:
    """Copy a checkpoint's weights into trainable ones. UserError if they belong to another model, or are not finite."""
    room = "ema/" if config.eval.weights == "ema" else "weights/"
    tensors, _ = checkpoint.load(path)
    held = {key: tensor for key, tensor in checkpoint.within(tensors, room).items()
            if not key.startswith(f"{NOISE_NETWORK}.")}  # not the pipeline's
    if live.named.keys() != held.keys():
        raise UserError(f"{path} holds other weights than {config.model!r} with the run's adapter has")
    adapters.require_read(path, held)
    live.load(held)


@contextlib.contextmanager
def as_finished(path: Path) -> Iterator[Path]:
    """Context manager: return a temporary folder with a checkpoint's weights in the files of a finished run. UserError
    if they belong to another model."""
    config, device = run_config(path), pick_device("auto")
    config = config.model_copy(update={"precision": drawing(config.precision, device)})
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if writes := build.writes(config.model, config):
            weights: TrainableWeights = language_policy(config, path).weights
        else:
            from flowgrpo.policies.pipelines.load import load_pipeline

            pipe = load_pipeline(config.model, config.precision, config.trust_remote_code, files=config.load)
            weights = load(pipe, path)
        weights.save(folder)
        (folder / CONFIG).write_text(config.yaml(), encoding="utf-8")
        summary = {"unit": "tokens" if writes else "denoiser evaluations"}
        (folder / "summary.json").write_text(json.dumps(summary), encoding="utf-8")
        yield folder
