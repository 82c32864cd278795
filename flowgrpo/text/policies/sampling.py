"""Language models for sampling: with the settings of a run or a command, and the weights of a run or a folder."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from flowgrpo.config.schema import Config
from flowgrpo.config.sections import Load
from flowgrpo.device import drawing
from flowgrpo.errors import UserError
from flowgrpo.policies import build, checkpoints
from flowgrpo.policies.precision import resolve_precision
from flowgrpo.policies.weights import adapters
from flowgrpo.text.policies.causal_lm import CausalLM
from flowgrpo.text.policies.text_weights import attach

if TYPE_CHECKING:
    import torch


def settings(model: str, run: Config | None, text: dict[str, Any], device: str | torch.device = "cpu",
             precision: str | None = None) -> Config:
    """Return the configuration of a language model's sampling: that of the run that trained it, with `text` on top.
    precision: as in `drawing`."""
    known = Config(method="grpo") if run is None else run
    files = known.load if known.model == model else Load()
    return known.model_copy(update={"model": model, "load": files, "text": known.text.model_copy(update=text),
                                    "precision": drawing(known.precision, device, precision)})


def asked(run: Config | None, count: int, temperature: float | None, max_tokens: int | None = None) -> dict[str, Any]:
    """Return the `text` settings that completions depend on, of a run or the defaults, for `count` completions per
    prompt. The default temperature of several is 1."""
    text = (Config() if run is None else run).text
    warm = (text.eval_temperature or float(count > 1)) if temperature is None else temperature
    return {"eval_temperature": warm, "max_tokens": max_tokens or text.max_tokens, "system": text.system,
            "template": text.template}


def load(config: Config, lora: Path | None, device: str | torch.device = "cpu") -> CausalLM:
    """Load the policy for sampling, with nothing trained.
    Raises UserError if something does not load."""
    config, _ = resolve_precision(config, device)
    if lora is not None and (lora / "model" / "config.json").is_file():  # a run without a LoRA
        config, lora = config.model_copy(update={"model": str(lora / "model"), "load": Load()}), None
    if lora is not None and checkpoints.is_checkpoint(lora):
        return checkpoints.language_policy(config, lora, device)
    loaded, reader = build.load_language(config)
    if lora is not None:
        if not (lora / adapters.CONFIG).is_file():
            hint = "the run has not finished: --resume it" if (lora / "config.yaml").is_file() else \
                "expected a finished run, or a folder with an adapter"
            raise UserError(f"no weights at {lora} ({adapters.CONFIG} is missing): {hint}")
        attach(loaded, lora)
    return build.language_policy(config, (loaded, reader), None, device)
