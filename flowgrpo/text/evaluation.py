"""Texts from saved weights: those of a language model, and base against tuned on the same prompts."""

from pathlib import Path
from typing import Any

import torch

from flowgrpo.data import sets
from flowgrpo.data.prompts import Prompt
from flowgrpo.device import require_generators
from flowgrpo.evaluation import best_of as choice
from flowgrpo.evaluation import draw, images, run_rewards
from flowgrpo.evaluation.evaluate import make_plan
from flowgrpo.evaluation.measured import measure, spread
from flowgrpo.evaluation.pages.before_after import draw_measured
from flowgrpo.evaluation.plan import Arm
from flowgrpo.evaluation.samplers import Texts
from flowgrpo.policies import loading
from flowgrpo.policies.checkpoints import config_of, run_config
from flowgrpo.samplers.rollout import seeder
from flowgrpo.storage import paths
from flowgrpo.text.policies.engines import load, sampling_settings, settings
from flowgrpo.types import Completion


def sample(model: str, lora: Path | None, prompts: list[str], count: int, seed: int, temperature: float | None = None,
           image: str | None = None, precision: str | None = None, best_of: int = 1,
           by: str | dict[str, Any] = "") -> list[Completion]:
    """Sample `count` completions per prompt, in order; greedy for a count of one without a temperature.

    lora: a finished run, whose `text` settings apply, or a folder with a peft adapter. image: file of an image shown
    with every prompt to a model that reads images. precision: None takes the run's, or the device's default.
    best_of: draws per completion, of which the one with the highest reward `by` is kept, a name or its rule by name.
    Raises UserError for a model or weights that do not load.
    """
    run = config_of(lora)
    best, drawn = choice.make(best_of, by, run), count * best_of
    require_generators(len(prompts) * drawn, "completions")
    of, numbers = seeder(seed, 0), [(i, k) for i in range(len(prompts)) for k in range(drawn)]
    written = Texts(model, run, precision, torch.device("cpu")).draw(
        Arm(lora, sampling_settings(run, drawn, temperature)), [Prompt(prompts[i], image=image) for i, _ in numbers],
        [of(i, k) for i, k in numbers])
    if best is None:
        return written
    picked = best.pick(written, [Prompt(text) for text in prompts for _ in range(count)])
    return [written[place * best_of + number] for place, (number, _) in enumerate(picked)]


@loading.memory_told()
def sample_images(model: str, lora: Path | None, prompts: list[str], count: int, seed: int, output: Path,
             guidance: float | None = None, temperature: float | None = None, precision: str | None = None,
             best_of: int = 1, by: str | dict[str, Any] = "") -> list[Path]:
    """Draw `count` images per prompt by image tokens to the folder `output`, or one to the PNG `output`; return their
    paths, in order.
    guidance, temperature: None takes the run's, or 5 and 1. Other arguments: see `sample`.
    Raises UserError for a model or weights that do not load."""
    one = images.one_file(output, len(prompts) * count, images.FILES["image"])
    images.require_disk(output, len(prompts) * count)
    plan = make_plan(model, lora, samples=count, guidance=guidance, seed=seed, temperature=temperature,
                     precision=precision, best_of=best_of, by=by, generates="image")
    hand, [arm] = draw.Drawer(plan, loading.place()), plan.arms
    folder, names = (output.parent, iter([output.name])) if one else (output, images.names_of(prompts, count))
    return [*images.draw_files(hand, arm, [Prompt(text) for text in prompts], count, folder, names, "image")]


def grid(run: Path, prompts: Path | None, count: int, seed: int, output: Path) -> Path:
    """Write base and tuned completions of `count` prompts side by side, with the run's rewards; returns `output`.
    prompts: a prompt file, or None for the run's held-out prompts.
    Raises UserError for a folder without finished weights."""
    config = run_config(run)
    config = settings(config.model, config, {})
    paths.require_file(output)
    chosen = spread(sets.prompts_to_show(config, prompts), count)
    functions = run_rewards.rewards_of_run(config)
    base, after = (measure(load(config, lora), chosen, functions, steps=0, guidance=config.eval.guidance, samples=1,
                           micro_batch=config.train.rows, keep=len(chosen), title=title)
                   for lora, title in ((None, "base"), (run, "tuned")))
    draw_measured(output, {"before": base, "after": after})
    return output
