"""A run's LoRA on a distilled sibling of its model (`flowgrpo eval RUN --on MODEL`).

The sibling and the sibling with the LoRA draw the run's held-out prompts with its seeds, and the run's rewards score
them: `kept` says what of the gain is left.
"""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from flowgrpo import trust
from flowgrpo.config.parse import load as load_config
from flowgrpo.config.schema import Config
from flowgrpo.data import sets
from flowgrpo.data.prompts import Prompt
from flowgrpo.distributed.processes import Processes
from flowgrpo.errors import UserError
from flowgrpo.evaluation import kept, run_rewards
from flowgrpo.evaluation.kept import Sibling
from flowgrpo.evaluation.measured import EVAL_SEED, Measured, halves, measure, readable, spread
from flowgrpo.evaluation.report import report, snapshots
from flowgrpo.evaluation.statistics import format_interval
from flowgrpo.methods.groups import Adapted
from flowgrpo.policies import loading
from flowgrpo.policies.pipelines import few_steps
from flowgrpo.policies.pipelines.frames import clips_of
from flowgrpo.policies.weights.forwards import replaced
from flowgrpo.policies.weights.trainable import disable_adapters, lora_layers
from flowgrpo.starter import EVAL
from flowgrpo.storage.json_files import read_object
from flowgrpo.storage.places import run_of

SHOWN = 4  # prompts on the page of images
MICRO_BATCH = 8  # images per call of the sibling, where the run's is not known


def sibling_of(config: Config, model: str, lora: str | None = None, steps: int | None = None,
               guidance: float | None = None, scheduler: Mapping[str, Any] | None = None, scale: float = 1.0,
               where: str = "--on") -> Sibling:
    """The sibling with the steps and the guidance of its card, where they are not given.

    where: how a message names the option. Raises UserError where they are not known, and for the run's own model.
    """
    if model == config.model and lora is None:
        raise UserError(f"{where}: {model} is the model that the run trained: expected a distilled one, or a LoRA that "
                        "distils it beside it")
    found = Sibling(model, steps or 0, guidance or 0.0, lora, scale, scheduler or {})
    facts, card = few_steps.ahead(model, found.files(config)), EVAL.get(model, {}) if lora is None else {}
    known = steps or card.get("num_inference_steps") or (facts.steps if facts.why else 0)
    if not known:
        raise UserError(f"{where}: {found.name} is not known as a model of few steps: check the name, or give its "
                        f"steps ({'--on-steps' if where == '--on' else f'{where}.steps'})")
    own = card.get("guidance", facts.guidance)
    return replace(found, steps=int(known), guidance=own if guidance is None else guidance)


# --- measure a finished run ------------------------------------------------------------------------------------------

@loading.memory_told()
def evaluate(source: str, model: str, lora: str | None = None, steps: int | None = None, guidance: float | None = None,
             weights: Sequence[float] = (1.0,), precision: str | None = None) -> tuple[Path, dict[str, Any]]:
    """Measure a finished run's LoRA on a distilled sibling; write the result into the run's folder and its report.

    weights: of the LoRA. Returns the result's path and the result. Raises UserError for a run of texts, without a LoRA,
    without a gain, or whose prompts have changed; and for a LoRA that does not fit.
    """
    # Refuse what has nothing to measure, before a model is loaded.
    run = run_of(Path(source))
    config = load_config(run / "config.yaml")
    sibling, own = sibling_of(config, model, lora, steps, guidance), own_scores(run, config)
    gain = kept.gain_of(*(kept.totals(scores, config.rewards, config.eval.samples) for scores in own))
    if not gain.low > 0:
        raise UserError(f"{run} has no gain to keep: its trained rewards changed by "
                        f"{format_interval(gain.mean, gain.low, gain.high, 3, '+')} (95 %) on its own model at "
                        f"{config.eval.steps} steps: train longer, or measure more prompts (eval.prompts)")
    loading.require_weights(run)
    loading.require_fit(model, run, sibling.files(config))
    prompts, seed = prompts_of(run, config)
    functions = run_rewards.rewards_by_name(config, [])
    if lacking := [name for name in config.rewards if name in own[0] and name not in functions]:
        raise UserError(f"reward {lacking[0]!r} {run_rewards.WHY}: add {trust.FLAG} if you trust the run")
    rows = config.train.micro_batch if isinstance(config.train.micro_batch, int) else MICRO_BATCH
    # The sibling alone, and with the LoRA at each weight.
    with worn_sibling(config, sibling, run, precision) as (policy, worn):
        def measured(weight: float) -> Measured:
            with worn(weight), clips_of(policy, config.eval.frames):
                sound, lost = readable(prompts, config.eval.frames or config.call.get("num_frames"), Processes(),
                                       sibling.name)
                found = measure(policy, sound, functions, steps=sibling.steps, guidance=sibling.guidance,
                                samples=config.eval.samples, micro_batch=rows,
                                negative=config.negative_prompt, keep=min(config.eval.grid, SHOWN),
                                title=f"{sibling.name}{f', LoRA at {weight:g}' if weight else ''}", model=model,
                                reference=None if not weight else lambda: worn(0.0), run_seed=seed)
            return found.without(prompts, lost, min(config.eval.grid, SHOWN)) if any(lost) else found

        base, found = measured(0.0), {weight: measured(weight) for weight in sorted(weights)}
    result = kept.record(config, sibling, own, base, found, seed)
    path = kept.write(run, result, base, found)
    report.write(run)
    return path, result


