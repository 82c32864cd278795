"""`flowgrpo contrib evolve`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from flowgrpo.cli.options import Trusted
from flowgrpo.cli.root import contrib_app
from flowgrpo.cli.train import recipe_argument, settings_for
from flowgrpo.errors import UserError


@contrib_app.command("evolve", short_help="Evolve a LoRA's singular values without gradients.",
                     context_settings={"ignore_unknown_options": True})
def evolve(
    output: Annotated[Path, typer.Option(help="The folder of the evolved LoRA; it must not exist.")],
    arguments: Annotated[list[str] | None, recipe_argument(
        "As for `train`, with adapter.init: each generation takes train.prompts.")] = None,
    generations: Annotated[int, typer.Option(min=1, help="Generations.")] = 50,
    population: Annotated[int, typer.Option(min=4, help="Points per generation.")] = 8,
    spread: Annotated[float, typer.Option(min=1e-6, help="First std, in mean singular values of a "
                                          "layer.")] = 0.1,
    trusted: Trusted = False,
) -> None:
    """Tune a trained LoRA further without gradients: evolve its singular values by the reward (ESSA)."""
    config = settings_for(output, arguments, ("generations", "population", "spread"), trusted=trusted)
    if config.adapter.init is None:
        raise UserError("adapter.init is not set: set it to a trained LoRA, whose singular values are evolved")
    from flowgrpo.policies.weights.lora_files import require_lora

    require_lora("adapter.init", config.adapter.init)
    from flowgrpo.contrib import evolve

    policy, value = _value(config)
    lines = evolve.evolve(policy.weights, value, evolve.Settings(generations, population, spread, config.seed),
                             typer.echo)
    typer.echo(evolve.write(policy.weights, output, lines))


def _value(config: Any) -> tuple[Any, Any]:
    """Return the policy of a configuration, and the mean weighted reward of its samples in a generation."""
    import torch

    from flowgrpo import rewards
    from flowgrpo.data import splits
    from flowgrpo.device import pick_device
    from flowgrpo.evaluation.measured import measure
    from flowgrpo.policies import build
    from flowgrpo.policies.policy import resolve_precision
    from flowgrpo.rewards import pairwise

    device = pick_device(config.device)
    config, _ = resolve_precision(config, device)
    functions = pairwise.measured(rewards.compose(config.trained, config.cache), {})
    prompts = splits.resolve(config)[0]
    policy: Any = build.make_policy(config, torch.device(device), build.load(config))
    rewards.require_modality(functions, policy.modality)

    def value(generation: int) -> float:
        drawn = splits.draw(prompts, config.train.prompts, generation, config.seed)
        measured = measure(policy, drawn, functions, steps=config.train.steps, guidance=config.train.guidance,
                           samples=1, micro_batch=config.train.rows, title="evolving")
        return sum(config.trained[name].weight * mean for name, mean in measured.mean().items())

    return policy, value
