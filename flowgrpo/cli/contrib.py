"""`flowgrpo contrib evolve` and `flowgrpo contrib lessons`."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from flowgrpo.cli.options import Trusted, recipe_argument
from flowgrpo.cli.root import contrib_app
from flowgrpo.cli.train import settings_for
from flowgrpo.errors import UserError
from flowgrpo.storage import atomic


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
    from flowgrpo.policies import options
    from flowgrpo.tools import evolve

    options.require_init(options.setup_of(config))
    policy, value = _value(config)
    lines = evolve.evolve(policy.weights, value, typer.echo, generations, population, spread, config.seed)
    typer.echo(evolve.write(policy.weights, output, lines))


def _value(config: Any) -> tuple[Any, Any]:
    """Policy of a configuration, and the mean weighted reward of its samples in a generation."""
    from flowgrpo import rewards
    from flowgrpo.data import sets
    from flowgrpo.device import pick_device
    from flowgrpo.evaluation.measured import measure
    from flowgrpo.policies import build
    from flowgrpo.policies.policy import resolve_precision
    from flowgrpo.rewards import pairwise

    device = pick_device(config.device)
    config, _ = resolve_precision(config, device)
    functions = pairwise.held_out_rewards(rewards.compose(config.trained, config.cache), {})
    prompts = sets.resolve(config)[0]
    policy: Any = build.make_policy(config, device)
    rewards.require_modality(functions, policy.modality)

    def value(generation: int) -> float:
        drawn = sets.draw(prompts, config.train.prompts, generation, config.seed)
        measured = measure(policy, drawn, functions, steps=config.train.steps, guidance=config.train.guidance,
                           samples=1, micro_batch=config.train.rows, title="evolving")
        return sum(config.trained[name].weight * mean for name, mean in measured.mean().items())

    return policy, value


@contrib_app.command("lessons", short_help="Learn lessons for the prompt in place of weights.",
                     context_settings={"ignore_unknown_options": True})
def learn_experience(
    output: Annotated[Path, typer.Option(help="The file of lessons to write: text.system of later commands.")],
    arguments: Annotated[list[str] | None, recipe_argument(
        "As for `train`: each epoch takes train.prompts, train.group samples of each.")] = None,
    epochs: Annotated[int, typer.Option(min=1, help="Epochs over the prompts.")] = 3,
    edits: Annotated[int, typer.Option(min=1, help="Edits of the lessons by one group, at most.")] = 2,
    lessons: Annotated[int, typer.Option(min=1, help="Lessons that are kept, at most.")] = 32,
    url: Annotated[str, typer.Option(help="The OpenAI-compatible endpoint of the language model that compares the "
                                          "samples.")] = "http://127.0.0.1:8000/v1",
    served: Annotated[str | None, typer.Option(help="Its model, where several are served.")] = None,
    key_env: Annotated[str | None, typer.Option(help="The environment variable with its key.")] = None,
    trusted: Trusted = False,
) -> None:
    """Learn lessons for the prompt in place of weights: a language model compares scored samples."""
    config = settings_for(output, arguments, ("epochs", "edits", "lessons", "url", "served", "key-env"),
                          {"method": "grpo"}, trusted)
    from flowgrpo.rewards.vlm_judge.client import Endpoint, user
    from flowgrpo.tools import experience

    endpoint = Endpoint(url=url, model=served, key_env=key_env, temperature=0.0, max_tokens=2048)
    batches, sample = _sampling(config)
    library = experience.Library(longest=lessons)

    def ask(question: str) -> str:
        return endpoint.ask(lambda _: user([{"type": "text", "text": question}]), 1)[0].text

    experience.learn(library, batches, sample, ask, epochs, edits, typer.echo)
    atomic.write_text(output, library.text() + "\n")
    typer.echo(f"{output}: {len(library.entries)} lessons")


def _sampling(config: Any) -> tuple[Any, Any]:
    """Functions of a configuration that give an epoch's prompts, and their groups with rewards."""
    import torch

    from flowgrpo import rewards
    from flowgrpo.data import sets
    from flowgrpo.device import pick_device
    from flowgrpo.distributed.signals import promptly
    from flowgrpo.evaluation.plan import Arm
    from flowgrpo.evaluation.samplers import Texts
    from flowgrpo.policies import build
    from flowgrpo.samplers.rollout import seeder

    if build.kind(config) == build.PIPELINE:
        raise UserError(f"learn-experience: got the pipeline {config.model}, expected a language model")
    device, group = pick_device(config.device), config.train.group
    sampler, base = Texts(config.model, config, None, torch.device(device)), Arm(None, {"eval_temperature": 1.0})
    functions, prompts = rewards.compose(config.trained, config.cache), sets.resolve(config)[0]
    rewards.require_modality(functions, "text")
    weights = torch.tensor([config.trained[name].weight for name in functions])

    def epoch_prompts(epoch: int) -> list[Any]:
        return sets.draw(prompts, config.train.prompts, epoch, config.seed)

    def sample(shown: list[str], epoch: int) -> tuple[list[list[str]], list[list[float]]]:
        of, seed = epoch_prompts(epoch), seeder(config.seed, epoch)
        groups, totals = [], []
        for place, prompt in enumerate(of):
            written = sampler.draw(base, [replace(prompt, text=shown[place])] * group,
                                   [seed(place, number) for number in range(group)])
            scores = promptly(partial(rewards.score, functions, written, [prompt.text] * group,
                                      [prompt.metadata] * group, group, policy=sampler.policy))
            groups.append([str(text) for text in written])
            totals.append((scores @ weights.to(scores)).tolist())
        return groups, totals

    return lambda epoch: [prompt.text for prompt in epoch_prompts(epoch)], sample