def own_scores(run: Path, config: Config) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Scores of a finished run's reported prompts, before and after training. Raises UserError without them."""
    if not config.adapter.rank:
        raise UserError(f"{run} trained all weights (adapter.rank 0), which replace the sibling's: expected a run with "
                        "a LoRA")
    nouns = run / snapshots.FOLDER / "nouns.json"
    if nouns.is_file() and read_object(nouns, snapshots.MEND).get("sample") not in ("image", "clip"):
        raise UserError(f"{run} trained a language model, and --on is of images and clips: expected a run of a "
                        "pipeline")
    sides = []
    for name in ("before", "after"):
        file = run / snapshots.FOLDER / f"{name}.json"
        if not file.is_file():
            raise UserError(f"{run} has no {snapshots.FOLDER}/{name}.json: expected a finished run with eval.prompts")
        scores = read_object(file, snapshots.MEND, scores=dict)["scores"]
        sides.append({key: [np.nan if value is None else value for value in values] for key, values in scores.items()})
    return sides[0], sides[1]


def prompts_of(run: Path, config: Config) -> tuple[list[Prompt], int]:
    """Prompts that a finished run reported, and their samples' seed. Raises UserError if the file has changed since."""
    settings = read_object(run / "before.json", "run the training anew", settings=dict)["settings"]
    held_out, shown = sets.resolve(config)[1], [text for text, *_ in settings["shown"]]
    for side in (held_out, halves(held_out)[1]):
        prompts = spread(side, config.eval.prompts)
        if [prompt.text for prompt in prompts] == shown:
            return prompts, int(settings.get("seed", EVAL_SEED))
    raise UserError(f"{run}: the held-out prompts of {config.prompts} are not those that the run measured: restore the "
                    "file")


@contextlib.contextmanager
def worn_sibling(config: Config, sibling: Sibling, run: Path, precision: str | None) -> Iterator[tuple[Any, Any]]:
    """Context manager: the policy of a sibling with the run's LoRA, and a function of a weight, the context manager in
    which the LoRA has it; 0: the sibling alone."""
    from flowgrpo.policies.pipelines.load import denoisers, load_pipeline, text_encoders
    from flowgrpo.policies.pipelines.pipeline import PipelinePolicy
    from flowgrpo.policies.policy import resolve_precision

    device = loading.place()
    asked = config.model_copy(update={"precision": precision or config.precision})
    asked, _ = resolve_precision(asked, device)
    memory = config.memory.model_copy(update={"shard": False, "context_parallel": 1})
    pipe = load_pipeline(sibling.model, asked.precision, config.trust_remote_code, memory.weights,
                         sibling.files(config), checker=False)
    loading.load_tuned(pipe, run, told=False)
    parts = denoisers(pipe) | text_encoders(pipe)
    by_part = {name: [*lora_layers(part).values()] for name, part in parts.items()}
    encoders = any(by_part[name] for name in text_encoders(pipe))
    policy = PipelinePolicy(pipe, None, device=device, precision=asked.precision, guidance=sibling.guidance,
                            call=config.call, memory=memory, fps=config.fps, adapted=Adapted(encoders=encoders))
    layers = [layer for of_part in by_part.values() for layer in of_part]
    if not layers:
        raise UserError(f"{run} holds no LoRA: expected a run with adapter.rank of 1 or more")
    yield policy, lambda weight: at_weight(layers, weight)


def at_weight(layers: Sequence[Any], weight: float) -> contextlib.AbstractContextManager[None]:
    """Context manager: LoRAs act with a weight times their scale; 0: they are off."""
    if not weight:
        return disable_adapters(layers)
    return replaced("scaling", *((layer, {name: value * weight for name, value in layer.scaling.items()})
                                 for layer in layers))
