"""Texts from saved weights: those of a language model, and base against tuned on the same prompts."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from flowgrpo.config.schema import Config
from flowgrpo.config.sections import Load
from flowgrpo.data import splits
from flowgrpo.data.prompts import Prompt, load_prompts
from flowgrpo.device import drawing, require_generators
from flowgrpo.errors import UserError
from flowgrpo.evaluation import best_of as choice
from flowgrpo.evaluation import checkpoints, run_rewards
from flowgrpo.evaluation.checkpoints import config_of, run_config
from flowgrpo.evaluation.measured import Measured, measure, spread
from flowgrpo.evaluation.pages.before_after import draw_pairs
from flowgrpo.policies import build
from flowgrpo.policies.precision import resolve_precision
from flowgrpo.policies.weights import adapters
from flowgrpo.samplers.rollout import seeder
from flowgrpo.storage import paths
from flowgrpo.text.policies.causal_lm import CausalLM
from flowgrpo.text.policies.text_weights import attach
from flowgrpo.types import Completion

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


def sample(model: str, lora: Path | None, prompts: list[str], count: int, seed: int, temperature: float | None = None,
           image: str | None = None, precision: str | None = None, best_of: int = 1,
           by: str | dict[str, Any] = "") -> list[Completion]:
    """Sample `count` completions per prompt, in order; greedy for a count of one without a temperature.

    lora: a finished run, whose `text` settings apply, or a folder with a peft adapter. image: file of a picture shown
    with every prompt to a model that reads images. precision: None takes the run's, or the device's default.
    best_of: draws per completion, of which the one with the highest reward `by` is kept, a name or its rule by name.
    Raises UserError for a model or weights that do not load.
    """
    run = config_of(lora)
    best, drawn = choice.make(best_of, by, run), count * best_of
    policy = load(settings(model, run, asked(run, drawn, temperature), precision=precision), lora)
    require_generators(len(prompts) * drawn, "completions")
    of, numbers = seeder(seed, 0), [(i, k) for i in range(len(prompts)) for k in range(drawn)]
    given = policy.encode([prompts[i] for i, _ in numbers], images=[image] * len(numbers))
    written = policy.generate(given, policy.generators(of(i, k) for i, k in numbers))
    if best is None:
        return written
    picked = best.pick(written, [Prompt(text) for text in prompts for _ in range(count)])
    return [written[place * best_of + number] for place, (number, _) in enumerate(picked)]


def grid(run: Path, prompts: Path | None, count: int, seed: int, output: Path) -> Path:
    """Write base and tuned completions of `count` prompts side by side, with the run's rewards; returns `output`.

    prompts: a prompt file, or None for the run's held-out prompts.
    Raises UserError for a folder without finished weights.
    """
    config = run_config(run)
    config = settings(config.model, config, {})
    paths.require_file(output)
    chosen = spread(load_prompts(prompts) if prompts else splits.resolve(config)[1], count)
    functions = run_rewards.measured(config)
    base, after = (_measured(config, lora, chosen, functions) for lora in (None, run))
    draw_pairs(output, base, after)
    return output


def _measured(config: Config, lora: Path | None, prompts: list[Prompt], functions: dict[str, Any]) -> Measured:
    policy = load(config, lora)
    return measure(policy, prompts, functions, steps=0, guidance=0.0, samples=1, micro_batch=config.train.rows,
                   keep=len(prompts), title="base" if lora is None else "tuned")


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
